"""Parses calls in Python's syntax, with literals as arguments (LFM2)."""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from forerun.text.tagged_calls import KeyedCalls
from forerun.text.tool_bodies import NOTHING, JsonCalls, Openings, Tools

_MOST_LEVELS = 64
"""Deepest nesting of lists and objects; a deeper value is treated as text."""


class PythonCalls(KeyedCalls):
    """Parses a list of calls, or a single one: name(key=value, key=value), with Python's literals
    or JSON's. Text that begins with a brace is parsed as JSON calls: LFM2 writes these if its
    prompt says so.

    A quote ends a string only where an argument can end, because models write unescaped quotes
    within a string: before the name of another argument (of those that the tool declares, if it
    declares any) or the end of the call; within a list or an object before a sign that may follow.
    """

    def __init__(self, tools: Tools, closer: str) -> None:
        super().__init__(tools, closer)
        self._json: JsonCalls | None = None
        self._key: str | None = None
        self._names = _Names(())
        self._value = _Value(self._names)

    def _read(self, text: str) -> tuple[str, bool]:
        """Parse a call's name when its bracket opens, then its arguments. Ends after the closer, or
        where no call can follow.
        """
        if self._json is not None:
            return self._as_json(self._json, text)
        while True:
            if self._key is not None:
                end = self._value.end(text)
                if end is None:
                    return text, True
                self._argument(self._key, text[:end])
                self._key, text = None, text[end:]
            elif self._name is not None:
                begun = text.lstrip(_BETWEEN)
                if begun.startswith(")"):
                    self._end()
                    text = begun[1:]
                elif named := self._names.key(begun):
                    self._key, text = named[0], begun[named[1] :]
                    self._value = _Value(self._names)
                else:
                    return text, self._names.begun(begun)
            else:
                begun = text.lstrip(" \t\r\n,;[]")
                if begun.startswith(self._closer):
                    return begun[len(self._closer) :], False
                if begun.startswith("{"):
                    return self._as_json(JsonCalls(self._closer), begun)
                opened = _CALL.match(begun)
                if opened is None:
                    waits = self._closer.startswith(begun) or _NAME.fullmatch(begun) is not None
                    return begun if self.count else text, waits
                self._begin(opened[1])
                self._names = _Names(self._declared.names(opened[1]))
                text = begun[opened.end() :]

    def _as_json(self, calls: JsonCalls, text: str) -> tuple[str, bool]:
        calls.count = self.count
        news, rest, goes_on = calls.push(text)
        self._news += news
        self.count = calls.count
        self._json = calls if goes_on else None
        return rest, goes_on

    def _argument(self, key: str, text: str) -> None:
        """Add a complete argument."""
        declared = self._declared.type_of(self._name or "", key)
        self._member(key, json_of_literal(text.strip(), declared))


class _Names:
    """The names of a call's arguments: those that a tool declares, and others of the right form."""

    def __init__(self, declared: Sequence[str]) -> None:
        self._declared = {name.lstrip(_BETWEEN): name for name in declared}
        self._heads = Openings(self._declared)

    def key(self, text: str) -> tuple[str, int] | None:
        """Return the name at the beginning of a text, and the index after its `=`; None if there is
        none, or a longer one may follow.
        """
        if text in self._declared or self._heads.begun(text):
            return None
        for name in self._heads.at(text):
            if behind := _EQUALS.match(text, len(name)):
                return self._declared[name], behind.end()
        found = _KEY.match(text)
        return found and (found[1], found.end())

    def follows(self, text: str, at: int) -> bool:
        """Return whether a name and its `=` are at index `at`; a declared name if there are any."""
        if not self._declared:
            return _WORD_EQUALS.match(text, at) is not None
        return any(_EQUALS.match(text, at + len(name)) for name in self._heads.at(text, at))

    def begun(self, text: str) -> bool:
        """Return whether a text may be the beginning of a name and its `=`."""
        return _KEY_BEGUN.fullmatch(text) is not None or self.declared_begun(text)

    def declared_begun(self, text: str) -> bool:
        """Return whether a text may be the beginning of a declared name and its `=`."""
        return self._heads.begun(text) or any(
            not text[len(name) :].strip() for name in self._heads.at(text)
        )


