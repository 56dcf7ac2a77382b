"""What a request may constrain its text to, and the checks that need no compiler."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import copysign, inf, isinf
from typing import Any, Self

from forerun.constrain.schema import schemas
from forerun.errors import RequestError

MAX_SOURCE = 256 * 1024
"""Bytes of a grammar's source."""

MAX_NESTING = 100
"""Brackets inside one another."""

MAX_LEVELS = 250
"""Of a JSON schema."""

MAX_FORCED = 10_000
"""Characters of the shortest text that a pattern matches."""


class Kind(StrEnum):
    """Kinds of source. A choice compiles as a regex, a JSON object as a schema."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text, not yet compiled; equal values compile to one grammar.

    source   a JSON schema as JSON text; a regular expression that the whole text must match
             (no look-around, no back-references); or a grammar in Lark or GBNF
    lenient  of a schema: keywords that cannot be honoured are ignored instead of refused
    one_line of a schema: white space as Python's json.dumps writes it and nowhere else, so that
             more of the text is forced and needs no step of its own
    start    token ids: the constraint begins after they appear in the output (the end of
             reasoning); empty = at once
    field    the request field that errors name
    """

    kind: Kind
    source: str
    lenient: bool = False
    one_line: bool = False
    start: tuple[int, ...] = ()
    field: str = field(default="grammar", compare=False)

    @classmethod
    def json_schema(cls, schema: Any, lenient: bool = False, field: str = "grammar") -> Self:
        """Text that is JSON valid under `schema` (an object, or true).

        Raises RequestError where it is no schema, or is too large or too deep.
        """
        if not isinstance(schema, dict | bool):
            raise RequestError(f"{field} must be a JSON schema: an object", field)
        _check_depth(schema, field)
        schema = {} if schema is True else schema
        if not lenient:
            _check_patterns(schema, field)
            _check_members(schema, field)
        try:
            source = json.dumps(_finite(schema), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(f"{field} is not JSON: {error}", field) from error
        return cls(Kind.JSON_SCHEMA, source, lenient, field=field)._checked()

    @classmethod
    def json_object(cls, field: str = "grammar") -> Self:
        """Text that is any JSON object."""
        return cls.json_schema({"type": "object"}, field=field)

    @classmethod
    def regex(cls, pattern: str, field: str = "grammar") -> Self:
        """Text that matches `pattern` as a whole.

        Raises RequestError that points at a bracket without its partner.
        """
        grammar = cls(Kind.REGEX, pattern, field=field)._checked()
        return replace(grammar, source=portable(pattern, field))

    @classmethod
    def choice(cls, choices: Sequence[str], field: str = "grammar") -> Self:
        """Text that is one of `choices`."""
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise RequestError(f"{field} must be a list of at least one non-empty string", field)
        size = sum(map(len, choices))
        if size > MAX_SOURCE:
            message = f"{field} has {size} characters; at most {MAX_SOURCE} bytes are taken"
            raise RequestError(message, field)
        pattern = "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in dict.fromkeys(choices))
        return cls(Kind.REGEX, pattern, field=field)._checked()

    @classmethod
    def grammar(cls, source: str, field: str = "grammar") -> Self:
        """Text of a context-free grammar: GBNF (`root ::= ...`) or Lark (`start: ...`)."""
        grammar = cls(Kind.GRAMMAR, source, field=field)._checked()
        if max(_depths(source), default=0) > MAX_NESTING:
            raise RequestError(f"{field} nests brackets deeper than {MAX_NESTING} levels", field)
        return grammar

    def on_one_line(self) -> Self:
        """The same JSON, with white space as Python's json.dumps writes it.

        Raises RequestError where the grammar is no schema.
        """
        if self.kind is not Kind.JSON_SCHEMA:
            raise RequestError(f"{self.field} is no JSON schema; its own white space counts")
        return replace(self, one_line=True)

    def after(self, start: Sequence[int]) -> Self:
        """The same constraint, beginning after the token ids `start`."""
        return replace(self, start=tuple(start))

    def _checked(self) -> Self:
        if not isinstance(self.source, str) or not self.source:
            raise RequestError(f"{self.field} must be a non-empty string", self.field)
        if re.search("[\ud800-\udfff]", self.source):
            raise RequestError(f"{self.field} has a lone surrogate", self.field)
        size = len(self.source.encode())
        if size > MAX_SOURCE:
            raise RequestError(
                f"{self.field} has {size} bytes; at most {MAX_SOURCE} are taken", self.field
            )
        return self


def portable(pattern: str, field: str) -> str:
    """The pattern with character classes as JavaScript reads them: `[`, `&&`, `--` and `~~` in a
    class are plain characters there, set operations in Rust; digits and letters are ASCII's.

    Raises RequestError pointing at the first bracket that has no partner, or at a repetition
    that makes every text longer than MAX_FORCED: such a text is forced on every step anew.
    """
    out: list[str] = []
    lengths = _Lengths()
    stray: int | None = None
    index = 0
    while index < len(pattern):
        end = unit_end(pattern, index, field)
        unit = pattern[index:end]
        if unit == ")" and not lengths.opened:
            raise _at(pattern, index, field, "')' closes nothing")
        lengths.add(unit, index)
        if len(lengths.opened) > MAX_NESTING:
            raise _at(pattern, index, field, f"more than {MAX_NESTING} groups inside another")
        if lengths.shortest > MAX_FORCED:
            raise _at(pattern, index, field, f"every text has more than {MAX_FORCED} characters")
        if unit in ("}", "]") and stray is None and lengths.opened:
            stray = index
        out.append(portable_class(unit) if unit[0] == "[" else ASCII_CLASSES.get(unit, unit))
        index = end
    if lengths.opened and stray is not None and stray > lengths.opened[-1]:
        raise _at(pattern, stray, field, f"{pattern[stray]!r} where ')' was expected")
    if lengths.opened:
        raise _at(pattern, lengths.opened[-1], field, "'(' is never closed")
    return "".join(out)


def _check_members(schema: Any, field: str) -> None:
    """Raise RequestError naming the path of what stands where a schema must, and is none."""
    for path, inner in schemas(schema):
        for keyword in ("properties", "patternProperties", "$defs", "definitions"):
            members = inner.get(keyword)
            for name, member in members.items() if isinstance(members, dict) else ():
                if not isinstance(member, dict | bool):
                    place = ".".join(filter(None, (path, keyword, str(name))))
                    message = f"{field}: {place} must be a schema: an object, true or false"
                    raise RequestError(message, field)


class _Lengths:
    """Open groups of a pattern, and the length of the shortest text matching what was read.

    opened   where the open groups begin
    A frame per group: length of the branch so far, of the shortest branch before it, and of the
    last item (which a repetition multiplies).
    """

    def __init__(self) -> None:
        self.opened: list[int] = []
        self._frames: list[list[float]] = [[0, inf, 0]]

    @property
    def shortest(self) -> float:
        """Length of the shortest text of the branch being read, inner groups only."""
        return self._frames[-1][0]

    def add(self, unit: str, place: int) -> None:
        """Read the next unit of the pattern."""
        branch, best, last = frame = self._frames[-1]
        if unit == "(":
            self.opened.append(place)
            self._frames.append([0, inf, 0])
        elif unit == ")":
            self.opened.pop()
            self._frames.pop()
            self._frames[-1][2] = min(branch, best)
            self._frames[-1][0] += min(branch, best)
        elif unit == "|":
            frame[:] = [0, min(branch, best), 0]
        elif unit in ("*", "?") or (unit[0] == "{" and len(unit) > 1):
            times = 0 if unit in ("*", "?") else int(re.split("[,}]", unit[1:])[0] or 0)
            frame[0] += last * (times - 1)
            frame[2] = last * times
        elif unit != "+":
            frame[0], frame[2] = branch + 1, 1


ASCII_MEMBERS = {r"\d": "0-9", r"\w": "0-9A-Za-z_"}
"""What they mean within a class: no digits and letters of other scripts, as in JavaScript."""

ASCII_CLASSES = {name: f"[{inside}]" for name, inside in ASCII_MEMBERS.items()} | {
    name.upper(): f"[^{inside}]" for name, inside in ASCII_MEMBERS.items()
}
"""What they and their opposites mean elsewhere."""

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")

_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]", re.DOTALL)
_REPETITION = re.compile(r"\{\d*,?\d*\}")
_ATOM = r"\\[pPux]\{[^{}]*\}|\\.|\[:\w+:\]|."


