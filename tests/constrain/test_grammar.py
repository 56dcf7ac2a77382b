"""What grammars accept, and what is said about those that cannot be used."""

import json
import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.constrain.grammar.grammar import MAX_SOURCE, Grammar, portable
from forerun.constrain.isolation.compile import Compiler
from forerun.constrain.matcher.matcher import Matcher
from forerun.constrain.schema.paths import locate, schemas
from forerun.errors import RequestError
from forerun.text.pieces import Pieces
from forerun.text.tokenizer import TextEnds, Tokenizer
from tests.constrain.tools import PERSON, allowed, compiled, fits

LIST_OF_LISTS = {
    "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
    "$ref": "#/$defs/t",
}
SAM = '{"first_name": "Sam", "age": 50, "kind": "hobbit"}'
NUMBERS = {"type": "array", "items": {"type": "integer"}}
TREE = 'start: "x" item*\nitem: /[0-9]/ | "(" item ")"'

VECTORS = [
    (Grammar.regex("(Paris|Amsterdam)"), ["Paris", "Amsterdam"], ["", "Pari", "Paris ", "paris"]),
    (Grammar.regex(r"[\w\W]"), ["\u00e9", "a", "/", "\U0001f600"], [""]),
    (Grammar.regex(r"[^\W\d_]"), ["a", "Z"], ["\u00e9", "1", "_"]),
    (Grammar.regex(r"[^\D]"), ["1"], ["\u0663", "a"]),
    (Grammar.regex(r"[\w-z]"), ["-", "z"], ["`"]),
    (Grammar.regex(r"[.-\w]"), ["-", ".", "a"], ["/"]),
    (Grammar.json_schema({"type": "string", "pattern": r"^[\w-.]+$"}), ['"a-b.c"'], ['"/"']),
    (Grammar.grammar('root ::= "a"{0} "b"'), ["b"], ["ab"]),
    (Grammar.grammar('start: "a ::= b"'), ["a ::= b"], ["a"]),
    (Grammar.regex(r"\d{2}/[a-c]+\n?"), ["12/abc", "34/a\n"], ["1/a", "12/", "12/d"]),
    (Grammar.regex("é+|日本"), ["é", "éé", "日本"], ["e", "日"]),
    (Grammar.regex(r"[^]x]|[[\]&&]"), ["a", "[", "&", "]"], ["x", "aa"]),
    (Grammar.choice(["a.b", "(c", "d e", "/", "a"]), ["a.b", "(c", "d e", "/", "a"], ["axb"]),
    (Grammar.choice(["é\n", '"', "\\", "{2}", "#~&-"]), ["é\n", '"', "\\", "#~&-"], ["22"]),
    (Grammar.json_object(), ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": 1\n}'], ["[]", "1", "{"]),
    (
        Grammar.json_schema(PERSON),
        [SAM, SAM.replace(" ", ""), SAM.replace(" ", "\n        ")],
        [
            SAM.replace("50", "151"),
            '{"age": 1}',
            SAM[:-1],
            SAM + SAM,
            SAM.replace("Sam", "Samwise"),
        ],
    ),
    (
        Grammar.json_schema(PERSON).on_one_line(),
        [SAM],
        [SAM.replace(" ", ""), SAM.replace(" ", "  ")],
    ),
    (Grammar.json_schema(True), ["1", "null", '"x"', "[]", "{}"], ["x", ""]),
    (Grammar.json_schema(LIST_OF_LISTS), ["[]", "[[], [[]]]"], ["[1]", "[[]"]),
    (Grammar.json_schema(NUMBERS), ["[1, 2]", "[1,\n  2]"], ["[1,   2]", "[1,\n\n2]"]),
    (Grammar.grammar('root ::= "a" root "b" | "c"'), ["c", "acb", "aacbb"], ["ac", "ab", "acbb"]),
    (Grammar.grammar(TREE), ["x", "x1(2)", "x((3))"], ["x(", "1"]),
]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize(("grammar", "good", "bad"), VECTORS)
def test_what_is_accepted(grammar, good, bad, kind):
    for text in good:
        assert fits(grammar, text, kind), text
    for text in bad:
        assert not fits(grammar, text, kind), text


@settings(max_examples=60)
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4), st.text(max_size=6))
def test_choices_are_taken_literally(choices, other):
    grammar = Grammar.choice(choices)
    assert all(fits(grammar, text) for text in choices)
    assert fits(grammar, other) == (other in choices)


