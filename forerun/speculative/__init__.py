"""The algorithm in NumPy: tree, sampling, noise, accept. Parity tests hold the executors to these
files, and their attention to tests/twins/verify.py.
"""
