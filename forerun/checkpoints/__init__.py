"""Reads checkpoints on disk as tensors with canonical names, independent of any framework."""
