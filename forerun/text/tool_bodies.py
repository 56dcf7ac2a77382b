"""Parses the text between the marks of tool calls, the name and the arguments, as it comes."""

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from forerun.text.reasoning import overlap

Tools = Sequence[Mapping[str, Any]]
"""OpenAI's tools: [{"type": "function", "function": {"name", "description", "parameters"}}]."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of one call of an answer: first its name, then its arguments, as JSON text in
    pieces.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """The parsed content of a piece of text."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()

    def __add__(self, rest: "ParsedDelta") -> "ParsedDelta":
        """Return the content of both pieces, this one first."""
        calls = self.calls + rest.calls
        return ParsedDelta(self.reasoning + rest.reasoning, self.content + rest.content, calls)


class Body(ABC):
    """Parses the text between opener and closer. count = calls begun so far."""

    def __init__(self, closer: str) -> None:
        self.count = 0
        self._closer = closer
        self._news: list[CallPiece] = []
        self._argued = True

    def push(self, text: str) -> tuple[Sequence[CallPiece], str, bool]:
        """Parse the next piece of text. Returns (pieces of calls that are certain, text that is
        left over, whether the body continues). The caller puts the text that is left over before
        the next piece.
        """
        rest, goes_on = self._read(text)
        news, self._news = merged(self._news), []
        return news, rest, goes_on

    @abstractmethod
    def _read(self, text: str) -> tuple[str, bool]:
        """Implement `push`: return (text that is left over, whether the body continues), and report
        what is certain by `_begin` and `_argue`.
        """

    def _begin(self, name: str) -> None:
        """Begin a call."""
        self._news.append(CallPiece(self.count, name))
        self.count += 1
        self._argued = False

    def _argue(self, text: str) -> None:
        """Append to the arguments of the last call."""
        self._news.append(CallPiece(self.count - 1, None, text))
        self._argued = True

    def _close(self) -> None:
        """End the last call; without arguments they are an empty object."""
        if not self._argued:
            self._argue("{}")


class JsonCalls(Body):
    """Parses objects with a name and arguments, with any text between them."""

    def __init__(self, closer: str) -> None:
        super().__init__(closer)
        self._call: _JsonCall | None = None
        self._between = ""

    def _read(self, text: str) -> tuple[str, bool]:
        """Parse a call's name when it is complete, then its arguments as they come. Ends after the
        closer; without one it continues.
        """
        for place, character in enumerate(text, 1):
            if self._call is not None:
                self._call.feed(character)
                self._take(self._call)
                self._call = None if self._call.ended else self._call
            elif character == "{":
                self._call, self._between = _JsonCall(), ""
                self._call.feed(character)
            elif self._closed(character):
                return text[place:], False
        return "", True

    @property
    def inside(self) -> bool:
        """Whether an object has begun and not ended."""
        return self._call is not None

    def _closed(self, character: str) -> bool:
        """Return whether a character between calls completes the closer."""
        if not self._closer:
            return False
        self._between = (self._between + character)[-len(self._closer) :]
        return self._between == self._closer

    def _take(self, call: "_JsonCall") -> None:
        """Report the new part of a call."""
        if call.name is None:
            return
        if not call.returned:
            call.returned = True
            self._begin(call.name)
        if call.arguments:
            self._argue(call.arguments)
            call.arguments = ""
        if call.ended:
            self._close()


class BareCalls:
    """Parses one object without an opener, and what may follow it, such as a fence's end.

    objects  parses the object
    """

    def __init__(self, objects: JsonCalls) -> None:
        self._objects, self._begun = objects, False

    def push(self, text: str) -> tuple[Sequence[CallPiece], str, bool]:
        """Read the next piece of text (see Body.push)."""
        calls: list[CallPiece] = []
        for place, character in enumerate(text):
            if not self._objects.inside:
                another = self._begun and character == "{"
                if another or character not in _BETWEEN_BARE:
                    return merged(calls), text[place:], False
                self._begun = self._begun or character == "{"
            calls += self._objects.push(character)[0]
        return merged(calls), "", True


class BareHeads:
    """Detects a call without an opener: it begins with the name of an offered function. A model
    writes it as its whole answer or in a fence, and sometimes in two braces.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    @cached_property
    def _names(self) -> "Openings":
        """The functions' names in JSON, with the characters that end them; computed on first use,
        since most answers need none.
        """
        names = (tool["function"]["name"] for tool in self._tools)
        return Openings(json.dumps(name, ensure_ascii=False) for name in names)

    def object_at(self, text: str, place: int) -> int | None:
        """Return the index of a call's object whose head begins at `place`; -1: there is none,
        None: later text decides.
        """
        head = text[place : place + _LONGEST_HEADER]
        written = "".join(head.split())
        known = next(_BARE_HEADS.at(written), None)
        if known is None:
            waits = not written or _BARE_HEADS.begun(written)
        elif next(self._names.at(written, len(known)), None) is not None:
            return text.rindex("{", place, text.index('"', place))
        else:
            name = written[len(known) :]
            waits = not name or self._names.begun(name)
        return None if waits and len(head) < _LONGEST_HEADER else -1


class _JsonCall:
    """Parses one object, character by character.

    name       None until it is known
    returned   whether the name was reported
    arguments  certain and not yet returned
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.returned = False
        self.arguments = ""
        self.ended = False
        self._depth = 0
        self._quoted = self._escaped = False
        self._key: Any = None
        self._word: list[str] = []
        self._blank = ""

    def feed(self, character: str) -> None:
        """Parse one more character of the object, its first brace included."""
        if self._quoted:
            self._add(character)
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return
        self._depth -= character in "}]"
        at_end = self._depth == 0 and character == "}"
        if at_end or (self._depth == 1 and character == ","):
            self._end_value()
            self.ended = at_end
        elif self._depth == 1 and character == ":" and self._key is None:
            self._key = loads_or("".join(self._word))
            self._word.clear()
            self._blank = ""
        elif self._depth >= 1:
            self._add(character)
        self._quoted = character == '"'
        self._depth += character in "{["

    def _add(self, character: str) -> None:
        """Append a character to a key or value; white space only inside it."""
        if character.isspace() and not self._quoted:
            self._blank += character if self._word else ""
            return
        piece, self._blank = self._blank + character, ""
        self._word.append(piece)
        if self._holds_arguments and self._word[0] == "{":
            self.arguments += piece

    @property
    def _holds_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _end_value(self) -> None:
        value = "".join(self._word)
        if self._key == "name":
            name = loads_or(value)
            self.name = name if isinstance(name, str) and name else None
        elif self._holds_arguments and not value.startswith("{"):
            inside = loads_or(value, value)  # JSON inside a string; null is none.
            self.arguments = inside if isinstance(inside, str) else "" if inside is None else value
        self._key, self._blank = None, ""
        self._word.clear()


