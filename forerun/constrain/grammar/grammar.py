"""The constraint of a request's text, and the checks that need no compiler."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from forerun.constrain.schema.checks import (
    check_depth,
    check_members,
    check_patterns,
    check_regexes,
    check_size,
    finite,
)
from forerun.constrain.schema.patterns import MAX_NESTING, literal, portable
from forerun.errors import RequestError

MAX_SOURCE = 256 * 1024
"""Most bytes of a grammar's source."""


class Kind(StrEnum):
    """Kinds of source. A choice compiles as a regex, a JSON object as a schema. FREE: any text."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Start:
    """A text after which a constraint begins, such as the end of reasoning; it may end within a
    token.

    control  whether control tokens add text; else they are skipped
    """

    text: str
    control: bool = False


LETTER = 3
"""Most further tokens that a character of UTF-8 may need."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most tokens of reasoning before its end is forced.

    tokens   N, of the reasoning without its marks
    used     how many of them are in the prompt already
    ending   ids that are forced after the N-th token, or after the end of its character: the end of
             the reasoning, perhaps after a message
    call     text that ends the reasoning without its closing mark, such as a call's opener: nothing
             is forced after it; "" = there is none
    """

    tokens: int
    used: int
    ending: tuple[int, ...]
    call: str = ""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text, not yet compiled; equal values compile to one grammar.

    source   a JSON schema as JSON text; a regular expression that the whole text must match
             (no look-around, no back-references); or a grammar in Lark or GBNF
    lenient  of a schema: keywords that cannot be enforced are ignored instead of rejected
    one_line of a schema: white space exactly as Python's json.dumps writes it, so that more of the
             text is forced and needs no step of its own
    start    text after which the constraint begins; None = it begins at once
    budget   of the reasoning before `start`; None = only max_tokens limits it
    field    the request field that errors name
    """

    kind: Kind
    source: str
    lenient: bool = False
    one_line: bool = False
    start: Start | None = None
    budget: ThinkingBudget | None = None
    field: str = field(default="grammar", compare=False)

    @classmethod
    def json_schema(cls, schema: Any, lenient: bool = False, field: str = "grammar") -> Self:
        """Return the grammar of JSON texts valid under `schema`: an object, or true or false.

        lenient  leave out keywords that cannot be enforced, instead of rejecting them
        field    the request field that errors name

        Raises RequestError if it is no schema, not JSON, larger than MAX_SOURCE or nested too deep;
        unless lenient, also for an invalid pattern or member.
        """
        if not isinstance(schema, dict | bool):
            raise RequestError(f"{field} must be a JSON schema: an object", field)
        check_size(schema, MAX_SOURCE, field)
        check_depth(schema, field)
        schema = {} if schema is True else schema
        if not lenient:
            check_regexes(schema, field)
            check_patterns(schema, field)
            check_members(schema, field)
        try:
            source = json.dumps(finite(schema), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(f"{field} is not JSON: {error}", field) from error
        return cls(Kind.JSON_SCHEMA, source, lenient, field=field)._checked()

    @classmethod
    def json_object(cls, field: str = "grammar") -> Self:
        """Return the grammar of any JSON object: `json_schema` of {"type": "object"}."""
        return cls.json_schema({"type": "object"}, field=field)

    @classmethod
    def regex(cls, pattern: str, field: str = "grammar") -> Self:
        """Return the grammar of texts that `pattern` matches as a whole, with JavaScript's meaning.
        Raises RequestError that points at the fault if it is no regular expression, is larger than
        MAX_SOURCE, or matches no text of at most MAX_FORCED characters.
        """
        grammar = cls(Kind.REGEX, pattern, field=field)._checked()
        return replace(grammar, source=portable(pattern, field))

    @classmethod
    def choice(cls, choices: Sequence[str], field: str = "grammar") -> Self:
        """Return the grammar of exactly one of `choices`. Raises RequestError if there is none, one
        is empty or no string, or all together are larger than MAX_SOURCE.
        """
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise RequestError(f"{field} must be a list of at least one non-empty string", field)
        size = sum(map(len, choices))
        if size > MAX_SOURCE:
            message = f"{field} has {size} characters; at most {MAX_SOURCE} bytes are taken"
            raise RequestError(message, field)
        pattern = "|".join(literal(text) for text in dict.fromkeys(choices))
        return cls(Kind.REGEX, pattern, field=field)._checked()

    @classmethod
    def grammar(cls, source: str, field: str = "grammar") -> Self:
        """Return a context-free grammar: GBNF (`root ::= ...`) or Lark (`start: ...`). Its rules
        are parsed when it is compiled.

        Raises RequestError if it is larger than MAX_SOURCE or nests brackets deeper than
        MAX_NESTING.
        """
        grammar = cls(Kind.GRAMMAR, source, field=field)._checked()
        if max(_depths(source), default=0) > MAX_NESTING:
            raise RequestError(f"{field} nests brackets deeper than {MAX_NESTING} levels", field)
        return grammar

    def on_one_line(self) -> Self:
        """Return a copy whose JSON has white space exactly as Python's json.dumps writes it. Raises
        RequestError if the grammar is not a schema.
        """
        if self.kind is not Kind.JSON_SCHEMA:
            raise RequestError(f"{self.field} is not a JSON schema; its own white space counts")
        return replace(self, one_line=True)

    @classmethod
    def free(cls) -> Self:
        """Return the grammar of any text, for an answer that only has a thinking budget."""
        return cls(Kind.FREE, "any text")

    def after(self, start: Start, budget: ThinkingBudget | None = None) -> Self:
        """Return a copy that begins after `start` instead of at once; `budget` forces `start` in
        time.
        """
        return replace(self, start=start, budget=budget)

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


def _depths(source: str) -> Sequence[int]:
    """Return the number of open brackets after each bracket, ignoring quotes."""
    depth, depths = 0, []
    for character in re.findall(r"[()\[\]{}]", source):
        depth = depth + 1 if character in "([{" else max(0, depth - 1)
        depths.append(depth)
    return depths
