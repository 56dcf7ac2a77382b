"""Keywords that no library has, in words that they have: nothing invalid passes, something does."""

import json
from decimal import Decimal

import pytest

from forerun.constrain.grammar import Grammar
from forerun.constrain.grammar.calls import Calling, Signature, tool_rules
from forerun.constrain.matcher.matcher import Matcher
from forerun.constrain.schema.rewrite import rewritten
from forerun.errors import RequestError
from forerun.text.tools import HERMES
from tests.constrain.tools import compiled, fits

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}}}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}}
PETS = {
    "$defs": {"Cat": {**CAT, "required": ["kind"]}, "Dog": {**DOG, "required": ["kind"]}},
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
}
PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "additionalProperties": False,
}
COUNTRY = {
    "type": "object",
    "properties": {"in": {"enum": ["US", "NL"]}, "zip": {"type": "string"}},
    "required": ["in", "zip"],
    "additionalProperties": False,
    "if": {"properties": {"in": {"const": "US"}}},
    "then": {"properties": {"zip": {"pattern": "^[0-9]{5}$"}}},
    "else": {"properties": {"zip": {"pattern": "^[0-9]{4}[A-Z]{2}$"}}},
}
THREE = {**PAIR, "properties": {**PAIR["properties"], "c": {"type": "integer"}}}
ANY_OF_THREE = {"type": ["string", "integer", "null"]}
KEYED = {**THREE, "properties": {**THREE["properties"], "a": ANY_OF_THREE}, "required": ["a"]}
UNIQUE = {"type": "array", "uniqueItems": True}
TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
EMPTY = {
    "none": {"type": "integer", "minimum": 3, "maximum": 1},
    "more": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]},
}
TAKEN = [
    (PETS, [{"kind": "cat", "n": 1}, {"kind": "wolf"}],
     [{"kind": "cow"}, {"kind": "cat", "n": ""}]),
    ({**PAIR, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     [{"a": 1}], [{"a": 1, "b": 1}, {}]),
    ({"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]},
     ["", 1], [None, 1.5]),
    ({**PAIR, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    ({**PAIR, "dependencies": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    ({**PAIR, "dependentSchemas": {"a": {"required": ["b"]}}}, [{"a": 1, "b": 2}], [{"a": 1}]),
    (COUNTRY, [{"in": "US", "zip": "12345"}, {"in": "NL", "zip": "1234AB"}],
     [{"in": "US", "zip": "1234AB"}, {"in": "NL", "zip": "12345"}]),
    ({"type": "any"}, [1, "a", None, [{}]], []),
    ({**PAIR, "properties": {"a": {"type": ["any", "null"]}}, "required": ["a"]},
     [{"a": 1}, {"a": None}, {"a": ["x"]}], [{}]),
    ({**PAIR, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{}]),
    ({**PAIR, "minProperties": 2}, [{"a": 1, "b": 1}], [{}, {"a": 1}]),
    ({**PAIR, "maxProperties": 1}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    ({"type": "array", "uniqueItems": True, "items": {"enum": ["x", "y"]}},
     [[], ["x"], ["y", "x"]], [["x", "x"], ["z"]]),
    ({"type": "array", "contains": {"const": 3}, "items": {"type": "integer"}},
     [[3], [3, 1]], [[], [1], [3, ""]]),
    ({**TEXT, "not": {"const": "no"}}, ["", "n", "nox", "yes"], ["no"]),
    ({"enum": ["a", "b", "c"], "not": {"enum": ["b", "c"]}}, ["a"], ["b", "c"]),
    ({"type": ["string", "null"], "not": {"type": "null"}}, ["a"], [None]),
    ({**PAIR, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^x-"}}, [{}, {"x-a": 1}], [{"a": 1}]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{"a": 1}, {"b": 2}], [{"c": 1}]),
    ({**TEXT, "pattern": '^[^"]{1,60}$'}, ["ab", "a" * 60], ['a"b', "", "a" * 61]),
    ({**TEXT, "pattern": r"^[^\\]+$"}, ["ab"], ["a\\b"]),
    ({**TEXT, "pattern": '^[^<>"]+$'}, ["ab"], ['"', "<"]),
    ({**TEXT, "pattern": "^[^[]*$"}, ["", "ab"], ["a["]),
    ({**TEXT, "pattern": "^[~~a]$"}, ["~", "a"], ["b"]),
    ({**TEXT, "pattern": "^(?=.*[0-9])[a-z0-9]{2}$"}, ["a1", "12"], ["ab", "1"]),
    ({**TEXT, "format": "uri-reference"}, ["a/b?c#d", "https://a.b/c"], ["a b"]),
    ({**TEXT, "format": "json-pointer"}, ["", "/a/~0b"], ["a", "/~"]),
    ({**TEXT, "format": "regex"}, ["^[a-z]+$", "(a|b)*"], ["(", "["]),
    ({**TEXT, "format": "date-time"}, ["2004-09-22T01:56:59.5+02:00"], ["2004-09-22T01:56:60Z"]),
    ({**TEXT, "format": "date-time"}, [f"2004-09-22T01:56:59.{'0' * 9}Z"],
     [f"2004-09-22T01:56:59.{'0' * 10}Z"]),
    ({**TEXT, "format": "time"}, ["01:56:06Z"], ["01:56:60Z", "1:2:3Z"]),
    ({**TEXT, "format": "time"}, ["01:56:06.123456789-01:30"], ["01:56:06.1234567890Z"]),
    ({"type": "integer", "minimum": 175928847299117063}, [175928847299117088, 2**62],
     [175928847299117062, 175928847299117056]),
    ({"enum": [2**62, 2**60, 3]}, [2**62, 2**60, 3], [2**62 - 1, 2**60 + 1, 4]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [-5, 7], [2**64, -(2**64)]),
    ({"type": "number", "minimum": -1.8e308, "maximum": 1.8e308}, [-3, 1.5], ["x"]),
    ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, [-3, 1.5], ["x"]),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://x/y", "type": "integer",
      "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    ({"$id": "http://x/y", "definitions": {"p": {"$id": "p", **TEXT}}, "items": {"$ref": "p"},
      "type": "array"}, [["a"]], [[1]]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
      "items": [{"const": 1}, TEXT], "additionalItems": False}, [[1, "a"]], [[1, "a", 2], ["a"]]),
    ({**THREE, "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
     [{"a": 1}, {"b": 1}, {"c": 1}], [{"a": 1, "c": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1}]),
    ({**KEYED, "if": {"properties": {"a": {"type": "string", "enum": [1, "a"]}}},
      "then": {"required": ["b"]}, "else": {"required": ["c"]}},
     [{"a": "a", "b": 1}, {"a": 1, "c": 1}], [{"a": 1, "b": 1}, {"a": "a", "c": 1}]),
    ({**KEYED, "if": {"properties": {"a": {"type": "null"}}}, "then": {"required": ["b"]}},
     [{"a": None, "b": 1}, {"a": 1}], [{"a": None}]),
    ({**UNIQUE, "items": {"type": "string", "enum": ["a", None, 1]}}, [["a"], []], [[1], [None]]),
    ({**UNIQUE, "items": {"enum": ["a", "b"], "not": {"const": "b"}}}, [["a"]],
     [["a", "a"], ["b"]]),
    ({**UNIQUE, "maxItems": 2.0, "items": {"enum": [1, 2, 3]}}, [[1, 2]], [[1, 2, 3], [1, 1]]),
    ({**PAIR, "minProperties": 1.0}, [{"a": 1}], [{}]),
    ({"type": "object", "propertyNames": {"pattern": '^[^"]+$'}}, [{"a": 1}], [{'"': 1}]),
    ({"type": "object", "propertyNames": {"type": "integer"}}, [{}], [{"a": 1}]),
    ({"type": "object", "propertyNames": False, "patternProperties": {"x": TEXT}}, [{}],
     [{"a": 1}, {"x": "a"}]),
    ({"type": "integer", "not": {"enum": [0, 2]}}, [-1, 1, 3], [0, 2]),
    ({"type": "number", "not": {"const": 1}}, [0.5, 1.5, 2], [1, 1.0]),
    ({"type": ["integer", "string"], "not": {"enum": [1.5, 3]}}, [1, 2, 4, "a"], [3]),
    ({"type": "object", "required": ['x"y'], "properties": {"a": TEXT}}, [{'x"y': 1}], [{}]),
    ({**TEXT, "pattern": r"^[\p{Lu}_]+$"}, ["E_A"], ["a", "p", "{"]),
    ({**TEXT, "pattern": r"^[^\p{L}]+$"}, ["12"], ["a", "É"]),
    ({**TEXT, "not": {"const": "no"}}, ['a "b"\n\\', "no\t"], ["no"]),
    ({"type": ["string", "null"], "not": {"enum": ["", None]}}, ["a"], ["", None]),
    ({"not": {"enum": ["ab", 1, True]}}, ["a", 2, False, None, [], {}], ["ab", 1, True]),
    ({**COUNTRY, "type": ["object", "null"]}, [None, {"in": "US", "zip": "12345"}],
     [1, {"in": "US", "zip": "1234AB"}]),
    ({"if": {"type": "object", "required": ["a"]}, "then": {"required": ["b"]}, "else": TEXT},
     ["x", {"a": 1, "b": 2}], [None, {}, {"a": 1}]),
    ({**PAIR, "additionalProperties": True, "required": ["c"], "maxProperties": 2},
     [{"c": ""}, {"a": 1, "c": ""}], [{"a": 1}, {"a": 1, "b": 1, "c": 1}]),
    ({**PAIR, "additionalProperties": TEXT, "minProperties": 1},
     [{"x": ""}, {"b": 1}, {"a": 1, "x": ""}], [{}, {"x": 1}, {"a": ""}]),
    ({**PAIR, "type": ["object", "string"], "required": ["a"],
      "dependentSchemas": {"a": {"type": "object", "required": ["b"]}}},
     ["x", {"a": 1, "b": 2}], [{"a": 1}, 1]),
    ({**PAIR, "properties": {"a": {"$ref": "#/$defs/none"}, "b": INTEGER}, "$defs": EMPTY},
     [{}, {"b": 1}], [{"a": 1}]),
    ({"anyOf": [{"$ref": "#/$defs/more"}, {"type": "array", "items": {"$ref": "#/$defs/none"}}],
      "$defs": EMPTY}, [[]], [{}, {"a": 1}, [1]]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), TAKEN, ids=lambda value: str(value)[:50])
def test_what_is_written_otherwise_means_the_same(schema, valid, invalid):
    grammar = Grammar.json_schema(schema)
    for values, wanted in ((valid, True), (invalid, False)):
        for value in values:
            assert fits(grammar, json.dumps(value)) is wanted, value


LEFT = [
    ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "uniqueItems", [1, 1]),
    ({"properties": {"a": {"not": {"minimum": 3}}}}, "properties.a.not", {"a": 5}),
    ({**TEXT, "format": "martian"}, "format", "x"),
    ({**TEXT, "pattern": "(?!a)b"}, "pattern", "x"),
    ({"items": {"$ref": "http://other/schema"}}, "items.$ref", [1]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", 1),
    ({"$defs": {"x": {"if": {"minimum": 3}, "then": False}}, "items": {"$ref": "#/$defs/x"}},
     "$defs.x.if", [4]),
    ({"type": "object", "minProperties": 2}, "minProperties", {"x": 1}),
    ({"patternProperties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
     "patternProperties.b", {"b": 1}),
    ({**UNIQUE, "items": {"enum": ["a", "b"], "pattern": "a"}}, "uniqueItems", ["a", "a"]),
    ({"$defs": {"p": {"properties": {"a": TEXT}, "additionalProperties": False}},
      "type": "object", "oneOf": [{"$ref": "#/$defs/p", "properties": {}}, {"required": ["a"]}]},
     "oneOf", {"a": "x"}),
    ({**KEYED, "if": {"$ref": "#/$defs/b", "required": ["c"]}, "$defs": {"b": {"required": ["b"]}},
      "then": False}, "if", {"a": "x", "c": 1}),
    ({**KEYED, "if": {"properties": {"a": {"enum": ["ab", "b"], "pattern": "^a"}}},
      "then": {"required": ["b"]}}, "if", {"a": "b"}),
    ({**KEYED, "if": {"properties": {"a": {"const": "b", "enum": ["a"]}}}, "then": False},
     "if", {"a": "b"}),
    ({"type": "object", "propertyNames": {"pattern": r"^\p{L}$"}, "properties": {"a": {}},
      "additionalProperties": False}, "propertyNames", {"a": 1}),
    ({"type": "object", "properties": {"a": {**TEXT, "required": True}}}, "properties.a.required",
     {"a": "x"}),
    ({**TEXT, "minLength": "2"}, "minLength", "x"),
    ({"type": "object", "properties": ["a"]}, "properties", {"a": 1}),
    ({"$ref": "#/x/y", "x": {"y": [1]}}, "$ref", 1),
    ({"type": "integer", "not": {"const": 175928847299117063}}, "not", 5),
    ({"oneOf": [{**TEXT, "pattern": "(?:^x)?b"}, {"const": 1}]}, "oneOf[0].pattern", "y"),
    ({"oneOf": [{**CAT, "required": ["kind"]}, {**DOG, "required": ["n"], "properties": {"n": {
        **TEXT, "pattern": "a(^x)?b"}}}]}, "oneOf[1].properties.n.pattern", {"n": "y"}),
    ({"$defs": {"p.q": {"oneOf": [INTEGER, {**TEXT, "pattern": "a/(^x)?b"}]}}, "items": {
        "oneOf": [{"$ref": "#/$defs/p.q"}, {"type": "null"}]}}, "$defs.p.q.oneOf[1].pattern",
     ["y"]),
    ({"allOf": [{"oneOf": [INTEGER, {**TEXT, "pattern": "(^x)?b"}]}, {"type": ["string", "null"]}]},
     "allOf[0].oneOf[1].pattern", "y"),
    ({"additionalItems": {**TEXT, "pattern": "(^x)?b"}, "items": [INTEGER],
      "$schema": "http://json-schema.org/draft-07/schema#"}, "additionalItems.pattern", [1, "y"]),
    ({"type": "number", "not": {"type": "integer"}}, "not", 1.5),
    ({"properties": {"a": {"const": 2**53 + 1}}}, "properties.a.const", {"a": 5}),
    ({"items": {"enum": [2**53 + 1, "a", 3]}}, "items.enum", [4, "b", 2**53 + 1]),
    ({"const": {"a": [2**60 + 1]}}, "const", {"a": []}),
    ({"const": 2**63}, "const", 7),
    ({"enum": [-(2**63), 1]}, "enum", 7),
    ({"type": "integer", "minimum": 10**30}, "minimum", 1),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path", "value"), LEFT, ids=lambda value: str(value)[:40])
def test_what_cannot_be_enforced_is_refused_or_left_out_and_named(schema, path, value):
    field = "response_format.json_schema.schema"
    if path != "patternProperties.b":
        with pytest.raises(RequestError, match="cannot be honoured") as error:
            compiled(Grammar.json_schema(schema, field=field))
        assert f"{field}: {path} cannot" in str(error.value) and error.value.field == field
    loose = Grammar.json_schema(schema, lenient=True, field=field)
    assert compiled(loose).unenforced == (f"{field}.{path}",)
    assert fits(loose, json.dumps(value))


@pytest.mark.parametrize("factor", [".25", ".15", ".375", "12.25", ".05", ".5", "2.5", "15"])
@pytest.mark.parametrize("beside", [{}, {"minimum": 1}, {"anyOf": [{"type": "number"}]}])
def test_a_multiple_may_have_fewer_digits_than_the_factor(factor, beside):
    grammar = Grammar.json_schema({"type": "number", "multipleOf": float(factor), **beside})
    places = -min(0, Decimal(factor).as_tuple().exponent)
    for digits in range(places + 1):
        for number in (0, 1, 5, 10, 12, 15, 25, 75, 125, 130, 245, 250, 375, 2450):
            text = f"{Decimal(number).scaleb(-digits):f}"
            large = Decimal(text) >= beside.get("minimum", 0)
            assert fits(grammar, text) == (Decimal(text) % Decimal(factor) == 0 and large), text


def test_bounds_with_no_float_between_them_are_refused_or_left_out_both():
    schema = {"items": {"type": "integer", "minimum": 2**60 + 1, "maximum": 2**60 + 2}}
    with pytest.raises(RequestError, match=r"items\.minimum cannot be honoured: a bound beyond"):
        compiled(Grammar.json_schema(schema))
    loose = compiled(Grammar.json_schema(schema, lenient=True))
    assert loose.unenforced == ("grammar.items.minimum", "grammar.items.maximum")


def test_what_is_left_out_of_a_choice_is_named_by_the_clients_own_path():
    inner = {"type": "object", "patternProperties": {"^x": TEXT, "^xy": INTEGER}}
    schema = {"type": "object", "properties": {"p": {"oneOf": [inner, INTEGER]}}}
    unenforced = compiled(Grammar.json_schema(schema, lenient=True)).unenforced
    assert [path.removesuffix(".^xy") for path in unenforced] == [
        "grammar.properties.p.oneOf[0].patternProperties"
    ]


@pytest.mark.parametrize("count", [6, 8])
def test_conditions_that_multiply_are_left_out_and_named(count):
    rules = [
        {
            "if": {"properties": {f"a{i}": {"const": 1}}, "required": [f"a{i}"]},
            "then": {"required": [f"b{i}"]},
        }
        for i in range(count)
    ]
    schema = {"type": "object", "properties": {"a0": {"type": "integer"}}, "allOf": rules}
    with pytest.raises(RequestError, match=r"too (big|large)"):
        compiled(Grammar.json_schema(schema))
    loose = Grammar.json_schema(schema, lenient=True)
    assert compiled(loose).unenforced == tuple(f"grammar.allOf[{i}].if" for i in range(count))
    assert fits(loose, '{"a0": 2}') and not fits(loose, '{"a0": "x"}')


def test_a_listed_key_has_one_spelling():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    for further in ({}, {"additionalProperties": TEXT}):
        grammar = Grammar.json_schema({**schema, **further})
        assert fits(grammar, '{"x": 1, "y": "z"}') and fits(grammar, '{"xx": "z"}')
        for text in ('{"\\u0078": "s"}', '{"x": 1, "x": "s"}', '{"y": "s", "x": "s"}'):
            assert not fits(grammar, text), text


LATE = {
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c.d é": {"enum": ["x"]}},
    "required": ["a"],
}


@pytest.mark.parametrize("lenient", [False, True])
def test_an_optional_key_that_comes_late_follows_its_schema(lenient):
    """A key that was begun as a listed one is never driven on to another (xgrammar #831)."""
    grammar = Grammar.json_schema(LATE, lenient)
    for text in (
        '{"a": 1, "c.d é": "x", "b": 2}',
        '{"a": 1, "other": [], "b": 2}',
        '{"a": 1, "b": 2, "c.d é": "x", "bb": "y", "cxd é": 1}',
    ):
        assert fits(grammar, text), text
    for text in (
        '{"a": 1, "c.d é": "x", "b": "2"}',
        '{"a": 1, "other": [], "c.d é": 1}',
        '{"b": 2, "a": 1}',
    ):
        assert not fits(grammar, text), text
    inner = Grammar.json_schema({"items": LATE, "type": "array"}, lenient)
    assert fits(inner, '[{"a": 1, "c.d é": "x", "b": 2}]')


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"required": ["a", "b"]}, '{"a": 1, "b": 2, "c.d é": "x"}'),
        ({"required": ["a", "z"]}, '{"a": 1, "z": 2, "c.d é": "x", "b": 2}'),
        ({"patternProperties": {"^x": {"type": "integer"}}}, '{"a": 1, "b": 2, "xy": 3}'),
        ({"properties": LATE["properties"] | {"no": False}}, '{"a": 1, "c.d é": "x", "b": 2}'),
        ({"properties": LATE["properties"] | {'"\\\n': {}}}, '{"a": 1, "b": 2, "c.d é": "x"}'),
        ({"properties": LATE["properties"] | {f"k{n}": {} for n in range(99)}}, '{"a": 1, "b": 2}'),
    ],
)
def test_keys_that_may_come_late_leave_the_others_as_they_are(changes, text):
    grammar = Grammar.json_schema(LATE | changes)
    assert fits(grammar, text)
    assert not fits(grammar, '{"a": 1, "no": 1, "b": "x"}')
    assert not fits(grammar, text.replace('"a": 1, ', ""))


@pytest.mark.parametrize("further", [{}, {"additionalProperties": False}])
def test_a_key_that_comes_twice_counts_once(further):
    """A reader of JSON keeps one of two: `{"x": 1, "x": 1}` has one property."""
    properties = {"x": {"type": "integer"}, "y": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["x"], **further}
    grammar = Grammar.json_schema({**schema, "minProperties": 2})
    assert fits(grammar, '{"x": 1, "y": 1}')
    for text in ('{"x":1,"x":1}', '{"x": 1, "x": 1}', '{"x": 1}'):
        assert not fits(grammar, text), text


@pytest.mark.parametrize("text", ['"a\\"b"', '"a\\u0022b"', '"a\\u005cb"'])
@pytest.mark.parametrize("pattern", ['^[^"\\\\]{1,60}$', '^[^<>"\\\\]+$'])
def test_what_a_class_leaves_out_has_no_escape_either(pattern, text):
    grammar = Grammar.json_schema({**TEXT, "pattern": pattern})
    assert not fits(grammar, text) and fits(grammar, '"ab"')


def test_deep_schemas():
    schema = {"type": "integer"}
    for _ in range(120):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    assert fits(Grammar.json_schema(schema), '{"a": ' * 120 + "1" + "}" * 120)


def test_what_says_the_same_stays_as_it_is():
    schema = {"type": "object", "properties": {"a": TEXT}, "additionalProperties": False}
    assert rewritten({**schema, "title": "t", "examples": [1]}).schema == schema


def test_what_can_be_said_of_a_schema_leaves_no_value():
    """It has values all the same: a request that is not strict gets one."""
    loose = Grammar.json_schema(
        {"type": "array", "allOf": [{"contains": {"const": 1}}, {"contains": {"const": 2}}]}, True
    )
    assert compiled(loose).unenforced == ("grammar.allOf[0].contains", "grammar.allOf[1].contains")
    assert fits(loose, "[1, 2]")


def test_a_source_that_no_rule_foresees_is_the_requests_fault():
    odd = {"$ref": "#/x/y", "x": {"y": {"type": "array", "minItems": "2", "uniqueItems": True,
                                        "items": {"enum": [1]}}}}  # fmt: skip
    for lenient in (False, True):
        with pytest.raises(RequestError, match="cannot be read"):
            compiled(Grammar.json_schema(odd, lenient))


def test_a_schema_without_a_value_is_refused_either_way():
    for lenient in (False, True):
        with pytest.raises(RequestError, match="no text satisfies it"):
            compiled(Grammar.json_schema({"not": {}}, lenient=lenient))


def test_a_tool_names_what_it_leaves_out():
    place = "tools[0].function.parameters"
    parameters = {"type": "object", "properties": {"a": {"not": {"minimum": 3}}}}
    tools = [Signature("f", Grammar.json_schema(parameters, True, place))]
    grammar = compiled(tool_rules(HERMES, tools, Calling(True, True)).grammar)
    assert grammar.unenforced == (f"{place}.properties.a.not",)
    assert Matcher(grammar).advance(ord("<"))


@pytest.mark.parametrize("named", ["what", ["string", "what"], 5, {"a": 1}])
def test_a_type_that_is_none_is_no_keyword_to_leave_out(named):
    with pytest.raises(ValueError, match=r"properties\.a\.type is"):
        rewritten({"properties": {"a": {"type": named}, "type": {"type": "string"}}})
