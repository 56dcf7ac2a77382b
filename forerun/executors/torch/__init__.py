"""The torch executor: reference on CPU, and CUDA."""