class _Value:
    """Finds the end of a value that comes in pieces; each character is read once.

    names  of further arguments
    """

    def __init__(self, names: _Names) -> None:
        self._at, self._quote, self._depth = 0, "", 0
        self._names = names

    def end(self, text: str) -> int | None:
        """Return the index of the comma or bracket after the value; None: it has not arrived.
        `text` is that of the previous call, and more.
        """
        while mark := _MARKS.search(text, self._at):
            sign, behind = mark[0], mark.end()
            if sign == "\\":
                if behind == len(text):
                    break
                behind += 1
            elif self._quote:
                closes = sign == self._quote and self._closes(text, behind)
                if closes is None:
                    self._at = mark.start()
                    return None
                self._quote = "" if closes else self._quote
            elif sign in "'\"":
                self._quote = sign if self._opens(text, mark.start()) else ""
            elif sign in "([{":
                self._depth += 1
            elif not self._depth and sign in ",)":
                return mark.start()
            elif sign in ")]}":
                self._depth -= self._depth > 0
            self._at = behind
        else:
            self._at = len(text)
        return None

    def _opens(self, text: str, at: int) -> bool:
        """Return whether the quote at `at` begins a string, because a value can begin there."""
        while at and text[at - 1].isspace():
            at -= 1
        return not at or (self._depth > 0 and text[at - 1] in "[({,:")

    def _closes(self, text: str, at: int) -> bool | None:
        """Return whether the quote before `at` ends its string; None: it depends on later text."""
        if _BEHIND_ITEM.match(text, at) if self._depth else _BEHIND_CALL.match(text, at):
            return True
        further = None if self._depth else _FURTHER.match(text, at)
        if further is not None and self._names.follows(text, further.end()):
            return True
        begun = further is not None and self._names.declared_begun(text[further.end() :])
        return None if begun or _UNDECIDED.fullmatch(text, at) else False


_BETWEEN = " \t\r\n,"
_FURTHER = re.compile(r"\s*+,\s*+")
_EQUALS = re.compile(r"\s*+=")
_WORD_EQUALS = re.compile(r"\w++\s*+=")
_BEHIND_CALL = re.compile(r"\s*+\)\s*+(?:[\],;<]|\w[\w.]*+\()")
_NAME = re.compile(r"[\w.\-]{0,256}+\s*+")
_CALL = re.compile(r"([A-Za-z_][\w.\-]{0,255}+)\s*+\(")
_KEY = re.compile(r"([^\s=(),'\"]{1,256}+)\s*+=")
_KEY_BEGUN = re.compile(r"(?:[^\s=(),'\"]{1,256}+\s*+)?")
_MARKS = re.compile(r"[\\'\"()\[\]{},]")
_BEHIND_ITEM = re.compile(r"\s*+[,:\]})]")
_UNDECIDED = re.compile(r"\s*+(?:,\s*+(?:\w++\s*+)?|\)\s*+(?:\w[\w.]*+)?)?")


def json_of_literal(text: str, declared: Any = None) -> str:
    """Return a Python or JSON literal as JSON, with JSON's numbers unchanged; other text as a
    string.

    declared  the type of the argument: text without quotes for a string is used unchanged
    """
    number = None if declared == "string" else _JSON_NUMBER.fullmatch(text)
    if number and (declared == "number" or not number[1] or math.isfinite(float(text))):
        return text
    value = text if declared == "string" and text[:1] not in ("'", '"') else _literal(text)
    return json.dumps(text if value is NOTHING else value, ensure_ascii=False)


