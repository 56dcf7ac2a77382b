"""Checkpoints on disk as canonical tensors, independent of any framework."""
