"""Grammars of differential fuzzing, by name: of every kind, shape and cost that there is."""

from collections.abc import Callable

from forerun.constrain.grammar import Grammar
from forerun.constrain.grammar.calls import Calling, Signature, tool_rules
from forerun.text.tools import GLM, HERMES, ToolFormat

_TEXT, _INTEGER = {"type": "string"}, {"type": "integer"}
_TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": _INTEGER,
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}
_WORDS = [f"{a}{b}{c}" for a in ("in", "un", "re") for b in "abdegrst" for c in ("", "ed", "ing")]
_FORM = {
    "type": "object",
    "properties": {"word": {"enum": _WORDS}, "ten": {"enum": [10, 100, 1000, None, True]}},
    "required": ["word", "ten"],
    "additionalProperties": False,
}
_PICK = {
    "type": "object",
    "properties": {
        "city": {**_TEXT, "maxLength": 9},
        "unit": {"enum": ["C", "F"]},
        "days": _INTEGER,
    },
    "required": ["city"],
    "additionalProperties": False,
}
_MANY = {
    "type": "object",
    "properties": {f"field{number}": _INTEGER for number in range(400)},
    "additionalProperties": False,
}
_AMBIGUOUS = 'start: a0 "z"\n' + "".join(
    f"a{level}: a{level + 1}? a{level + 1}? a{level + 1}?\n" for level in range(5)
)


def _calls(format: ToolFormat) -> Grammar:
    tools = [Signature(name, Grammar.json_schema(_PICK)) for name in ("weather", "wear")]
    return tool_rules(format, tools, Calling(required=False, several=True)).grammar


GRAMMARS: dict[str, Callable[[], Grammar]] = {
    "open object": lambda: Grammar.json_schema(
        {"type": "object", "properties": {"name": _TEXT, "age": _INTEGER}}
    ),
    "closed object": lambda: Grammar.json_schema(
        {
            "type": "object",
            "properties": {"name": {**_TEXT, "maxLength": 8}, "ok": {"type": "boolean"}},
            "required": ["name", "ok"],
            "additionalProperties": False,
        }
    ),
    "further keys": lambda: Grammar.json_schema(
        {"type": "object", "properties": {"a": _TEXT}, "additionalProperties": _INTEGER}
    ),
    "tree": lambda: Grammar.json_schema(_TREE),
    "enum": lambda: Grammar.json_schema({"enum": ["red", "green", "blue", "bluish"]}),
    "many words": lambda: Grammar.json_schema(_FORM),
    "many keys": lambda: Grammar.json_schema(_MANY),
    "large integers": lambda: Grammar.json_schema(
        {"type": "array", "items": {**_INTEGER, "minimum": 2**60, "maximum": 2**63 - 1}}
    ),
    "regex": lambda: Grammar.regex(r"(ab|cd){1,6}e?[0-9]{2,4}"),
    "GBNF": lambda: Grammar.grammar(
        'root ::= sum\nsum ::= sum [+-] part | part\npart ::= [0-9]{1,3} | "(" sum ")"'
    ),
    "Lark": lambda: Grammar.grammar(
        'start: list\nlist: "[" (item ("," item)*)? "]"\nitem: list | WORD\nWORD: /[a-z]{1,4}/'
    ),
    "ambiguous": lambda: Grammar.grammar(_AMBIGUOUS + "a5: /x/"),
    "calls": lambda: _calls(HERMES),
    "calls in tags": lambda: _calls(GLM),
}
"""The first step under the one of many keys is too much for the engine's thread: it goes on in
a process of its own. None reaches a limit in processor time, which ends an answer at another place
each time.
"""
