r"""Patterns of JSON schemas as xgrammar reads them rightly.

xgrammar 0.2.8 matches them inside a JSON string with automata of their own, which have two faults
that its regular expressions outside of JSON have not (tests/constrain/test_upstream.py):

- an item that may repeat at the end of an optional group, or of an alternative, may repeat where
  the group is left out, or another alternative stands: `(ab*)?` takes `b`, `(b|[^a]|b{1,2})` takes
  `cb`. Behind an empty group it does not.
- a quote, a backslash or a control character that is written alone stands in the string as it is,
  without its escape. In a class that has others it is left out.
"""

import re

from forerun.constrain.grammar import unit_end

_REPEATS = re.compile(r"[*+?]|\{.+\}")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]')
_NAMED = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4}))")
_LETTERS = "dDwWsSpP"


def settled(pattern: str) -> str:
    """The same, with everything that repeats in a group of its own, before an empty one."""
    return _sequence(pattern, 0)[0]


def _sequence(pattern: str, at: int) -> tuple[str, int]:
    """Up to the end of the group that begins at `at`, and where that is."""
    out, item = "", ""
    while at < len(pattern):
        end = unit_end(pattern, at, "pattern")
        unit = pattern[at:end]
        if unit == ")":
            break
        if unit == "(":
            head = re.compile(r"\((\?:|\?<\w+>)?").match(pattern, at)
            inner, close = _sequence(pattern, head.end() if head else end)
            out, item, end = out + item, f"({inner})", close + 1
        elif item and _REPEATS.fullmatch(unit):
            lazy = pattern[end : end + 1] == "?"
            item, end = f"({item}{'{0,1}' if unit == '?' else unit}())", end + lazy
        elif unit in ("|", "^", "$"):
            out, item = out + item + unit, ""
        else:
            out, item = out + item, unit
        at = end
    return out + item, at


def unwritable(pattern: str) -> str:
    """The part of a pattern whose text would stand in a string as JSON has none; often empty."""
    at = 0
    while at < len(pattern):
        named = _NAMED.match(pattern, at)
        end = named.end() if named else unit_end(pattern, at, "pattern")
        unit = pattern[at:end]
        if named:
            text = chr(int(named[1] or named[2], 16))
        elif unit[0] == "[":
            text = "a" if _has_plain(unit) else '"'
        elif unit[0] == "\\" and unit[1] in _LETTERS:
            text = "a"
        elif unit[0] == "\\":
            text = "\n" if unit[1].isalnum() else unit[1]
        else:
            text = unit[0]
        if not _PLAIN.fullmatch(text):
            return unit
        at = end
    return ""


def _has_plain(unit: str) -> bool:
    """Whether a class has a character that JSON does not escape."""
    try:
        known = re.compile(unit)
    except re.error:
        return True  # A class by a Unicode property.
    return any(known.match(chr(code)) for code in (*range(32, 127), 0xE9, 0x4E00) if _plain(code))


def _plain(code: int) -> bool:
    return _PLAIN.fullmatch(chr(code)) is not None
