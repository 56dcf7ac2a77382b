"""Drafters: what proposes draft tokens."""
