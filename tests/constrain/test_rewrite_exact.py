"""Integers of any size: exact as constants, in enumerations and as bounds, wherever they stand."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.constrain.calls import Calling, Signature, tool_rules
from forerun.constrain.grammar import Grammar
from forerun.constrain.integer_range import integers
from forerun.text.tools import HERMES
from tests.constrain.tools import compiled, fits

N = 175928847299117063
ROUNDED = (N - 7, N - 1, N + 1, N + 25)
BIG = 10**30
LIST = {"type": "array", "items": {"const": N}, "minItems": 1, "maxItems": 2}
TREE = {
    "$defs": {"t": {"type": "object", "properties": {"id": {"const": N},
                    "t": {"$ref": "#/$defs/t"}}, "required": ["id"],
                    "additionalProperties": False}},
    "$ref": "#/$defs/t",
}  # fmt: skip
WHERE = [
    ({"const": N}, [N], ROUNDED),
    ({"enum": [N, "a", 3, None]}, [N, "a", 3, None], [*ROUNDED, "b", 4]),
    ({"type": "integer", "minimum": N, "maximum": N + 1}, [N, N + 1], [N - 1, N + 2]),
    ({"type": "integer", "exclusiveMinimum": N, "exclusiveMaximum": N + 2}, [N + 1], [N, N + 2]),
    ({"type": "integer", "minimum": BIG}, [BIG, BIG + 1, 10**31], [BIG - 1, 2**63 - 1, 0, -BIG]),
    # A power of two is a float, and what lies beside it is none.
    ({"type": ["integer", "null"], "exclusiveMinimum": 2**63}, [2**63 + 1, None], [2**63, 0]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
     [-(2**63), 2**63 - 1, 0], [2**63, -(2**63) - 1]),
    ({"type": "integer", "maximum": -BIG}, [-BIG, -BIG - 1], [-BIG + 1, 0, BIG]),
    ({"minimum": BIG}, [BIG, "a", None, {}], [BIG - 1, 1.5]),
    ({"type": ["integer", "null"], "minimum": N}, [N, N + 1, None], [N - 1, "a"]),
    ({"type": "number", "minimum": BIG}, [BIG], [BIG - 1, 0.5]),
    ({"const": {"a": [N, "x"], "b": {}}}, [{"a": [N, "x"], "b": {}}],
     [{"a": [N + 1, "x"], "b": {}}, {"a": [N, "x"]}, {}]),
    (LIST, [[N], [N, N]], [[], [N] * 3, [N + 1]]),
    ({"type": "array", "prefixItems": [{"const": N}, {"type": "null"}]},
     [[], [N], [N, None], [N, None, "more"]], [[None], [N, 1]]),
    ({"type": "array", "prefixItems": [{"const": N}], "items": {"const": 1}, "minItems": 2},
     [[N, 1], [N, 1, 1]], [[N], [], [N, 2]]),
    ({"type": "object", "properties": {"id": {"const": N}, "n": {"type": "integer"}}},
     [{}, {"id": N}, {"n": 1}, {"id": N, "n": 1}, {"id": N, "z": [1]}, {"z": 1, "y": 2}],
     [{"id": N + 1}, {"n": "a"}, {"z": 1, "id": N + 1}]),
    ({"type": "object", "properties": {"a": {}, "id": {"const": N}}, "required": ["id"],
      "additionalProperties": False},
     [{"id": N}, {"a": "x", "id": N}], [{}, {"a": 1}, {"id": N, "b": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer", "minimum": N}},
     [{}, {"a": N}, {"a": N, "b": N + 1}], [{"a": N - 1}]),
    ({"anyOf": [{"const": N}, {"type": "string", "maxLength": 1}]}, [N, "a"], [N + 1, "ab"]),
    (TREE, [{"id": N}, {"id": N, "t": {"id": N}}], [{"id": N + 1}, {"id": N, "t": {}}]),
]  # fmt: skip


@pytest.mark.parametrize("lines", ["one", "many", "dense"])
@pytest.mark.parametrize(("schema", "valid", "invalid"), WHERE, ids=lambda v: str(v)[:50])
def test_integers_are_exact_wherever_they_stand(schema, valid, invalid, lines):
    grammar = Grammar.json_schema(schema)
    grammar = grammar.on_one_line() if lines == "one" else grammar
    layout = {"many": {"indent": 2}, "one": {}, "dense": {"separators": (",", ":")}}[lines]
    assert not compiled(grammar).unenforced
    for values, wanted in ((valid, True), (invalid, False)):
        for value in values:
            assert fits(grammar, json.dumps(value, **layout)) is wanted, value


def test_a_key_has_one_spelling_and_no_key_comes_twice_that_is_listed():
    grammar = Grammar.json_schema({"type": "object", "properties": {"id": {"const": N}}})
    for text in (f'{{"id": {N}, "id": 1}}', '{"\\u0069d": 1}', '{"id": 1}', "{ ,}", "{}{}"):
        assert not fits(grammar, text), text
    assert fits(grammar, '{ "idx": 1 }') and fits(grammar, "{}")


def test_a_tools_arguments_are_exact_too():
    schema = {"type": "object", "properties": {"id": {"const": N}}, "required": ["id"]}
    tools = [Signature("f", Grammar.json_schema(schema, False, "tools[0].function.parameters"))]
    grammar = tool_rules(HERMES, tools, Calling(True, False)).grammar
    call = '<tool_call>\n{"name": "f", "arguments": {"id": %d}}\n</tool_call>'
    assert fits(grammar, call % N)
    assert not any(fits(grammar, call % value) for value in ROUNDED)


BOUNDS = st.none() | st.integers(-(10**40), 10**40) | st.integers(-120, 120)


@settings(max_examples=400, deadline=None)
@given(BOUNDS, BOUNDS, st.integers(-(10**41), 10**41) | st.integers(-130, 130))
def test_patterns_of_ranges(low, high, value):
    pattern = integers(low, high)
    near = {value} | {
        bound + off for bound in (low, high, 0) if bound is not None for off in (-1, 0, 1)
    }
    for one in near:
        inside = (low is None or one >= low) and (high is None or one <= high)
        assert bool(pattern and re.fullmatch(pattern, str(one))) == inside
    assert not any(pattern and re.fullmatch(pattern, text) for text in ("-0", "01", "", "-", "+1"))
