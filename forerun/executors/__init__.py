"""The executors own arrays: toy (by hand), cpu (native kernels), torch."""
