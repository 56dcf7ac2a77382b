"""Checkpoints with quantised matrices, read by their formats' definitions."""
