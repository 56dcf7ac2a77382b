"""Kernels for CUDA, and the values that they take and give."""
