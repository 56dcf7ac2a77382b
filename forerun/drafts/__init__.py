"""Drafts on disk: heads, blocks, prediction layers, whole models, n-gram tables."""
