"""The table of docs/use/structured-output.md: what of JSON Schema is enforced, by example.

An example is a schema, values that are valid and values that are not. It is enforced where a strict
request is taken and only valid values fit. To write the table anew:

    python -m tests.constrain.test_keywords
"""

import json
import re
import sys
from pathlib import Path

from forerun.constrain.grammar import Grammar
from forerun.errors import RequestError
from tests.constrain.tools import compiled, fits

PAGE = Path(__file__).parents[2] / "docs" / "use" / "structured-output.md"
INTEGER, TEXT, LIST = {"type": "integer"}, {"type": "string"}, {"type": "array"}
OBJECT = {"type": "object"}
PAIR = {**OBJECT, "properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False}
CAT = {**OBJECT, "properties": {"k": {"const": "cat"}}, "required": ["k"]}
DOG = {**OBJECT, "properties": {"k": {"const": "dog"}}, "required": ["k"]}
N = 175928847299117063
ZIP = {
    **OBJECT,
    "properties": {"in": {"enum": ["US", "NL"]}, "zip": TEXT},
    "required": ["in", "zip"],
    "additionalProperties": False,
    "if": {"properties": {"in": {"const": "US"}}},
    "then": {"properties": {"zip": {"const": "1"}}},
}
EXAMPLES = {
    "`type`": ({"type": ["integer", "null"]}, [1, None], ["a", 1.5]),
    "`const`, `enum`": ({"enum": ["a", 1, None]}, ["a", 1], ["b", 2]),
    "`const`, `enum` beyond 2^53": ({"enum": [N, 1]}, [], []),
    "`minimum`, `maximum`": ({**INTEGER, "minimum": 3, "maximum": 12}, [3, 12], [2, 13]),
    "`minimum` of an integer beyond 2^53": ({**INTEGER, "minimum": N}, [N + 25, 2**60], [N - 1]),
    "`minimum` of an integer beyond 2^63": ({**INTEGER, "minimum": 10**30}, [], []),
    "`exclusiveMinimum` of a number": ({"type": "number", "exclusiveMinimum": 0}, [0.5], [0, -1]),
    "`multipleOf` of an integer": ({**INTEGER, "multipleOf": 4}, [8], [6]),
    "`multipleOf` of a number": ({"type": "number", "multipleOf": 0.5}, [1.5], [1.25]),
    "`minLength`, `maxLength`": ({**TEXT, "minLength": 1, "maxLength": 2}, ["a"], ["", "abc"]),
    "`pattern`": ({**TEXT, "pattern": "^[a-c]+$"}, ["abc"], ["d", ""]),
    "`pattern` with length": ({**TEXT, "pattern": "^a*$", "maxLength": 2}, ["aa"], ["aaa", "b"]),
    "`pattern`, look-ahead at its beginning": ({**TEXT, "pattern": "^(?=.*1)[a1]{2}$"}, ["a1"],
                                               ["aa"]),
    "`format`: date, time, uuid, ipv4, email": ({**TEXT, "format": "date"}, ["2024-02-29"],
                                                ["2023-02-31"]),
    "`format`: json-pointer, regex": ({**TEXT, "format": "json-pointer"}, ["/a"], ["a"]),
    "`format`: password, binary, int64": ({**OBJECT, "properties": {
        "a": {**TEXT, "format": "password"}, "b": {**TEXT, "format": "binary"},
        "c": {**INTEGER, "format": "int64"}}}, [{"a": "x", "b": "x\ty", "c": 2**70}], [{"a": 1}]),
    "`format`: another": ({**TEXT, "format": "martian"}, ["x"], []),
    "`properties`, `required`": ({**PAIR, "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    "`additionalProperties`": ({**OBJECT, "additionalProperties": INTEGER}, [{"x": 1}],
                               [{"x": "a"}]),
    "`patternProperties`": ({**OBJECT, "patternProperties": {"^x": INTEGER}}, [{"x": 1}],
                            [{"x": "a"}]),
    "`propertyNames`": ({**OBJECT, "propertyNames": {"enum": ["a"]}}, [{"a": 1}], [{"b": 1}]),
    "`minProperties`, `maxProperties` of listed keys": ({**PAIR, "minProperties": 2}, [
        {"a": 1, "b": 1}], [{"a": 1}]),
    "`minProperties` 2 of any keys": ({**OBJECT, "minProperties": 2}, [{"a": 1, "b": 1}],
                                      [{"a": 1}]),
    "`dependentRequired`, `dependentSchemas`": ({**PAIR, "dependentRequired": {"a": ["b"]}}, [{}],
                                                [{"a": 1}]),
    "`items`, `prefixItems`": ({**LIST, "prefixItems": [INTEGER], "items": TEXT}, [[1, "a"]],
                               [["a"], [1, 1]]),
    "`minItems`, `maxItems`": ({**LIST, "minItems": 1, "maxItems": 2}, [[1]], [[], [1, 1, 1]]),
    "`uniqueItems` of up to six constants": ({**LIST, "items": {"enum": [1, 2]},
                                              "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    "`uniqueItems` of others": ({**LIST, "items": INTEGER, "uniqueItems": True}, [[1]], [[1, 1]]),
    "`contains`": ({**LIST, "items": INTEGER, "contains": {"const": 3}}, [[3]], [[1]]),
    "`anyOf`": ({"anyOf": [INTEGER, {"type": "null"}]}, [1, None], ["a"]),
    "`allOf`": ({"allOf": [INTEGER, {"minimum": 3}]}, [3], [2]),
    "`oneOf` with a discriminator": ({"oneOf": [CAT, DOG]}, [{"k": "cat"}], [{"k": "cow"}]),
    "`oneOf` that may overlap": ({"oneOf": [INTEGER, {"minimum": 3}]}, [1], [5]),
    "`not` over constants": ({**TEXT, "not": {"const": "no"}}, ["n"], ["no"]),
    "`not` over more": ({"not": {"minimum": 3}}, [1], [5]),
    "`if`, `then`, `else` over constants": (ZIP, [{"in": "US", "zip": "1"}],
                                            [{"in": "US", "zip": "2"}]),
    "`$ref`, `$defs`, `$id`, `$anchor`": ({"$id": "http://x/y", "$defs": {"n": {
        "$anchor": "n", **INTEGER}}, "$ref": "#n"}, [1], ["a"]),
    "`$ref` into another document": ({"$ref": "http://other/schema"}, [1], []),
    "`title`, `description`, `default`, `examples`, `id`": ({**INTEGER, "title": "t", "default": 1,
                                                             "id": "http://x"}, [1], ["a"]),
}  # fmt: skip


def enforced(name: str) -> bool:
    """Whether it is."""
    schema, valid, invalid = EXAMPLES[name]
    grammar = Grammar.json_schema(schema)
    try:
        compiled(grammar)
    except RequestError:
        return False
    assert all(fits(grammar, json.dumps(value)) for value in valid), (name, valid)
    assert not any(fits(grammar, json.dumps(value)) for value in invalid), (name, invalid)
    return True


def in_the_table() -> dict[str, bool]:
    """What the page says."""
    rows = re.findall(r"(?m)^\| (.+?) \| (yes|no) \|$", PAGE.read_text())
    return {name: said == "yes" for name, said in rows}


def test_the_table_says_what_is_enforced():
    table = in_the_table()
    assert table.keys() == EXAMPLES.keys()
    for name in EXAMPLES:
        assert enforced(name) is table[name], name


if __name__ == "__main__":
    for each in EXAMPLES:
        sys.stdout.write(f"| {each} | {'yes' if enforced(each) else 'no'} |\n")