class DividedCall(Body):
    """Parses a name and its arguments, a JSON object. Some models write an id between them."""

    def __init__(self) -> None:
        super().__init__("")
        self._depth = 0
        self._quoted = self._escaped = False

    def _read(self, text: str) -> tuple[str, bool]:
        """Parse up to the brace that closes the arguments, or to where no call can follow."""
        if not self._depth:
            name = _DIVIDED.match(text)
            if name is None:
                return text, "{" not in text
            self._begin(name[1])
            text = text[name.end() :]
        for place, character in enumerate(text, 1):
            self._feed(character)
            if not self._depth:
                self._argue(text[:place])
                return text[place:], False
        self._argue(text)
        return "", True

    def _feed(self, character: str) -> None:
        """Parse one more character of the arguments."""
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        else:
            self._quoted = character == '"'
            self._depth += (character in "{[") - (character in "}]")


class MarkedCalls(Body):
    """Parses calls between marks of their own; each has a name, a mark, and its arguments.

    marks     that begin a call, precede its arguments, and end it
    numbered  a name has a kind before it and a number after it
    """

    def __init__(self, marks: tuple[str, str, str], closer: str, numbered: bool) -> None:
        super().__init__(closer)
        self._opener, self._divider, self._end = marks
        self._numbered = numbered
        self._inside = False

    def _read(self, text: str) -> tuple[str, bool]:
        """Parse up to the end of the closer, or to where no call can follow."""
        while True:
            if self._inside:
                arguments, mark, rest = text.partition(self._end)
                held = "" if mark else text[len(text) - overlap(text, self._end) :]
                arguments = arguments.removesuffix(held) if held else arguments
                if arguments:
                    self._argue(arguments)
                if not mark:
                    return held, True
                self._close()
                self._inside, text = False, rest
                continue
            begun = text.lstrip()
            if begun.startswith(self._closer):
                return begun[len(self._closer) :], False
            header, mark, rest = begun.partition(self._divider)
            if not header.startswith(self._opener):
                return text, any(one.startswith(begun) for one in (self._opener, self._closer))
            if not mark:
                return text, len(header) < _LONGEST_HEADER
            name = header.removeprefix(self._opener).strip()
            if self._numbered:
                name = name.removeprefix("functions.")
                name = name.rpartition(":")[0] or name
            self._begin(name)
            self._inside, text = True, rest


class Openings:
    """A set of texts one of which may come next, such as the names of arguments. Searching it takes
    hardly longer with 20,000.
    """

    def __init__(self, heads: Iterable[str]) -> None:
        self._known = frozenset(heads)
        self._sorted = sorted(self._known)
        self._lengths = sorted({*map(len, self._known)}, reverse=True)

    def at(self, text: str, place: int = 0) -> Iterator[str]:
        """Yield those that are at index `place` of a text, the longest first."""
        for length in self._lengths:
            if length <= len(text) - place and text[place : place + length] in self._known:
                yield text[place : place + length]

    def begun(self, text: str) -> bool:
        """Return whether a text is a proper prefix of one of them."""
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


_DIVIDED = re.compile(r"\s*([\w.:-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?={)")
_LONGEST_HEADER = 512
FENCE = "```"
"""Mark around code in Markdown."""
_BARE_HEADS = Openings(
    f"{before}{opened}{inner}"
    for before in ("", FENCE, f"{FENCE}json", "json")
    for opened in ("{", "[{")
    for inner in ('"name":', '{"name":', '"type":"function","name":')
)
"""Beginnings of an object without an opener, up to its name, without white space."""
_BETWEEN_BARE = frozenset("{}[] \t\r\n`,;")
"""Characters that may be around objects without an opener, including a second brace on each
side.
"""
NOTHING = object()


def merged(calls: Iterable[CallPiece]) -> tuple[CallPiece, ...]:
    """Merge adjacent pieces of one call's arguments."""
    merged: list[CallPiece] = []
    for (index, name), pieces in groupby(calls, lambda piece: (piece.index, piece.name)):
        merged.append(CallPiece(index, name, "".join(piece.arguments for piece in pieces)))
    return tuple(merged)


def loads_or(text: str, otherwise: Any = None) -> Any:
    """Return the value of JSON that a model wrote; `otherwise` if it is not JSON, or nested too
    deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