CLASSES = st.lists(st.sampled_from(list("ab[&-~]^x\\")), min_size=1, max_size=6).map("".join)


@settings(max_examples=100)
@given(CLASSES, st.sampled_from(list("ab[&-~]^x\\")))
def test_character_classes_mean_what_they_mean_in_python(inside, text):
    pattern = f"[{inside}]"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            expected = bool(re.fullmatch(pattern, text))
        grammar = Grammar.regex(pattern)
        compiled(grammar)
    except (re.error, RequestError):
        return
    if not re.search(r"\\[abx]", inside):  # \a, \b and \x have other meanings
        assert fits(grammar, text) == expected


@pytest.mark.parametrize(
    ("pattern", "place", "tokens"),
    [
        ("(Paris|Amsterdam}", 16, "'}' where ')' was expected"),
        ("a(b(c)", 1, "'(' is never closed"),
        ("ab)", 2, "')' closes nothing"),
        ("x[a-", 1, "'[' is never closed"),
        ("(a[b)]", 0, "'(' is never closed"),
        ("a\\", 1, "'\\' escapes nothing"),
        ("(" * 60_000, 100, "more than 100 groups"),
        ("a{" + "9" * 5000 + "}", 1, "every text has more than 10000 characters"),
        ("a{1000000000}", 1, "every text has more than 10000 characters"),
        ("x|((ab){200}|c{9000}){60}", 21, "every text has more than 10000 characters"),
    ],
)
def test_unbalanced_patterns_point_at_the_bracket(pattern, place, tokens):
    with pytest.raises(RequestError) as error:
        Grammar.regex(pattern, "structured_outputs.regex")
    assert error.value.field == "structured_outputs.regex"
    message = str(error.value)
    assert tokens in message and f"at character {place}\n" in message
    shown, caret = message.splitlines()[-2:]
    assert shown[caret.index("^")] == pattern[place]


@pytest.mark.parametrize(
    "pattern", ["a}", "]", "a{2,3}b", r"\(\[", "[(]", "[)(]", "[]()]", "(?:a|b)+", "[[:alpha:]]"]
)
def test_balanced_patterns_pass(pattern):
    assert portable(pattern, "f")


@pytest.mark.parametrize(
    ("make", "tokens"),
    [
        (lambda: Grammar.json_schema(3), "must be a JSON schema"),
        (lambda: Grammar.json_schema(deep(5000)), "nested deeper than 250"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "is not JSON"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "is not JSON"),
        (lambda: Grammar.regex("a" * (MAX_SOURCE + 1)), f"at most {MAX_SOURCE}"),
        (lambda: Grammar.regex(""), "non-empty string"),
        (
            lambda: Grammar.json_schema({"items": {"pattern": "(a}"}}),
            "grammar: items.pattern is not",
        ),
        (lambda: Grammar.regex("a\ud800"), "lone surrogate"),
        (lambda: Grammar.choice([]), "at least one non-empty string"),
        (lambda: Grammar.choice(["a", ""]), "at least one non-empty string"),
        (lambda: Grammar.grammar("start: " + "(" * 5000), "nests brackets deeper"),
    ],
)
def test_unusable_sources_are_explained_at_once(make, tokens):
    with pytest.raises(RequestError, match=tokens) as error:
        make()
    assert error.value.field == "grammar"


def deep(levels):
    schema: dict = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_every_schema_inside_a_schema_is_found():
    schema = {
        "properties": {"not": {"type": "string"}, "b": {"items": [{"not": {}}, True]}},
        "anyOf": [{"enum": ["not"]}],
        "additionalProperties": {"const": {"not": 1}},
    }
    assert [path for path, _ in schemas(schema)] == [
        "",
        "properties.not",
        "properties.b",
        "properties.b.items[0]",
        "properties.b.items[0].not",
        "anyOf[0]",
        "additionalProperties",
    ]
    message = 'Unimplemented keys: ["not"]'
    assert locate(json.dumps(schema), message) == "properties.b.items[0].not"


@pytest.mark.parametrize(
    ("pattern", "source"),
    [
        (r"\d{4}", "[0-9]{4}"),
        (r"[\d.]+\w", r"[0-9\.]+[0-9A-Za-z_]"),
        (r"\D\W", "[^0-9][^0-9A-Za-z_]"),
        (r"[^\w-]", r"[^0-9A-Za-z_\-]"),
        (r"\\d", r"\\d"),
    ],
)
def test_digits_and_letters_are_those_of_ascii(pattern, source):
    assert Grammar.regex(pattern).source == source


