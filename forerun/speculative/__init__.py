"""The algorithm, exactly, in NumPy: tree, draft, verify, sampling, accept. Parity tests hold the
executors to these files.
"""
