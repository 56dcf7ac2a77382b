"""Constraints of a text: the value in a request, and grammars of calls."""

from forerun.constrain.grammar.grammar import LETTER, Grammar, Kind, Start, ThinkingBudget

__all__ = ["LETTER", "Grammar", "Kind", "Start", "ThinkingBudget"]
