"""Executors, which own the arrays of a model: toy (for tests, computable by hand), cpu (native
kernels), torch, jax.
"""
