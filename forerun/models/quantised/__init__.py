"""Checkpoints whose matrices are stored in few bits, read by their formats' definitions."""
