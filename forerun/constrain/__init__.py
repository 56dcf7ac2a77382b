"""Structured output: grammars, their compilation, and one mask per node of a tree."""
