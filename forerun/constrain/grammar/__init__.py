"""Grammars: the constraint in a request, and those of answers with tool calls."""

from forerun.constrain.grammar.grammar import LETTER, Grammar, Kind, Start, ThinkingBudget

__all__ = ["LETTER", "Grammar", "Kind", "Start", "ThinkingBudget"]
