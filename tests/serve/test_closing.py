"""Objects without further keys, where a schema is strict or the server says so."""

import json

import pytest

from forerun.constrain.grammar import Grammar
from forerun.options.config import ServeSettings
from forerun.serve.bodies.closing import closed
from forerun.serve.bodies.dialogue import dialogue
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.schema import ChatBody
from tests.cli.toys import toy_loaded
from tests.constrain.tools import fits
from tests.worlds.toy_app import toy_client

NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SHUT = NAMED | {"additionalProperties": False}
INHERITED = {
    "$defs": {"base": NAMED},
    "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": NAMED}, "required": ["b"]}],
}


@pytest.mark.parametrize(
    ("schema", "denied"),
    [
        (NAMED, SHUT),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": SHUT}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"x": NAMED}, "$ref": "#/$defs/x"}, {"$defs": {"x": SHUT}, "$ref": "#/$defs/x"}),
        ({"properties": {"b": NAMED}},
         {"properties": {"b": SHUT}, "additionalProperties": False}),
        ({"allOf": [NAMED, NAMED]}, {"allOf": [NAMED, NAMED]}),
        (NAMED | {"allOf": [NAMED]}, NAMED | {"allOf": [NAMED]}),
        (NAMED | {"additionalProperties": True}, NAMED | {"additionalProperties": True}),
        (NAMED | {"patternProperties": {"x": NAMED}},
         NAMED | {"patternProperties": {"x": SHUT}}),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {"properties": {"type": "string"}}},
         {"properties": {"properties": {"type": "string"}}, "additionalProperties": False}),
        (True, True),
        (INHERITED, INHERITED),
        ({"$defs": {"x": NAMED}, "properties": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}},
         {"$defs": {"x": SHUT}, "properties": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}},
          "additionalProperties": False}),
        ({"$defs": {"x": NAMED, "y": NAMED}, "anyOf": [{"$ref": "#/$defs/x"}], "items": NAMED},
         {"$defs": {"x": SHUT, "y": SHUT}, "anyOf": [{"$ref": "#/$defs/x"}], "items": SHUT}),
        ({"$defs": {"x": NAMED}, "allOf": [{"$ref": "#/$defs/x"}, {"required": ["b"]}],
          "items": NAMED},
         {"$defs": {"x": NAMED}, "allOf": [{"$ref": "#/$defs/x"}, {"required": ["b"]}],
          "items": SHUT}),
        ({"anyOf": [NAMED], "oneOf": [NAMED]},) * 2,
        ({"$defs": {"x": NAMED, "y": {"$ref": "#/$defs/x"}},
          "allOf": [{"$ref": "#/$defs/y"}, {"required": ["b"]}]},) * 2,
        ({**NAMED, "$defs": {"x": NAMED}, "anyOf": [{"$ref": "#/$defs/x"}]},) * 2,
        (NAMED | {"anyOf": [{"required": ["b"]}, NAMED]},) * 2,
        (NAMED | {"if": {"required": ["a"]}, "then": {"properties": {"b": True}}},) * 2,
        (NAMED | {"dependentSchemas": {"a": {"required": ["b"]}}},) * 2,
        (NAMED | {"anyOf": [{"properties": {"a": {"const": 1}}}, NAMED]},) * 2,
        ({"$defs": {"x": {"$ref": "#/items"}}, "items": NAMED,
          "allOf": [{"$ref": "#/$defs/x"}, {"required": ["b"]}]},) * 2,
        ({"$ref": "#/x/y", "x": {"y": NAMED}, "items": NAMED},
         {"$ref": "#/x/y", "x": {"y": NAMED}, "items": SHUT}),
        ({"allOf": [{"$ref": "#/x/y"}, {}], "x": {"y": NAMED}, "items": NAMED},) * 2,
        (NAMED | {"oneOf": 5, "then": [{"required": [[]]}]},) * 2,
        ({"enum": [{"properties": {}}]}, {"enum": [{"properties": {}}]}),
    ],
)  # fmt: skip
def test_where_further_keys_are_denied(schema, denied):
    before = json.dumps(schema)
    assert closed(schema) == denied
    assert json.dumps(schema) == before


def wrapped(strict):
    return {"type": "json_schema", "json_schema": {"schema": NAMED, "strict": strict}}


@pytest.mark.parametrize(
    ("body", "server", "shut"),
    [
        ({"response_format": wrapped(True)}, "allow", True),
        ({"response_format": wrapped(False)}, "allow", False),
        ({"response_format": wrapped(False)}, "deny", True),
        ({"json_schema": NAMED}, "allow", False),
        ({"json_schema": NAMED}, "deny", True),
        ({"structured_outputs": {"json": NAMED, "disable_additional_properties": True}},
         "allow", True),
    ],
)  # fmt: skip
def test_what_a_request_and_a_server_ask_for(body, server, shut):
    parsed = read(ChatBody, {"messages": [{"role": "user", "content": "Hi"}]} | body)
    with toy_loaded() as loaded:
        rules = dialogue(parsed, loaded, ServeSettings(additional_properties=server)).rules
    assert json.loads(rules.grammar.source) == (SHUT if shut else NAMED)


@pytest.mark.parametrize(
    ("strict", "server", "shut"),
    [(True, "allow", True), (False, "deny", True), (False, "allow", False)],
)
def test_tools(strict, server, shut):
    function = {"name": "f", "parameters": NAMED, "strict": strict}
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": function}],
    }
    with toy_loaded() as loaded:
        rules = dialogue(
            read(ChatBody, body), loaded, ServeSettings(additional_properties=server)
        ).rules
    assert ("additionalProperties" in rules.grammar.source) == shut


def test_it_is_for_json_only():
    with toy_client() as client:
        fields = {"regex": "a", "disable_additional_properties": True}
        body = {"prompt": "Hi", "structured_outputs": fields}
        error = client.post("/v1/completions", json=body).json()["error"]
        assert error["param"] == "structured_outputs.disable_additional_properties"


@pytest.mark.parametrize(
    "schema",
    [
        INHERITED | {"type": "object"},
        {"$defs": {"base": NAMED}, "$ref": "#/$defs/base", "properties": {"b": NAMED},
         "required": ["b"]},
        NAMED | {"anyOf": [{"properties": {"b": NAMED}, "required": ["b"]}, NAMED]},
        {"type": "object", "properties": NAMED["properties"] | {"b": NAMED}, "required": ["a", "b"],
         "oneOf": [{"properties": {"a": {"const": n}}} for n in (1, 2)]},
        NAMED | {"dependentSchemas": {"a": {"properties": {"b": NAMED}, "required": ["b"]}}},
    ],
)  # fmt: skip
def test_what_is_closed_still_has_values(schema):
    """Keys that another part of the schema asks for are not forbidden."""
    assert fits(Grammar.json_schema(closed(schema)), '{"a": 1, "b": {"a": 1}}')
