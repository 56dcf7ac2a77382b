"""Reads checkpoints with quantised matrices, by the definitions of their formats."""
