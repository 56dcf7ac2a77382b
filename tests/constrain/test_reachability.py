r"""What is valid can be written: a model that knows a text by heart, and the text fits, writes it.

That only valid texts come is tested elsewhere. A mask that is too narrow shows in no answer that is
merely valid: `It\u2019s` became `It\u001b`. `make reachability` tries more, under all vocabularies.

What a grammar leaves out on purpose, or a library cannot say, is listed in OUT_OF_REACH.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.build import target as target_module
from forerun.client.llm import LLM
from forerun.constrain.grammar import Grammar
from forerun.constrain.grammar.calls import Calling, Signature, tool_rules
from forerun.constrain.grammar.tags import Tag, tag_rules
from forerun.constrain.matcher.matcher import Matcher
from forerun.engine.request import Speculation
from forerun.text.tools import FORMATS
from tests.constrain.test_keywords import EXAMPLES
from tests.constrain.test_rewrite import TAKEN
from tests.constrain.test_vocabularies import compiler, ways
from tests.constrain.tools import BYTES, allowed, compiled
from tests.covering import spread
from tests.e2e.scripted import Scripted
from tests.text.vocabularies import SMALL, vocabulary

TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
ODD = 'It\u2019s \u201ccaf\u00e9\u201d \U0001f600 \u65e5\u672c\n\t"q" \\ / \u2028 \x1b end'

ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "note": {"type": "string", "maxLength": 80},
        "due": {"type": "string", "format": "date"},
        "lines": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "name": TEXT,
                    "price": {"type": "number", "minimum": 0},
                    "count": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["name", "price"],
                "additionalProperties": False,
            },
        },
        "paid": {"type": ["boolean", "null"]},
    },
    "required": ["id", "lines"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "text": TEXT,
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["text"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
EVENT = {
    "type": "object",
    "properties": {
        "action": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": "say"}, "text": TEXT},
                    "required": ["kind", "text"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"kind": {"const": "wait"}, "seconds": {"type": "number"}},
                    "required": ["kind", "seconds"],
                    "additionalProperties": False,
                },
            ]
        },
        "more": {"type": "object", "additionalProperties": TEXT},
    },
    "required": ["action"],
    "additionalProperties": False,
}
LINE = {"name": ODD, "price": 12.5, "count": 3}
REAL = [
    (ORDER, {"id": "AB-1234", "note": ODD, "due": "2024-02-29", "lines": [LINE], "paid": None}),
    (ORDER, {"id": "AB-1234", "lines": [{"name": "", "price": 0}, LINE], "paid": True}),
    (TREE, {"text": ODD, "below": [{"text": "a"}, {"text": "b", "below": [{"text": ODD}]}]}),
    (EVENT, {"action": {"kind": "say", "text": ODD}, "more": {ODD: ODD, "a": "b"}}),
    (EVENT, {"action": {"kind": "wait", "seconds": -1.5e-7}, "more": {}}),
    ({"type": "object"}, {"a": {"b": [ODD, 1, -2.5, 1e300, True, None, {}, []]}, ODD: ODD}),
    ({"type": "object", "required": ["a"]}, {"a": ODD}),
    ({**TEXT, "minLength": 3, "maxLength": 60}, ODD),
    ({**TEXT, "pattern": r"^[\s\S]{3,60}$"}, ODD),
    ({**TEXT, "pattern": ".*"}, ODD),
    ({**TEXT, "pattern": "^https?://"}, "https://a.b/c?d=\u00e9&\U0001f600"),
    ({**TEXT, "pattern": "^.+$"}, 'a \u00e9 \U0001f600 " \\ /'),
    ({"enum": [ODD, "a/b", {"a": [ODD]}]}, ODD),
    ({"const": {"a": [ODD, 1.5, None]}}, {"a": [ODD, 1.5, None]}),
]
EXACT = (
    "pattern",
    "format",
    "enum",
    "const",
    "contentEncoding",
    "not",
    "contains",
    "propertyNames",
)
"""Keywords under which each character of a string has one spelling; those that JSON must escape."""


def written(value, escape, item=", ", key=": ", within=None):
    """A value as JSON, each string as `escape` writes it."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        pairs = [
            f"{(within or escape)(name)}{key}{written(inner, escape, item, key, within)}"
            for name, inner in value.items()
        ]
        return "{" + item.join(pairs) + "}"
    if isinstance(value, list):
        return "[" + item.join(written(one, escape, item, key, within) for one in value) + "]"
    return json.dumps(value)