def test_choices_that_are_too_many_are_refused_unread(monkeypatch):
    def read(*_):
        raise AssertionError("they were escaped")

    monkeypatch.setattr(
        "forerun.constrain.schema.patterns._SPECIAL", type("Never", (), {"sub": read})()
    )
    with pytest.raises(RequestError, match="3000000 characters; at most 262144 bytes"):
        Grammar.choice(["a" * 1000 + str(index) for index in range(1000, 3000)] + ["b" * 992000])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"foo": "bar"}}, "properties.foo"),
        ({"properties": {"a": {"properties": {"b": 3}}}}, "properties.b"),
        ({"$defs": {"x": []}}, "$defs.x"),
    ],
)
def test_what_is_no_schema_is_named(schema, place):
    with pytest.raises(RequestError) as raised:
        Grammar.json_schema(schema)
    assert place in str(raised.value)
    assert Grammar.json_schema({"properties": {"a": True, "b": {}}, "default": {"properties": 3}})


@pytest.mark.parametrize("schema", [{"type": "object"}, {"const": {"a": "b"}}])
def test_a_plain_token_that_ends_texts_ends_none_before_it_is_whole(schema):
    """A line break, as some base models end with, is white space of JSON as well."""
    table = [bytes([value]) for value in range(256)]
    ends = TextEnds((ord("\n"),))
    tokenizer = Tokenizer(lambda text, _: list(text.encode()), Pieces(tuple(table), 0), [], ends)
    compiler = Compiler(tokenizer)
    matcher = Matcher(compiler.compile(Grammar.json_schema(schema)))
    for byte in b'{"a":"b"}':
        assert not allowed(matcher.mask(), ord("\n"))
        assert ord("\n") not in matcher.forced()
        assert matcher.commit(byte)
    assert matcher.complete or allowed(matcher.mask(), ord("\n"))
    compiler.close()


# --- llama.cpp's grammar language ----------------------------------------------------------------


ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""

TAKEN = [
    (ARITHMETIC, ["1+2= 3\n", "a +b*(c)=d\n1=2 \n"], ["1+2", "1=2"]),
    (r'root ::= "\u00e9" "\x41" "\"\\"', ['éA"\\'], ["e"]),
    ('root ::= ("a"?){3}', ["", "a", "aaa"], ["aaaa"]),
    ('root ::= Foo foo\nFoo ::= "a"\nfoo ::= "b"', ["ab"], ["aa", "ba"]),
    ('root ::= start "b"\nstart ::= "a"', ["ab"], ["b"]),
    ('root ::= (\n  "a" | # one\n  "b"\n)+\n', ["ab"], ["", "c"]),
    (r"root ::= [^a-c\]-] . [\x41-\u0043]", ["d\nA", "éxB"], ["axA", "]xA", "-xA", "dxD"]),
    ('root ::= "a" root | ""', ["", "aaa"], ["b"]),
    ('root ::= [0-9]{,2} "x"{ , 1 }', ["", "1", "12", "12x", "x"], ["123", "xx"]),
    ('root ::= a # b ## c\n# ==== a ====\na ::= "x" #' + "#" * 80, ["x"], ["xx"]),
    ('root ::= [0-9]{2,} "x"{1}', ["12x", "1234x"], ["1x", "12xx"]),
]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize(("source", "valid", "invalid"), TAKEN, ids=lambda value: str(value)[:30])
def test_what_it_means(source, valid, invalid, kind):
    grammar = Grammar.grammar(source)
    for text in valid:
        assert fits(grammar, text, kind), text
    for text in invalid:
        assert not fits(grammar, text, kind), text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('root ::= "a" root', "root never ends"),
        ('root ::= a\na ::= "x" b\nb ::= a', "root never ends"),
        ('root ::= ( "a"', "Expected ')' at line 1"),
        ('root ::= "a"\n  b', 'unknown rule "b" in "root"'),
        ('other ::= "a"', "no rule named root"),
        ('root ::= "a', "Expected '\"' at line 1"),
        (r'root ::= "\q"', r"Unknown escape \q at line 1"),
        ("root ::= []", "empty character class"),
        ('root ::= "a"{}', "Expected a number between { and } at line 1"),
        ('root ::= "a"{,}', "Expected a number between { and } at line 1"),
    ],
)
def test_errors_say_where(source, message):
    with pytest.raises(RequestError) as error:
        compiled(Grammar.grammar(source))
    assert message in str(error.value)
