"""xgrammar behind the contract: what it would ignore is refused, what it takes it takes rightly."""

import json
import sys
from random import Random

import pytest

from forerun.build.engine import load
from forerun.config import EngineConfig
from forerun.constrain.backends import backend
from forerun.constrain.grammar import Grammar
from forerun.constrain.matcher import Matcher
from forerun.constrain.xgrammar_rules import plain_dots
from forerun.errors import ConfigError, RequestError
from tests.constrain import tools
from tests.constrain.tools import BPE, BYTES, PERSON, compiled, fits, members

pytest.importorskip("xgrammar")

TEXT, LIST = {"type": "string"}, {"type": "array"}
FIELD = "response_format.json_schema.schema"


@pytest.fixture(autouse=True)
def xgrammar(monkeypatch):
    monkeypatch.setattr(tools.chosen, "library", "xgrammar")


def schema(value, lenient=False) -> Grammar:
    return Grammar.json_schema(value, lenient, field=FIELD)


@pytest.mark.parametrize(
    ("grammar", "tokens"),
    [
        (schema({"properties": {"a": {"not": {"minimum": 3}}}}), "properties.a.not cannot"),
        (
            schema({"maxLength": 3, "minimum": 1}),
            "maxLength cannot be honoured by xgrammar: a type",
        ),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems cannot"),
        (schema({"type": "array", "contains": {}, "prefixItems": [{}]}), "contains cannot"),
        (schema({"type": "number", "multipleOf": 0.5}), "multipleOf cannot"),
        (schema({**TEXT, "pattern": "a", "maxLength": 3}), "maxLength cannot be honoured"),
        (schema({**TEXT, "format": "uri", "pattern": "a"}), "format cannot be honoured"),
        (schema({**TEXT, "format": "martian"}), "unknown format 'martian'"),
        (schema({"type": "object", "properties": {'a"': {}}}), "names that JSON must escape"),
        (schema({"type": "object", "patternProperties": {"a": {}}}), "patternProperties cannot"),
        (schema({"type": "object", "propertyNames": {"format": "uri"}}), "propertyNames cannot"),
        (schema({"allOf": [{**TEXT, "pattern": "a"}, {"pattern": "b"}]}), "allOf cannot"),
        (schema({"oneOf": [TEXT, {"minLength": 3}]}), "oneOf cannot"),
        (schema({"$ref": "https://example.org/a"}), "$ref cannot"),
        (schema({"type": "boolean", "const": 1}), "no text satisfies it"),
        (schema({"type": "foo"}), "type is 'foo'"),
        (schema({**TEXT, "minLength": 3, "maxLength": 2}), "minLength 3 is greater"),
        (schema({"const": "a" * 70_000}), "at most 65536"),
        (Grammar.regex("(?=a)b"), "Lookahead is not supported"),
        (Grammar.regex(r"a\b"), "Word boundary is not supported"),
        (Grammar.regex("a^b"), "should be at the start of the regex"),
        (Grammar.regex(r"\Aa"), "is not recognized"),
        (Grammar.grammar('root ::= "a" b'), 'Rule "b" is not defined'),
        (Grammar.grammar('start: "a"'), "--grammar-backend xgrammar does not read"),
    ],
    ids=lambda value: value.source[:40] if isinstance(value, Grammar) else "",
)
def test_what_it_does_not_honour_is_refused_by_name(grammar, tokens):
    with pytest.raises(RequestError) as error:
        compiled(grammar)
    assert tokens in str(error.value) and str(error.value).startswith(grammar.field)
    assert error.value.field == grammar.field and ".cc" not in str(error.value)


def test_what_is_not_strict_ignores_keywords():
    loose = schema(
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, lenient=True
    )
    assert fits(loose, "[1, 1]") and not fits(loose, "[null]")


