"""The algorithm, exactly, in NumPy: tree, draft, verify, sampling, accept, policy.

Everything else in the package is held to these files by parity tests.
"""