def short(text):
    """Escaped where it must be, and in letters where there are any."""
    return json.dumps(text, ensure_ascii=False)


def every(text):
    """Each character as `\\uXXXX`, surrogate pairs among them; the digits in capitals."""
    data = text.encode("utf-16-be")
    units = (int.from_bytes(data[at : at + 2]) for at in range(0, len(data), 2))
    return '"' + "".join(f"\\u{unit:04X}" for unit in units) + '"'


def slashed(text):
    """As PHP writes it, that no text ends a script."""
    return short(text).replace("/", "\\/")


def spellings(value, free):
    """Texts of a value.

    free  strings have any escapes
    """
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(value, ensure_ascii=False, indent=2)
    yield json.dumps(value, ensure_ascii=False, indent="\t").replace("\n", "\r\n")
    if free:
        yield json.dumps(value)
        yield json.dumps(value, indent=4)
        yield written(value, every, within=short)
        yield written(value, slashed)


def is_free(schema):
    """Whether no keyword of a schema fixes how characters are spelled."""
    if isinstance(schema, dict):
        return not any(name in EXACT for name in schema) and all(map(is_free, schema.values()))
    return all(map(is_free, schema)) if isinstance(schema, list) else True


def writes(grammar, text, name="bytes", cut="longest"):
    """Whether a model that knows a text by heart writes it: what it wrote instead, or None."""
    known = name in SMALL
    tokenizer = vocabulary(name) if known else BYTES
    matcher = Matcher(compiler(name).compile(grammar) if known else compiled(grammar))
    rest = text.encode()
    while rest:
        mask = matcher.mask()
        wanted = ways(name, rest, cut) if known else [rest[0]]
        able = next((id for id in wanted if mask is None or allowed(mask, id)), None)
        if able is None:
            return f"{text.encode()[: -len(rest)].decode('utf-8', 'replace')!r}, not {rest[:9]!r}"
        assert matcher.commit(able)
        rest = rest[len(tokenizer.token_bytes(able)) :]
    done = matcher.complete or allowed(matcher.mask(), tokenizer.eos_ids[0])
    return None if done else "it does not end"


CASES = [
    *REAL,
    *((schema, value) for schema, valid, _ in (*EXAMPLES.values(), *TAKEN) for value in valid),
]


@pytest.mark.parametrize("case", spread(range(len(CASES)), 64))
def test_every_valid_value_is_written_in_every_spelling(case):
    schema, value = CASES[case]
    free = is_free(schema)
    grammar = Grammar.json_schema(schema, lenient=True)
    for text in spellings(value, free):
        assert writes(grammar, text) is None, text
    one_line = grammar.on_one_line()
    for text in (json.dumps(value, ensure_ascii=False), *([json.dumps(value)] if free else [])):
        assert writes(one_line, text) is None, text


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_valid_value_is_written_under_every_vocabulary(case, name):
    schema, value = CASES[case]
    grammar = Grammar.json_schema(schema, lenient=True)
    for text in spellings(value, is_free(schema)):
        for cut in ("its own", "longest", "shortest"):
            assert writes(grammar, text, name, cut) is None, (text, cut)


def values(depth=3):
    scalars = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | strings()
    scalars |= st.floats(allow_nan=False, allow_infinity=False)
    if not depth:
        return scalars
    inner = values(depth - 1)
    return scalars | st.lists(inner, max_size=3) | st.dictionaries(strings(), inner, max_size=3)


def strings():
    return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=6)


def check_any(value):
    grammar = Grammar.json_object()
    for text in spellings(value, free=True):
        assert writes(grammar, text) is None, text


@settings(max_examples=60)
@given(st.dictionaries(strings(), values(), max_size=3))
def test_any_object_is_written(value):
    check_any(value)


@pytest.mark.slow
@settings(max_examples=3000)
@given(st.dictionaries(strings(), values(), max_size=4))
def test_any_of_many_objects_is_written(value):
    check_any(value)


