"""Executors own arrays: toy (computable by hand), cpu (native kernels), torch, jax."""
