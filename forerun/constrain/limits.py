"""Limits on grammars, shared by the compiling process and the server."""

from typing import Any

import llguidance

WHITESPACE = r"( {0,2}|\r?\n[ \t]{0,40})"
"""Between JSON tokens: at most two spaces, or a line break and its indentation. Without a bound
a model may write spaces until max_tokens."""


def json_options(lenient: bool, one_line: bool) -> dict[str, Any]:
    """How llguidance is to read a JSON schema."""
    options: dict[str, Any] = {"lenient": lenient, "coerce_one_of": lenient}
    if one_line:
        separators = {"item_separator": ", ", "key_separator": ": "}
        return options | separators | {"whitespace_flexible": False}
    return options | {"whitespace_pattern": WHITESPACE}


LIMITS = llguidance.LLParserLimits(
    max_items_in_row=12_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=200_000,
    max_lexer_states=50_000,
    max_grammar_size=20_000,
    verbose_errors=False,
)
"""What a grammar may cost. The size admits an object of 2,000 optional properties, whose masks
then take 40 ms; a step's lexer fuel is about 15 ms of matching; a lexer state takes 1 to 2 kB."""

MEMORY = 2 << 30
"""Address space of a compiling process, in bytes."""

SECONDS = 5.0
"""A grammar that takes longer to compile is refused."""