@pytest.mark.parametrize("name", ["bytes", "byte-level", "prepend"])
@pytest.mark.parametrize(
    "text",
    ['"\\/"', '"\\\\/"', '"\\\\\\/"', '"<\\/a>\\/\\/"', '"\\n\\/\\u002f\\/n"', '["a\\/", "b"]'],
)
def test_a_slash_may_be_escaped(name, text):
    json.loads(text)
    for grammar in (Grammar.json_schema({}), Grammar.json_schema({}).on_one_line()):
        assert writes(grammar, text, name, "shortest") is None


@pytest.mark.parametrize(
    "text", ["\\/", '"a"\\/', '"\\\\/', '["\\/"\\/]', '{"a"\\/: 1}', '"\\//\\"']
)
def test_a_slash_is_escaped_in_strings_alone(text):
    grammar = Grammar.json_schema({"type": ["string", "array", "object"]})
    assert writes(grammar, text) is not None


def test_an_escaped_slash_is_that_slash_for_a_schema():
    for schema, wrong in (
        ({**TEXT, "maxLength": 2}, '"\\/\\/\\/"'),
        ({"type": "object", "properties": {"a/b": INTEGER}}, '{"a\\/b": "x"}'),
        ({**TEXT, "pattern": "^[a-z]+$"}, '"a\\/"'),
    ):
        assert writes(Grammar.json_schema(schema), wrong) is not None
    assert writes(Grammar.json_schema({**TEXT, "maxLength": 2}), '"\\/\\/"') is None
    # In another grammar a backslash is a backslash.
    for grammar in (Grammar.regex(r"\\n|/x"), Grammar.choice(["\\n", "/x"])):
        assert writes(grammar, "/x") is None and writes(grammar, "\\/x") is not None


def test_a_place_behind_a_backslash_is_left_and_come_back_to():
    matcher = Matcher(compiled(Grammar.json_schema({})))
    assert all(map(matcher.commit, b'"a'))
    before = matcher.mask()
    for _ in range(2):
        assert matcher.advance(ord("\\")) and not matcher.forced()
        behind = matcher.mask()
        assert allowed(behind, ord("/")) and allowed(behind, ord("n"))
        assert matcher.advance(ord("/")) and allowed(matcher.mask(), ord("/"))
        matcher.back(1)
        assert matcher.mask() == behind
        assert matcher.advance(ord("n"))
        matcher.back(2)
        assert matcher.mask() == before


NUMBERS = [
    "0",
    "-0",
    "7",
    "-12",
    "1.5",
    "-0.25",
    "1e5",
    "1E5",
    "1e+5",
    "2.5e-3",
    "1.0",
    "10000000000",
]


@pytest.mark.parametrize("text", NUMBERS)
def test_every_spelling_of_a_number_is_written(text):
    for schema in ({"type": "number"}, {"type": ["string", "number"]}, {}):
        assert writes(Grammar.json_schema(schema), text) is None


