"""Composition: a configuration becomes a loaded target and a running engine."""