def _literal(text: str) -> Any:
    reader = _Reader(text)
    try:
        value = reader.value(_MOST_LEVELS)
    except _NoLiteralError:
        return NOTHING
    return value if reader.at_end() else NOTHING


class _NoLiteralError(Exception):
    """The text is no literal."""


class _Reader:
    """Parses one literal: numbers, words, strings, lists, tuples and objects of them."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def at_end(self) -> bool:
        self._blank()
        return self._at == len(self._text)

    def value(self, levels: int) -> Any:
        """Parse the next value, with at most `levels` levels in it. Raises _NoLiteralError if there
        is none.
        """
        self._blank()
        sign = self._text[self._at : self._at + 1]
        if not levels or not sign:
            raise _NoLiteralError
        if sign in "'\"":
            return self._string(levels == _MOST_LEVELS)
        if sign in "[(":
            return self._items("]" if sign == "[" else ")", lambda: self.value(levels - 1))
        if sign == "{":
            return dict(self._items("}", lambda: self._pair(levels - 1)))
        word = _WORD.match(self._text, self._at)
        if word is None:
            raise _NoLiteralError
        self._at = word.end()
        if word[0] in _WORDS:
            return _WORDS[word[0]]
        if not _NUMBER.fullmatch(word[0]):
            raise _NoLiteralError
        number = word[0].replace("_", "")
        if number.lstrip("+-").isdigit():
            return int(number)
        if not math.isfinite(float(number)):
            raise _NoLiteralError
        return float(number)

    def _items(self, closer: str, read: Callable[[], Any]) -> list[Any]:
        found: list[Any] = []
        self._at += 1
        while not self._passes(closer):
            found.append(read())
            if not self._passes(","):
                if not self._passes(closer):
                    raise _NoLiteralError
                break
        return found

    def _pair(self, levels: int) -> tuple[str, Any]:
        key = self.value(1)
        if not self._passes(":"):
            raise _NoLiteralError
        return key if isinstance(key, str) else json.dumps(key), self.value(levels)

    def _string(self, whole: bool) -> str:
        """Parse a string. whole: it is the whole text, and ends where that ends."""
        quote = self._text[self._at]
        triple = 3 * quote
        if whole:
            inner = self._text[self._at :].rstrip()
            if len(inner) < 2 or not inner.endswith(quote):
                raise _NoLiteralError
            self._at += len(inner)
            thrice = len(inner) >= 6 and inner.startswith(triple) and inner.endswith(triple)
            return _unescaped(inner[3:-3] if thrice else inner[1:-1])
        at = self._at + 1
        while mark := _QUOTES.search(self._text, at):
            at = mark.end()
            if mark[0] == quote and _BEHIND_ITEM.match(self._text, at):
                inner, self._at = self._text[self._at + 1 : mark.start()], at
                return _unescaped(inner)
        raise _NoLiteralError

    def _passes(self, sign: str) -> bool:
        self._blank()
        there = self._text.startswith(sign, self._at)
        self._at += there
        return there

    def _blank(self) -> None:
        self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]


_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_WORD = re.compile(r"[\w.+\-]{1,400}+")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*+(?:\.[\d_]*+)?|\.\d[\d_]*+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*+)(?:\.\d++)?([eE][+-]?\d++)?", re.ASCII)
_QUOTES = re.compile(r"\\[\s\S]|['\"]")
_SPACE = re.compile(r"\s*+")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([\s\S]))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v"}
_ESCAPED |= {"\n": "", **{sign: sign for sign in "\\'\"/"}}


def _unescaped(text: str) -> str:
    """Return a string's text; an invalid escape is left unchanged."""

    def character(match: re.Match[str]) -> str:
        code = match[1] or match[2] or match[3]
        if code is None:
            return _ESCAPED.get(match[4], match[0])
        number = int(code, 16)
        return chr(number) if number < 0x110000 else match[0]

    found = _ESCAPE.sub(character, text)
    # Two halves of a character beyond 16 bits, as JSON has it; one alone is no character.
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