OUT_OF_REACH = [
    (
        {"properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False},
        '{"b": 1, "a": 1}',
    ),
    ({"type": "object", "properties": {"a": INTEGER}}, '{"\\u0061": 1}'),
    ({"type": "object", "properties": {"a": INTEGER}}, '{"\\u2019": 1}'),
    (TEXT, '"\x7f"'),
    ({**TEXT, "pattern": "^.$"}, '"\\u2019"'),
    ({**TEXT, "pattern": "^.$"}, '"\\t"'),
    ({"enum": ["\u2019"]}, '"\\u2019"'),
    ({"type": "array"}, "[   1]"),
    ({"type": "array"}, " [1]"),
]
"""Keys in another order than that of a schema without further ones; escapes in keys beside listed
ones, in constants and under patterns; what llguidance's strings do not have
(docs/inside/llguidance-strings.md); control characters for `.`; more white space than is good for
anybody. Each of these values has another spelling that can be written, but for the control
character."""


@pytest.mark.parametrize(("schema", "text"), OUT_OF_REACH)
def test_what_is_out_of_reach_is_known(schema, text):
    """Where one of these is written after all, take it off the list."""
    value = json.loads(text)
    grammar = Grammar.json_schema(schema)
    assert writes(grammar, text) is not None
    ordered = value
    if isinstance(value, dict):
        ordered = dict(sorted(value.items()))
    others = [json.dumps(ordered, ensure_ascii=False), json.dumps(ordered), '"\\u007f"']
    within_reach = any(
        json.loads(other) == value and not writes(grammar, other) for other in others
    )
    assert within_reach == (value != "\t")


CLOSED = {"type": "object", "additionalProperties": False}
STARTS = [
    ({**TEXT, "pattern": "^.{1,20}$"}, '"It'),
    ({**TEXT, "pattern": '^[^"]+$'}, '"It'),
    ({**TEXT, "pattern": "^It.*s$"}, '"It'),
    ({"enum": ["It\u2019s"]}, '"It'),
    ({"type": "object", "properties": {"a": TEXT}}, '{"It'),
    ({**CLOSED, "patternProperties": {"^[a-zA-Z.]+$": TEXT}}, '{"It'),
]


@pytest.mark.parametrize(("schema", "start"), STARTS)
def test_an_escape_that_has_one_end_alone_is_not_begun(schema, start):
    """Or a model that begins `\\u2019` is led to a control character."""
    matcher = Matcher(compiled(Grammar.json_schema(schema)))
    assert all(map(matcher.commit, start.encode()))
    if allowed(matcher.mask(), ord("\\")):
        assert matcher.commit(ord("\\"))
        assert not allowed(matcher.mask(), ord("u"))


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "mistral-args"])
def test_arguments_of_calls_have_any_escape_of_unicode(name):
    note = Signature("note", Grammar.json_schema({**CLOSED, "properties": {"text": TEXT}}))
    grammar = tool_rules(FORMATS[name], [note], Calling(True, False), None).grammar
    for dumps in (json.dumps, short, slashed):
        arguments = '{"text": ' + dumps(ODD) + "}"
        call = '{"name": "note", "arguments": ' + arguments + "}"
        text = {
            "hermes": f"<tool_call>\n{call}\n</tool_call>",
            "llama3": call.replace("arguments", "parameters"),
            "mistral": f"[TOOL_CALLS] [{call}]",
            "mistral-args": f"[TOOL_CALLS]note[ARGS]{arguments}",
        }[name]
        assert writes(grammar, text) is None


@pytest.mark.parametrize("name", ["bytes", "byte-level", "prepend"])
def test_a_slash_is_escaped_in_arguments_alone(name):
    note = Signature("note", Grammar.json_schema({**CLOSED, "properties": {"text": TEXT}}))
    grammar = tool_rules(FORMATS["hermes"], [note], Calling(False, False), None).grammar
    tags = tag_rules([Tag("<f>", Grammar.json_schema(TEXT), "</f>")], ["<f>"], "tags").grammar
    call = '<tool_call>\n{"name": "note", "arguments": {"text": "%s"}}\n%s'
    for text in ("a\\/b", "\\/", "\\\\/", "<\\/a>\\/\\/", "\\/n\\n"):
        assert writes(grammar, "\\/ " + call % (text, "</tool_call>"), name, "shortest") is None
        assert writes(tags, f'\\/ <f>"{text}"</f> \\/', name, "shortest") is None
    assert writes(grammar, call % ("a", "<\\/tool_call>"), name, "longest") is not None
    assert writes(tags, '<f>"a"<\\/f>', name, "longest") is not None
    backslashed = [
        Tag("<f\\n", Grammar.json_schema(TEXT), ";"),
        Tag("<f/x", Grammar.json_schema(TEXT), ";"),
    ]
    assert writes(tag_rules(backslashed, ["<f"], "tags").grammar, '<f\\/x"a";', name) is not None


class FixedText(Scripted):
    """Knows one text."""


@pytest.fixture(scope="module")
def by_heart():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_module, "ToyExecutor", FixedText)
        llm = LLM("toy", kv_tokens=4096, context=4096)
    with llm:
        yield llm


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("case", range(len(REAL)))
def test_a_model_that_knows_an_answer_by_heart_gives_it(case, speculates, by_heart):
    """Through the server's own parts: prompts, drafts, verification, sampling, streams."""
    schema, value = REAL[case]
    text = json.dumps(value, ensure_ascii=is_free(schema))
    FixedText.script = (text,)
    answer = by_heart.chat(
        [{"role": "user", "content": "Say it."}],
        max_tokens=1500,
        grammar=Grammar.json_schema(schema),
        speculation=Speculation(speculates),
    )
    assert answer.text == text