def unit_end(pattern: str, start: int, field: str) -> int:
    """Where the escape, class, repetition or single character at `start` ends."""
    if pattern[start] == "\\":
        if start + 1 == len(pattern):
            raise _at(pattern, start, field, "'\\' escapes nothing")
        return start + 2
    if pattern[start] == "[":
        match = _CLASS.match(pattern, start)
        if match is None:
            raise _at(pattern, start, field, "'[' is never closed")
        return match.end()
    match = _REPETITION.match(pattern, start)
    return match.end() if match else start + 1


def portable_class(text: str) -> str:
    """A character class in which no character means a set operation."""
    head = "[^" if text.startswith("[^") else "["
    atoms = re.findall(_ATOM, text[len(head) : -1], re.DOTALL)
    out, index = head, 0
    while index < len(atoms):
        out += _escaped(atoms[index])
        if atoms[index + 1 : index + 2] == ["-"] and index + 2 < len(atoms):
            out += "-" + _escaped(atoms[index + 2])
            index += 2
        index += 1
    return out + "]"


def _at(text: str, index: int, field: str, message: str) -> RequestError:
    """An error with the place shown: a few characters around it and a caret."""
    left = max(0, index - 30)
    shown = text[left : index + 10].replace("\n", " ")
    return RequestError(
        f"{field} is not a valid regular expression: {message} at character {index}\n"
        f"    {shown}\n    {' ' * (index - left)}^",
        field,
    )


