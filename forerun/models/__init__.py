"""Checkpoints and model descriptions, independent of any framework."""
