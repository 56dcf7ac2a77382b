r"""Finds faults of regular expressions that every dialect rejects.

JSON Schema prescribes ECMA-262, but schemas also come with the patterns of Python, Rust and Perl.
So a fault is only what ECMA-262 (with and without its flags `u` and `v`), Python's re, Rust's regex
and PCRE all reject: a bracket without a partner, a backslash at the end, a repetition of nothing, a
range or bounds in the wrong order. What one of them accepts (`a**`, `(?i)a`, `^*`) is no fault, nor
what only a dialect's whole grammar could decide (`(?<1>a)`, `\p{Nothing}`).
"""

import re
from itertools import product

_UNJUDGED = re.compile(r"\\Q|\\c(?![A-Za-z])|\(\?(?:#|C|\??\{|[A-Za-z^-]*x)")
"""Quoted text, comments and code, in which brackets need no partner; patterns with them are not
checked.
"""

_TOKEN = re.compile(
    r"(?P<escape>\\.?)"
    r"|(?P<set>\[)"
    r"|(?P<open>\(\?(?:<[=!]|[:=!>|]))"
    r"|(?P<extension>\((?:\?[^()]?|\*[A-Za-z_:]))"
    r"|(?P<group>\()"
    r"|(?P<close>\))"
    r"|(?P<branch>\|)"
    r"|(?P<bounds>\{(?P<least>\d+),(?P<most>\d+)\})"
    r"|(?P<repeat>[*+?])"
    r"|(?P<plain>[^\\\[()|{*+?]+|\{)",
    re.DOTALL,
)
_EMPTY = frozenset({"", "open", "group", "branch"})
"""Tokens after which there is nothing to repeat; "" = the beginning."""

_IN_SET = re.compile(r"\\.|[^\\\[\]]+|[\[\]]", re.DOTALL)
_INNER = (re.compile("(?!)"), re.compile(r"\[:\^?\w+:\]"), re.compile(r"\["))
"""Beginnings of a set within a set: nothing, the name of a POSIX class, or any bracket."""
_OPERATORS = re.compile(r"[\\\[]|--|&&|~~|\|\|")
_BRACED = re.compile(r"\\[pPuUxoNgk]")
"""An escape that may have its argument in braces."""

Fault = tuple[int, str]
"""The index of a character, and what is wrong there."""


def regex_fault(pattern: str) -> Fault | None:
    """Return the first fault of a pattern that is invalid in every dialect; None if one may accept
    it. Takes time in proportion to the pattern's length.
    """
    if _UNJUDGED.search(pattern):
        return None
    first = None
    for inner, literal in product(_INNER, (False, True)):
        fault = _fault(pattern, inner, literal)
        if fault is None:
            return None
        first = first or fault
    return first


def _fault(pattern: str, inner: re.Pattern[str], literal: bool) -> Fault | None:
    """Return the first fault of a pattern in one interpretation of sets.

    inner    begins a set within a set
    literal  `]` is a character if it comes first
    """
    opened: list[int] = []
    index, before = 0, ""
    while token := _TOKEN.match(pattern, index):  # Every character begins one.
        end, kind = token.end(), str(token.lastgroup)
        if kind == "set":
            end = _set_end(pattern, index, inner, literal)
        fault = _token_fault(token, before, end, bool(opened))
        if fault:
            return index, fault
        if kind in ("open", "group", "extension"):
            opened.append(index)
        elif kind == "close":
            opened.pop()
        index, before = end, token[0] if kind == "escape" else kind
    return (opened[-1], "'(' is never closed") if opened else None


def _token_fault(token: re.Match[str], before: str, end: int, inside: bool) -> str:
    """Return the fault of a token; "" for none.

    before  the kind of the token before it, or its text if that is an escape
    end     where it ends; 0 = never
    inside  a group is open
    """
    kind, text = token.lastgroup, token[0]
    if text == "\\":
        return "'\\' escapes nothing"
    if kind == "close" and not inside:
        return "')' closes nothing"
    if kind == "repeat" and before in _EMPTY:
        return f"{text!r} repeats nothing"
    if kind == "bounds" and before not in _EMPTY and not _BRACED.match(before):
        least, most = (token[name].lstrip("0") for name in ("least", "most"))
        return f"the bounds {text} are in the wrong order" if _less(most, least) else ""
    if kind == "set":
        return _set_fault(token.string[token.start() : end]) if end else "'[' is never closed"
    return ""


def _less(one: str, other: str) -> bool:
    """Return whether `one` is less than `other`, both given as digits without leading zeros: they
    may be too long for an integer.
    """
    return (len(one), one) < (len(other), other)


def _set_end(pattern: str, start: int, inner: re.Pattern[str], literal: bool) -> int:
    """Return the index where the set that begins at `start` ends; 0 if it does not end."""
    index, depth = start, 0
    while token := _IN_SET.match(pattern, index):
        text = token[0]
        begins = text == "[" and (not depth or inner.match(pattern, index))
        index = token.end()
        if begins:
            depth += 1
            index += pattern.startswith("^", index)
            index += literal and pattern.startswith("]", index)
        elif text == "]":
            depth -= 1
            if not depth:
                return index
    return 0


def _set_fault(text: str) -> str:
    """Return the fault of a set of ordinary characters ("[...]"); other sets are not checked."""
    inside = text[1:-1].removeprefix("^")
    if _OPERATORS.search(inside):
        return ""
    for found in re.finditer(r"(.)-(.)|.", inside, re.DOTALL):
        first, last = found[1] or "", found[2] or ""
        if (first + last).isascii() and first.isalnum() and last.isalnum() and first > last:
            return f"the range {found[0]} is in the wrong order"
    return ""
