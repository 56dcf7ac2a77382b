"""Matches one sequence with a grammar: what may follow at every node of a draft tree."""
