"""Arguments in tags: strings without quotes that still are what the schema says."""

import asyncio
import json

import pytest

from forerun.constrain.grammar import Grammar
from forerun.constrain.grammar.calls import Calling, Signature, tool_rules, with_tags
from forerun.errors import RequestError
from forerun.text.tools import GLM, QWEN, SEED, ToolReader
from tests.constrain.tools import compiled, fits
from tests.counted import lines

PLACE = "tools[0].function.parameters"


def rules(parameters, lenient=False, format=GLM):
    tools = [Signature("f", Grammar.json_schema(parameters, lenient, PLACE))]
    return tool_rules(format, tools, Calling(True, False))


def grammar(parameters, lenient=False):
    return rules(parameters, lenient).grammar


def of(value, **more):
    return {"type": "object", "properties": {"a": value}, "required": ["a"], **more}


def called(value):
    return f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


async def in_time(made):
    return compiled(made)


TEXT = {"type": "string"}
TAKEN = [
    (of(TEXT), ["", "x < y", '"q" \\'], ["</arg_value>"]),
    (of({**TEXT, "pattern": "^[a-z<]+$"}), ["ab", "a<b"], ["", "a1", "a</arg_value>b"]),
    (of({**TEXT, "pattern": "b/c"}), ["b/c", "ab/c\nd"], ["bc"]),
    (of({**TEXT, "pattern": "^a|b$"}), ["ax", "xb"], ["xa"]),
    (of({**TEXT, "minLength": 2, "maxLength": 3}), ["ab", "é\nc"], ["a", "abcd"]),
    (of({**TEXT, "pattern": "^a", "maxLength": 2}), ["a", "ab"], ["abc", "b"]),
    (of({**TEXT, "const": "yes"}), ["yes"], ["no", '"yes"']),
    (of({**TEXT, "enum": ["yes", "a b"]}), ["yes", "a b"], ["no"]),
    (of({**TEXT, "format": "date"}), ["2024-02-29", "2023-12-31"], ["2023-02-29", "2023-04-31"]),
    (of({**TEXT, "format": "ipv4"}), ["1.2.3.4"], ["1.2.3.400"]),
    (of({**TEXT, "format": "email"}), ["a.b@c.de"], ["a", "a@"]),
    (of({**TEXT, "not": {"const": "no"}}), ["n", "nope", 'a "b"\nc'], ["no"]),
    (of({**TEXT, "allOf": [{"anyOf": [{"maxLength": 1}, {"pattern": "^ab"}]}]}),
     ["x", "abc"], ["xy"]),
    (of({"$ref": "#/$defs/n"}, **{"$defs": {"n": {"type": "integer"}}}), ["1"], ["x", '"x"']),
    (of({"$ref": "#/properties/b"}) | {"properties": {"a": {"$ref": "#/$defs/t"}},
      "$defs": {"t": {**TEXT, "maxLength": 1}}}, ['"x"'], ['"xy"', "x"]),
    (of({"anyOf": [{"type": "integer"}, {"type": "null"}]}), ["1", "null"], ["x", "1.5"]),
    ({"$ref": "#/$defs/o", "$defs": {"o": of({"type": "integer", "maximum": 3})}}, ["3"], ["4"]),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "valid", "invalid"), TAKEN, ids=lambda v: str(v)[:60])
def test_what_a_schema_says_of_a_value_holds(parameters, valid, invalid):
    made = grammar(parameters)
    for value in valid:
        assert fits(made, called(value)), value
        reader = ToolReader(GLM, [{"function": {"name": "f", "parameters": parameters}}])
        pieces = [*reader.push(called(value)).calls, *reader.finish().calls]
        read = json.loads("".join(piece.arguments for piece in pieces))["a"]
        raw = parameters.get("properties", {}).get("a", {}).get("type") == "string"
        assert read == (value if raw else json.loads(value))
    for value in invalid:
        assert not fits(made, called(value)), value


@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        (of(TEXT, dependentRequired={"b": ["a", "c"]}), "allOf"),
        (of({**TEXT, "not": {"pattern": "x"}}), "properties.a.not"),
        (of({"type": "array", "uniqueItems": True}), "properties.a.uniqueItems"),
        ({"type": "object", "required": ["z"]}, "required"),
        (of(TEXT, patternProperties={"^a": {"minLength": 3}}), "patternProperties"),
    ],
)
def test_what_cannot_be_said_is_refused_or_named(parameters, path):
    with pytest.raises(RequestError, match="cannot be honoured") as error:
        asyncio.run(rules(parameters).compiled(in_time))
    assert error.value.field == PLACE and f"{PLACE}: {path} " in str(error.value)
    assert compiled(grammar(parameters, lenient=True)).unenforced == (f"{PLACE}.{path}",)


@pytest.mark.parametrize("format", [GLM, QWEN, SEED])
@pytest.mark.parametrize(
    "kind",
    [
        lambda many: {"patternProperties": {f"^x{i}": {} for i in range(many)}},
        lambda many: {"required": [f"q{i}" for i in range(many)]},
        lambda many: {"$defs": {f"d{i}": {"enum": ["x" * 40]} for i in range(many)}},
    ],
)
def test_a_large_schema_is_written_out_in_the_compiling_process(format, kind):
    """The server's own took 20 s for 45 kB of patterns, and gigabytes for definitions."""

    def work(many):
        properties = {f"p{i}": {"type": "integer"} for i in range(many)}
        return lines(lambda: rules({"properties": properties, **kind(many)}, True, format))

    assert work(200) < 2.5 * work(100) < 250_000
    many = {"properties": {f"p{i}": TEXT for i in range(1500)}, **kind(1500)}
    assert len(with_tags(rules(many, True, format).grammar.source)[0]) < 1_000_000


def test_definitions_stand_where_they_are_referred_to():
    defined = {f"d{i}": {"enum": ["x" * 100, "y"]} for i in range(100)}
    properties = {f"p{i}": {"type": "integer"} for i in range(100)}
    made = grammar({"type": "object", "properties": properties, "$defs": defined})
    assert fits(made, "<tool_call>f\n</tool_call>")
