"""What a request may constrain its text to, and the checks that need no compiler."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from forerun.errors import RequestError

MAX_SOURCE = 256 * 1024
"""Bytes of a grammar's source."""

MAX_NESTING = 100
"""Brackets, or levels of a schema, inside one another."""


class Kind(StrEnum):
    """Kinds of source. A choice compiles as a regex, a JSON object as a schema."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text, not yet compiled; equal values compile to one grammar.

    source   a JSON schema as JSON text; a regular expression that the whole text must match
             (Rust syntax: no look-around, no back-references); or a grammar in Lark or GBNF
    lenient  of a schema: keywords that cannot be honoured are ignored instead of refused
    start    token ids: the constraint begins after they appear in the output (the end of
             reasoning); empty = at once
    field    the request field that errors name
    """

    kind: Kind
    source: str
    lenient: bool = False
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
        try:
            source = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(f"{field} is not JSON: {error}", field) from error
        return cls(Kind.JSON_SCHEMA, source, lenient, (), field)._checked()

    @classmethod
    def json_object(cls, field: str = "grammar") -> Self:
        """Text that is any JSON object."""
        return cls.json_schema({"type": "object"}, field=field)

    @classmethod
    def regex(cls, pattern: str, field: str = "grammar") -> Self:
        """Text that matches `pattern` as a whole.

        Raises RequestError that points at a bracket without its partner.
        """
        grammar = cls(Kind.REGEX, pattern, False, (), field)._checked()
        check_brackets(pattern, field)
        return grammar

    @classmethod
    def choice(cls, choices: Sequence[str], field: str = "grammar") -> Self:
        """Text that is one of `choices`."""
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise RequestError(f"{field} must be a list of at least one non-empty string", field)
        pattern = "|".join(map(_escaped, dict.fromkeys(choices)))
        return cls(Kind.REGEX, pattern, False, (), field)._checked()

    @classmethod
    def grammar(cls, source: str, field: str = "grammar") -> Self:
        """Text of a context-free grammar: GBNF (`root ::= ...`) or Lark (`start: ...`)."""
        grammar = cls(Kind.GRAMMAR, source, False, (), field)._checked()
        if max(_depths(source), default=0) > MAX_NESTING:
            raise RequestError(f"{field} nests brackets deeper than {MAX_NESTING} levels", field)
        return grammar

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


def check_brackets(pattern: str, field: str) -> None:
    """Raise RequestError pointing at the first bracket of a regex that has no partner."""
    opened: list[int] = []
    stray: int | None = None
    index = 0
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index += 1
            if index == len(pattern):
                raise _at(pattern, index - 1, field, "'\\' escapes nothing")
        elif character == "[":
            index = _class_end(pattern, index, field)
        elif character == "{":
            index = _braces_end(pattern, index)
        elif character == "(":
            opened.append(index)
            if len(opened) > MAX_NESTING:
                raise _at(pattern, index, field, f"more than {MAX_NESTING} groups inside another")
        elif character == ")":
            if not opened:
                raise _at(pattern, index, field, "')' closes nothing")
            opened.pop()
        elif character in "}]" and opened and stray is None:
            stray = index
        index += 1
    if opened:
        if stray is not None and stray > opened[-1]:
            message = f"{pattern[stray]!r} where ')' was expected"
            raise _at(pattern, stray, field, message)
        raise _at(pattern, opened[-1], field, "'(' is never closed")


def _class_end(pattern: str, start: int, field: str) -> int:
    """Index of the `]` that closes a character class; a nested class counts."""
    depth, index = 0, start
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index += 1
        elif character == "[":
            depth += 1
            while pattern[index + 1 : index + 2] == "^":
                index += 1
            if pattern[index + 1 : index + 2] == "]":
                index += 1
        elif character == "]":
            depth -= 1
            if depth == 0:
                return index
        index += 1
    raise _at(pattern, start, field, "'[' is never closed")


def _braces_end(pattern: str, start: int) -> int:
    """Index of the `}` of a repetition; the brace itself where it is none."""
    match = re.compile(r"\{[^{}()\[\]|]*\}").match(pattern, start)
    return match.end() - 1 if match else start


def _at(text: str, index: int, field: str, message: str) -> RequestError:
    """An error with the place shown: a few characters around it and a caret."""
    left = max(0, index - 30)
    shown = text[left : index + 10].replace("\n", " ")
    return RequestError(
        f"{field} is not a valid regular expression: {message} at character {index}\n"
        f"    {shown}\n    {' ' * (index - left)}^",
        field,
    )


def _escaped(text: str) -> str:
    """A regex for exactly this text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", r"\\\g<0>", text)


def _check_depth(value: Any, field: str) -> None:
    """Raise RequestError where data is nested too deep; iterative, for it may be very deep."""
    level = [value]
    for _ in range(MAX_NESTING):
        parts = [part for part in level if isinstance(part, dict | list)]
        if not parts:
            return
        level = [
            inner for part in parts for inner in (part.values() if isinstance(part, dict) else part)
        ]
    raise RequestError(f"{field} is nested deeper than {MAX_NESTING} levels", field)


def _depths(source: str) -> Sequence[int]:
    """How many brackets are open after each one, quotes not minded."""
    depth, depths = 0, []
    for character in re.findall(r"[()\[\]{}]", source):
        depth = depth + 1 if character in "([{" else max(0, depth - 1)
        depths.append(depth)
    return depths
