"""The fields that constrain an answer, in the formats of four servers, each read into `Rules`.

OpenAI     response_format {"type": "text" | "json_object" | "json_schema", ...}
vLLM       structured_outputs {"json" | "regex" | "choice" | "grammar" | "structural_tag"},
           and its older guided_json, guided_regex, guided_choice, guided_grammar
SGLang     json_schema, regex, ebnf
llama.cpp  grammar, json_schema, and "schema" in a response_format of a JSON type
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forerun.constrain.grammar import Grammar
from forerun.constrain.grammar.calls import Rules
from forerun.constrain.grammar.tags import Tag, tag_rules
from forerun.constrain.schema.checks import check_members, check_regexes
from forerun.errors import RequestError
from forerun.serve.bodies.closing import closed_grammar, closed_rules
from forerun.serve.bodies.fields import (
    Declaration,
    Reader,
    Typed,
    accept,
    boolean,
    declared,
    items,
    need,
    only,
    plain_text,
    read,
    schema_of,
    tagged,
    takes,
    text,
)
from forerun.text.json_text import JsonFault, read_json

MAX_PARTS = 1 << 16
"""Most choices, tags or triggers; their size in bytes is limited by the grammar's."""


@takes({"type": ["object", "string", "boolean"]})
def json_rules(value: Any, where: str) -> Rules:
    """Read a JSON schema: an object, or JSON text of one. Keywords that cannot be enforced are left
    out. Raises RequestError, naming `where`, for anything else.
    """
    return Rules(_whole_schema(_parsed(value, where), False, where))


def _whole_schema(schema: Any, strict: bool, where: str) -> Grammar:
    """Return the grammar of a schema for the whole answer, strict or not. Rejects parts that are no
    schemas, and patterns that are no regular expressions. (Tools may have them: the others can be
    called.)
    """
    grammar = Grammar.json_schema(schema, not strict, where)
    if not strict:
        check_members(schema, where)
        check_regexes(schema, where)
    return grammar


@takes({"type": "string"})
def regex_rules(value: Any, where: str) -> Rules:
    """Read a regular expression for the whole text. Raises RequestError, naming `where`, if it is
    no string or invalid.
    """
    return Rules(Grammar.regex(plain_text(value, where), where))


@takes(items(plain_text, MAX_PARTS, 1).schema)
def choice_rules(value: Any, where: str) -> Rules:
    """Read a list of texts, one of which is the answer. Raises RequestError, naming `where`, for
    anything else.
    """
    return Rules(Grammar.choice(items(plain_text, MAX_PARTS, 1)(value, where), where))


@takes({"type": "string"})
def grammar_rules(value: Any, where: str) -> Rules:
    """Read a grammar in GBNF or Lark for the whole text. Raises RequestError, naming `where`, if it
    is no string or invalid.
    """
    return Rules(Grammar.grammar(plain_text(value, where), where))


@takes({"type": ["object", "string"]})
def structural_rules(value: Any, where: str) -> Rules:
    """Read tags in free text: an object with structures and triggers, or JSON text of one. Raises
    RequestError naming the field.
    """
    given = read(_StructuralTag, _parsed(value, where), where)
    return tag_rules(given.structures, given.triggers, where)


@takes({"type": "object", "required": ["type"]})
def response_rules(value: Any, where: str) -> Rules | None:
    """Read OpenAI's response_format, whose type determines its other fields. Returns None for any
    text. Raises RequestError naming the field.
    """
    given = _response_format(value, where)
    if isinstance(given, _JsonSchema):
        if (given.json_schema is None) is (given.schema is None):
            problem = "is missing, or there is a schema beside it"
            raise RequestError(f"{where}.json_schema {problem}.", f"{where}.json_schema")
        return given.json_schema.rules if given.json_schema else given.schema
    if isinstance(given, _StructuralTag):
        return tag_rules(given.structures, given.triggers, where)
    if isinstance(given, _JsonObject):
        return given.schema or json_object_rules(where)
    return None


@takes({"type": "object", "minProperties": 1})
def structured_rules(value: Any, where: str) -> Rules:
    """Read vLLM's structured_outputs, an object with exactly one kind. Raises RequestError naming
    the field.
    """
    given = read(_StructuredOutputs, value, where)
    found = one_of(given, _KINDS, f"{where}.")
    if found is None:
        raise RequestError(f"{where} needs one of {', '.join(_KINDS)}.", where)
    for name in ("strict", "disable_any_whitespace", "disable_additional_properties"):
        if getattr(given, name) and given.json is None:
            place = f"{where}.{name}"
            raise RequestError(f"{place} is for json only.", place)
    if given.strict:
        found = replace(found, grammar=replace(found.grammar, lenient=False))
    if given.disable_additional_properties:
        found = closed_rules(found)
    return found.on_one_line() if given.disable_any_whitespace else found


