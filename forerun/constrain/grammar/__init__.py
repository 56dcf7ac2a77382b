"""What a text may be constrained to: the value that a request carries, and grammars of calls."""

from forerun.constrain.grammar.grammar import Grammar, Kind, Start

__all__ = ["Grammar", "Kind", "Start"]
