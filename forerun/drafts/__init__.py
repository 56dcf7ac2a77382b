"""Drafts on disk: heads, block drafters, prediction layers, whole models, n-gram tables."""
