"""The algorithm in NumPy: tree, sampling, noise, accept. Parity tests compare the executors with
these files, and their attention with tests/references/verify.py.
"""
