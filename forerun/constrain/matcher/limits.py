"""Limits on grammars, shared by the compiling process, the matching processes and the server.

Only LIMITS can end a text. If CALL_LIMITS are reached, or a step takes longer than SLOW, the
matcher moves to a process of its own and continues there (remote_matcher.py).
"""

import re
from typing import Any

import llguidance

WHITESPACE = r"( {0,2}|\r?\n[ \t]{0,40})"
"""Between JSON tokens: at most two spaces, or a line break and its indentation. Without a bound
a model may write spaces until max_tokens."""


def json_options(one_line: bool) -> dict[str, Any]:
    r"""Return llguidance's options for a JSON schema: white space as in WHITESPACE, or, with
    `one_line`, exactly as Python's json.dumps writes it; strings with any `\uXXXX`.
    """
    spaces: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    if one_line:
        spaces = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    return spaces | {"json_allow_general_unicode_escapes": True}


LIMITS = llguidance.LLParserLimits(
    max_items_in_row=12_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=200_000,
    max_lexer_states=50_000,
    max_grammar_size=20_000,
    verbose_errors=False,
)
"""Limits of a grammar's cost. The size admits an object of 2,000 optional properties, whose masks
then take 40 ms; a step's lexer fuel is about 15 ms of matching; a lexer state takes 1 to 2 kB.
"""

CALL_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=10_000,
    max_grammar_size=20_000,
    verbose_errors=False,
)
"""Limits of a grammar's cost on the engine's thread. Time grows with the square of the items in a
row: with 1,000, a token of 16 bytes takes 40 ms under the most ambiguous grammar that was tried,
with 2,000 it takes 400 and with 12,000 four seconds. 1,000 are enough for 200 optional properties.
"""

SLOW = 0.02
"""Seconds of processor time that a matcher may take for one step on the engine's thread."""

SLOW_STEPS = 64
"""Steps after which a slow step no longer counts, since the machine may have been busy. A second
slow step within them moves the matcher. (An agent's calls, 151,936 token ids, a busy machine: 15
nodes take 3.3 ms on average, and one step of 870 took 20. Moved at the first, 2,250 more tokens of
that answer came at 6 a second instead of 20.)
"""

RECURSION = 20_000
"""Recursion limit of a process that rewrites schemas, in Python frames."""

UNREADABLE = (TypeError, LookupError, AttributeError, ArithmeticError, re.error)
"""Errors that an unforeseen source can cause in rewriting; they are reported as faults of the
source.
"""

MEMORY = 2 << 30
"""Address space of a compiling or matching process, in bytes."""

SECONDS = 5.0
"""Processor time after which a grammar that still compiles is rejected."""

CALL_SECONDS = 2.0
"""Processor time for one token after which a matching process is ended."""

ALL_SECONDS = 60
"""Processor time that a matching process may take altogether."""