TAKEN = [
    (
        {"allOf": [{"prefixItems": [{"type": "integer", "minimum": 3}]}], "items": {"minimum": 5}},
        [[5, 5], [5], []],
        [[3, 5], [5, 4]],
    ),
    (
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": TEXT},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1, "c": ""}],
        [{}, {"a": 1, "b": 1}, {"c": ""}, {"a": 1, "d": 1}],
    ),
    ({"type": ["array", "null"], "items": False, "minItems": 1}, [None], [[], [1], {}]),
    ({"type": "array", "prefixItems": [TEXT], "items": False}, [["a"]], [["a", 1], [1], 1]),
    (
        {
            "$defs": {"no": {"allOf": [TEXT, {"type": "null"}]}},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/no"}, "b": TEXT},
        },
        [{}, {"b": ""}],
        [{"a": None}, {"a": ""}, {"b": 1}],
    ),
    (
        {
            "$defs": {"t": {"properties": {"n": {"$ref": "#/$defs/t"}}, "minProperties": 0}},
            "allOf": [{"$ref": "#/$defs/t"}, {"required": ["n"], "type": "object"}],
        },
        [{"n": {}}, {"n": {"n": {}}}],
        [{}, {"n": 1}],
    ),
    ({"$id": "http://x/y", "id": 1, "title": "t", "maxLength": 1}, ["", "a"], ["ab"]),
    ({"oneOf": [TEXT, {"type": "null"}]}, ["a", None], [1]),
    ({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": 1, "b": 2}], [{}, {"b": 1}]),
    ({**TEXT, "enum": ["a", 1]}, ["a"], [1]),
    ({**TEXT, "format": "date"}, ["2024-02-29"], ["2023-02-31", "2023-04-31", "2023-02-29"]),
    ({**TEXT, "format": "date-time"}, ["2004-09-22T01:56:59Z"], ["2004-09-22T01:56:60Z"]),
    ({"const": 175928847299117063}, [175928847299117063], [175928847299117056]),
    (
        {
            "allOf": [
                {"properties": {"a": {"type": "integer"}}, "type": "object"},
                {"properties": {"a": {"minimum": 3}, "b": TEXT}, "required": ["a"]},
            ]
        },
        [{"a": 3}, {"a": 3, "b": ""}],
        [{}, {"a": 2}, {"a": 3, "b": 1}],
    ),
    (
        {
            "type": "object",
            "properties": {"k": {"enum": ["x", "y"]}},
            "required": ["k"],
            "additionalProperties": False,
            "anyOf": [{"properties": {"k": {"const": "x"}}}],
        },
        [{"k": "x"}],
        [{"k": "y"}],
    ),
    ({**TEXT, "maxLength": 3}, ["", "abc", "é"], ["abcd", 1, None]),
    ({**TEXT, "pattern": "^a.c$"}, ["abc"], ["ac", "a\nc", "abcd"]),
    ({**TEXT, "format": "ipv4"}, ["1.2.3.4"], ["1.2.3.400", "x"]),
    ({"type": "integer", "minimum": 3, "maximum": 12}, [3, 12], [2, 13, 3.5, "3"]),
    ({"type": "integer", "multipleOf": 4}, [0, 8], [6]),
    ({"type": "number", "exclusiveMaximum": 1.5, "minimum": 0}, [0, 1.25], [1.5, -1]),
    ({"type": ["string", "null"], "maxLength": 1}, [None, "a"], ["ab", 1]),
    ({"enum": [1, "a", None]}, [1, "a", None], [2, "b"]),
    ({"anyOf": [{"type": "integer"}, {**TEXT, "maxLength": 1}]}, [5, "a"], ["ab", 1.5]),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, [[], [None]], [[None] * 3, [1]]),
    (
        {"type": "array", "prefixItems": [{}, TEXT], "items": False},
        [[1, "a"]],
        [[1, 2], [1, "", 3]],
    ),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, [None], [1]),
    (
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False},
        [{}, {"n": {"n": {}}}],
        [{"n": 1}, {"m": {}}],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        [{"a": 1}, {"a": 1, "b": []}],
        [{}, {"a": "x"}, {"b": 1}],
    ),
    (PERSON, [{"first_name": "Ann", "age": 3, "kind": "human"}], [{"first_name": "Ann"}]),
    (True, [1, {"a": [{}]}, "x"], []),
]


@pytest.mark.parametrize("lines", ["one", "many"])
@pytest.mark.parametrize(("source", "valid", "invalid"), TAKEN, ids=lambda value: str(value)[:30])
def test_what_it_takes_it_takes_rightly(source, valid, invalid, lines):
    grammar = schema(source)
    grammar = grammar.on_one_line() if lines == "one" else grammar
    indent = None if lines == "one" else 2
    for values, wanted in ((valid, True), (invalid, False)):
        for value in values:
            text = json.dumps(value, ensure_ascii=False, indent=indent)
            assert fits(grammar, text) is wanted, text


@pytest.mark.parametrize("source", [TEXT, {**TEXT, "maxLength": 9}, {**TEXT, "minLength": 1}])
def test_no_string_has_raw_control_characters(source):
    """Left to itself, xgrammar lets them into strings of limited length."""
    for character in (*map(chr, range(32)), '"', "\\"):
        assert not fits(schema(source), f'"a{character}"'), repr(character)