def _escaped(atom: str) -> str:
    """A regex for exactly this character; longer atoms are regexes already."""
    return _SPECIAL.sub(r"\\\g<0>", atom) if len(atom) == 1 else ASCII_MEMBERS.get(atom, atom)


def _check_patterns(schema: Any, field: str) -> None:
    """Raise RequestError naming the path of a `pattern` that `portable` would refuse."""
    for path, inner in schemas(schema):
        if isinstance(inner.get("pattern"), str):
            try:
                portable(inner["pattern"], f"{path}.pattern" if path else "pattern")
            except RequestError as error:
                raise RequestError(f"{field}: {error}", field) from error


def _finite(value: Any, bound: bool = False) -> Any:
    """The same with bounds that no 64-bit float can be (`1.8e308`) as the largest that can."""
    if isinstance(value, dict):
        return {key: _finite(inner, key in _BOUNDS) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if bound and isinstance(value, float) and isinf(value):
        return copysign(sys.float_info.max, value)
    return value


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _check_depth(value: Any, field: str) -> None:
    """Raise RequestError where data is nested too deep; iterative, for it may be very deep."""
    level = [value]
    for _ in range(MAX_LEVELS):
        parts = [part for part in level if isinstance(part, dict | list)]
        if not parts:
            return
        level = [
            inner for part in parts for inner in (part.values() if isinstance(part, dict) else part)
        ]
    raise RequestError(f"{field} is nested deeper than {MAX_LEVELS} levels", field)


def _depths(source: str) -> Sequence[int]:
    """How many brackets are open after each one, quotes not minded."""
    depth, depths = 0, []
    for character in re.findall(r"[()\[\]{}]", source):
        depth = depth + 1 if character in "([{" else max(0, depth - 1)
        depths.append(depth)
    return depths
