"""Triton kernels for CUDA, and their inputs and results."""