PATTERNS = [
    "a.b",
    "[^ab]+",
    "(?:ab|c)*",
    "a{2,3}b?",
    r"\d+\.\d*",
    r"[&~a\-c]+",
    "^(a|b)$",
    "é+.",
    ".",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_it_means_to_llguidance(pattern):
    random, grammar = Random(pattern), Grammar.regex(pattern)
    texts = ["".join(random.choices("abc1.&é\n", k=random.randrange(5))) for _ in range(900)]
    found = [fits(grammar, text) for text in texts]
    tools.chosen.library = "llguidance"
    assert found == [fits(grammar, text) for text in texts]
    assert any(found) and not all(found)


def test_what_is_certain_may_end_inside_a_character():
    """xgrammar cannot tell half a character as text; that is no fault of the matcher's."""
    grammar = Grammar.regex("[é-ë]{2}")
    assert fits(grammar, "éë") and not fits(grammar, "éz")
    matcher = Matcher(compiled(grammar))
    assert matcher.forced() in ([], list("é".encode()[:1])) and not matcher.error


def test_dots_become_what_they_are_elsewhere():
    assert plain_dots(r"a.\.[.\]]") == r"a[^\n]\.[.\]]"


@pytest.mark.parametrize(("name", "tokenizer"), [("bytes", BYTES), ("bpe", BPE)])
def test_masks_takes_and_forced_tokens_agree(name, tokenizer):
    grammars = (schema(PERSON), schema(PERSON).on_one_line(), Grammar.regex("x(Paris|Amsterdam)+y"))
    for seed in range(12):
        random, matcher = Random(seed), Matcher(compiled(grammars[seed % 3], name))
        for _ in range(60):
            for token in matcher.forced():
                assert members(matcher.mask()) == [token]
                assert matcher.advance(token)
            if matcher.complete:
                break
            legal = members(matcher.mask())
            assert legal and not {*legal} & (tokenizer.special_ids - {*tokenizer.eos_ids})
            for token in random.sample(legal, min(len(legal), 20)):
                assert matcher.advance(token), "a mask allows what is not taken"
                matcher.back(1)
            token = random.choice(legal)
            assert matcher.advance(token)
            if token in tokenizer.eos_ids:
                assert matcher.complete
                break


def test_the_flag_says_what_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "forerun.constrain.xgrammar_backend", raising=False)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ConfigError, match=r"pip install 'forerun\[xgrammar\]'"):
        backend("xgrammar", BYTES)


def test_an_engine_with_it():
    loaded = load(EngineConfig(model="toy", grammar_backend="xgrammar"))
    try:
        matcher = Matcher(loaded.target.compile(Grammar.choice(["yes", "no"])))
        assert type(matcher._automaton).__name__ == "XgrammarAutomaton"
        assert {*members(matcher.mask())} == {ord("y"), ord("n")}
    finally:
        loaded.close()


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        ("^(ab*)?$", ["", "a", "abb"], ["b", "bb"]),
        ("^(b*a)?$", ["", "a", "ba"], ["b"]),
        ("^a(c(d|e)*)?b$", ["ab", "acb", "acdeb"], ["adb"]),
        ("^x(?:c[0-9]{1,2}?)??$", ["x", "xc1", "xc12"], ["x1", "xc", "xc123"]),
        ("^(b|[^a]|b{1,2})$", ["b", "c", "bb"], ["cb", "bbb"]),
        ("^(c|(b|[^a]|(b){1,2}))$", ["b", "c", "bb"], ["cb", "bbb"]),
    ],
)
def test_what_repeats_in_a_group_stays_there(pattern, valid, invalid):
    """Its automata for strings let it repeat where the group is left out: see settled."""
    grammar = schema({**TEXT, "pattern": pattern})
    for texts, wanted in ((valid, True), (invalid, False)):
        for text in texts:
            assert fits(grammar, f'"{text}"') is wanted, text


BARE = ['^"$', '^["]$', r"^a\\b$", r"^\x22$", r"^\u005c$", r"^(a|\n)$", r"[\t]"]


@pytest.mark.parametrize("pattern", BARE)
def test_a_character_that_json_escapes_is_no_text_of_its_own(pattern):
    """It would stand in the string as it is, which then is no JSON."""
    with pytest.raises(RequestError, match="pattern cannot be honoured by xgrammar"):
        compiled(schema({**TEXT, "pattern": pattern}))
    assert compiled(schema({**TEXT, "pattern": pattern}, lenient=True)).unenforced


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("time", ["01:02:03Z", "01:02:03.5+01:00"], ["01:02:035Z", "01:02:60Z"]),
        ("ipv4", ["1.2.3.4"], ["01.2.3.4", "1.2.3.256"]),
        ("uri-reference", ["a/b?c:d"], ["1:b", "(:a"]),
    ],
)
def test_formats_are_those_of_json_schema(name, valid, invalid):
    grammar = schema({**TEXT, "format": name})
    for texts, wanted in ((valid, True), (invalid, False)):
        for text in texts:
            assert fits(grammar, f'"{text}"') is wanted, text