def one_of(body: Any, names: tuple[str, ...], prefix: str = "") -> Rules | None:
    """Return the one field of `names` that is set, or several that mean the same, as clients send
    them to servers of any version (guidance); None if none is. Raises RequestError, naming two, if
    more are.
    """
    found = [name for name in names if getattr(body, name) is not None]
    if any(getattr(body, name) != getattr(body, found[0]) for name in found[1:]):
        raise RequestError(
            f"{prefix}{found[0]} and {prefix}{found[1]} cannot be honoured at once: an answer "
            "has one constraint.",
            f"{prefix}{found[1]}",
        )
    rules: Rules | None = getattr(body, found[0]) if found else None
    return rules


def _parsed(value: Any, where: str) -> Any:
    """Return a value; if it is a string, the JSON value in it."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except JsonFault as error:
        raise RequestError(f"{where} is not JSON: {error}", where) from error


_KINDS = ("json", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class _StructuredOutputs(Declaration):
    json: Rules | None = accept(json_rules)
    regex: Rules | None = accept(regex_rules)
    choice: Rules | None = accept(choice_rules)
    grammar: Rules | None = accept(grammar_rules)
    structural_tag: Rules | None = accept(structural_rules)
    strict: bool = accept(boolean, False)
    disable_any_whitespace: bool = accept(boolean, False)
    disable_additional_properties: bool = accept(boolean, False)

    refused: ClassVar[dict[str, str]] = {
        "json_object": "use response_format with the type json_object",
        "whitespace_pattern": "white space in JSON is bounded already",
        "disable_fallback": "there is only one backend",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _JsonObject(Typed):
    schema: Rules | None = accept(json_rules)


def named_rules(schema: Any, strict: bool, place: str) -> Rules:
    """Return the rules of a schema in OpenAI's format. A strict one has objects without further
    keys; another may have keywords that are not enforced.
    """
    found = _whole_schema(schema, strict, place)
    return Rules(closed_grammar(found) if strict else found)


def json_object_rules(place: str) -> Rules:
    """Return the rules of any JSON object; place: the field that requests it, for errors."""
    return Rules(Grammar.json_object(place))


def _named_schema(value: Any, where: str) -> "_NamedSchema":
    """Read OpenAI's wrapper of a schema."""
    given = read(_Wrapper, value, where)
    return _NamedSchema(named_rules(given.schema, given.strict, f"{where}.schema"))


@dataclass(frozen=True, slots=True)
class _NamedSchema:
    rules: Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wrapper(Declaration):
    schema: Any = need(_parsed)
    name: str | None = accept(text(64, 1))
    description: str | None = accept(plain_text)
    strict: bool = accept(boolean, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _JsonSchema(Typed):
    json_schema: _NamedSchema | None = accept(_named_schema)
    schema: Rules | None = accept(json_rules)


def _tag(value: Any, where: str) -> Tag:
    given = read(_TagBody, value, where)
    return Tag(given.begin, given.schema.grammar, given.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TagBody(Declaration):
    begin: str = need(text(1024, 1))
    schema: Rules = need(json_rules)
    end: str = need(text(1024))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StructuralTag(Declaration):
    type: str = accept(only("structural_tag", why="it is a fixed value"), "structural_tag")
    structures: tuple[Tag, ...] = need(items(_tag, MAX_PARTS, 1))
    triggers: tuple[str, ...] = need(items(text(1024, 1), MAX_PARTS, 1))

    refused: ClassVar[dict[str, str]] = {"format": "send structures and triggers"}


_response_format = tagged(
    {
        "text": Typed,
        "json_object": _JsonObject,
        "json_schema": _JsonSchema,
        "structural_tag": _StructuralTag,
    }
)


def _or_nothing(reader: Reader) -> Reader:
    """Return a reader that treats an empty text as absent, and anything else as `reader` does."""

    def empty_or_read(value: Any, where: str) -> Rules | None:
        rules: Rules | None = None if value == "" else reader(value, where)
        return rules

    return takes(schema_of(reader))(empty_or_read)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedBody(Declaration):
    """The fields that constrain a request's answer; at most one may be set. An empty text counts as
    absent: clients send it for settings their users left open.
    """

    response_format: Rules | None = accept(response_rules)
    structured_outputs: Rules | None = accept(structured_rules)
    regex: Rules | None = accept(_or_nothing(regex_rules))
    ebnf: Rules | None = accept(_or_nothing(grammar_rules))
    json_schema: Rules | None = accept(_or_nothing(json_rules))
    grammar: Rules | None = accept(_or_nothing(grammar_rules))
    guided_json: Rules | None = accept(_or_nothing(json_rules))
    guided_regex: Rules | None = accept(_or_nothing(regex_rules))
    guided_choice: Rules | None = accept(choice_rules)
    guided_grammar: Rules | None = accept(_or_nothing(grammar_rules))

    @property
    def rules(self) -> Rules | None:
        """The one constraint. Raises RequestError naming two where there are more."""
        return one_of(self, _CONSTRAINTS)


_CONSTRAINTS = tuple(declared(ConstrainedBody))
