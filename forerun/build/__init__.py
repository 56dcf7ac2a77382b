"""Composition: builds a loaded target and a running engine from a configuration."""
