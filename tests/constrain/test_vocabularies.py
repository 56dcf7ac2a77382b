"""Every kind of grammar under every kind of vocabulary: compiled, followed to a text that it
allows however that is cut into tokens, and forced where nothing else can follow.

`make vocabularies` runs it under large and real ones, too.
"""

from functools import cache

import numpy as np
import pytest

from forerun.constrain.grammar import Grammar, Start
from forerun.constrain.grammar.calls import Calling, tool_rules
from forerun.constrain.isolation.compile import Compiler
from forerun.constrain.matcher.llguidance_backend import LONG, _Vocabulary
from forerun.constrain.matcher.matcher import Matcher
from forerun.text.tools import FORMATS
from tests.constrain.test_calls import TOOLS, WRITTEN
from tests.constrain.tools import PERSON, allowed
from tests.covering import covering, every, rarely, values
from tests.text.vocabularies import REAL, SMALL, real_ones, vocabulary

HEAVY = pytest.mark.slow
NAMES = [*SMALL, *(pytest.param(name, marks=HEAVY) for name in ("large", *REAL))]
ANY = '{"a": [1, -2.5e3, true, null, "\u00e9\\n"], "b c": {"d": " x"}}'
ADA = '{"first_name": "Ada", "age": 36, "kind": "human"}'
RULES = 'root ::= "{" ws "x" ( " y" )? ws "}"\nws ::= [ \\n]*'
KINDS = {
    "json_object": (Grammar.json_object(), ANY),
    "schema": (Grammar.json_schema(PERSON), ADA),
    "schema on one line": (Grammar.json_schema(PERSON).on_one_line(), ADA),
    "const": (Grammar.json_schema({"const": {"name": [" a", "\u00e9\u65e5", "x  y"]}}), None),
    "regex": (Grammar.regex("[A-Z][a-z]+ [0-9]{2}( \u00e9\u65e5)+"), "Ab 12 \u00e9\u65e5"),
    "spaced": (Grammar.regex(" +x"), "  x"),
    "choice": (Grammar.choice(["yes", "no way", " no"]), "no way"),
    "space first": (Grammar.choice(["yes", "no way", " no"]), " no"),
    "gbnf": (Grammar.grammar(RULES), "{ x y\n}"),
    "lark": (Grammar.grammar('start: "<" /[a-z ]+/ ">"'), "<a bc>"),
    "after thinking": (Grammar.json_object().after(Start("</think>")), f"So.</think>{ADA}"),
}
KINDS |= {
    f"calls of {name}": (tool_rules(FORMATS[name], TOOLS, Calling(True, True), None).grammar, text)
    for name, text in WRITTEN.items()
}
KINDS["const"] = (KINDS["const"][0], '{"name": [" a", "\u00e9\u65e5", "x  y"]}')


@pytest.fixture(scope="module", autouse=True)
def _closed():
    yield
    for name in _open:
        compiler(name).close()
    _open.clear()


_open: list[str] = []


@cache
def compiler(name):
    _open.append(name)
    return Compiler(vocabulary(name))


def skip_unless_here(name):
    if name in REAL and name not in real_ones():
        pytest.skip("make vocabularies fetches Mistral's")


@cache
def longest(name):
    return _Vocabulary(vocabulary(name))


@cache
def spelled(name):
    """The tokens of each text, the last first, and the length of the longest text."""
    tokenizer, ids_of = vocabulary(name), {}
    for id in reversed(range(tokenizer.vocab_size)):
        if tokenizer.pieces[id] and id not in tokenizer.special_ids:
            ids_of.setdefault(tokenizer.pieces[id], []).append(id)
    return ids_of, max(map(len, ids_of))


def ways(name, rest, cut):
    """Tokens that the rest of a text may begin with, the wanted one first."""
    ids_of, most = spelled(name)
    sizes = range(1, most + 1)[:: 1 if cut == "shortest" else -1]
    ids = [id for size in sizes if len(rest) >= size for id in ids_of.get(rest[:size], ())]
    try:
        own = vocabulary(name).encode_within(rest.decode())[:1] if cut == "its own" else []
    except UnicodeDecodeError:
        own = []
    return [*own, *ids]


@pytest.mark.parametrize(
    ("kind", "name"),
    rarely(every(KINDS, [*SMALL, "large", *REAL]), covering(every(KINDS, SMALL), values), None),
)
def test_every_grammar_leads_to_its_text(name, kind):
    skip_unless_here(name)
    grammar, text = KINDS[kind]
    tokenizer = vocabulary(name)
    compiled = compiler(name).compile(grammar)
    for cut in ("its own", "longest", "shortest"):
        matcher, rest = Matcher(compiled), text.encode()
        while rest:
            mask = matcher.mask()
            forced = b"".join(map(tokenizer.token_bytes, matcher.forced()))
            assert rest.startswith(forced), (forced, rest)
            able = [id for id in ways(name, rest, cut) if mask is None or allowed(mask, id)]
            assert able, (text, rest)
            assert matcher.commit(able[0]) and not matcher.error
            rest = rest[len(tokenizer.token_bytes(able[0])) :]
        assert matcher.complete or allowed(matcher.mask(), tokenizer.eos_ids[0])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_forced_alone_writes_the_text(name):
    """No step of the model is needed for a constant."""
    skip_unless_here(name)
    grammar, text = KINDS["const"]
    tokenizer = vocabulary(name)
    matcher, written = Matcher(compiler(name).compile(grammar.on_one_line())), b""
    while not matcher.complete:
        ids = matcher.forced()
        if not ids:
            mask = np.frombuffer(matcher.mask(), np.uint8)
            ids = np.flatnonzero(np.unpackbits(mask, bitorder="little"))[:1].tolist()
            if ids[0] in tokenizer.eos_ids:
                break
        for id in ids:
            assert matcher.commit(id)
            written += tokenizer.token_bytes(id)
    assert written.decode() == text


@pytest.mark.parametrize("name", NAMES)
def test_longest_tokens_are_found_as_in_a_dictionary(name):
    """Of tokens and what is cut out of them, beside one another; of equal ones the last counts."""
    skip_unless_here(name)
    known, random = longest(name), np.random.default_rng(0)
    special = set(known.special_token_ids)
    ids = {piece: id for id, piece in enumerate(known.tokens) if piece and id not in special}
    most = max(map(len, ids))
    for _ in range(100):
        drawn = [known.tokens[id] for id in random.integers(0, len(known.tokens), 3)]
        data = b"".join(piece[random.integers(2) :] for piece in drawn) + b"\xff"
        expected, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + most), at, -1)
            end = next((end for end in ends if data[at:end] in ids), None)
            if end is None:
                break
            expected.append(ids[data[at:end]])
            at = end
        assert known.longest(data) == expected


@pytest.mark.parametrize("name", NAMES)
def test_forced_texts_are_spelled_exactly(name):
    """A space is put before no text that goes on, half a character is no other character."""
    skip_unless_here(name)
    known = longest(name)
    texts = [
        "{",
        " {",
        "a b",
        "  x",
        "\n",
        "e\u0301 \u212b",
        "\u00e9",
        "\u65e5\u672c",
        "\x00\x7f",
        "Ab 12",
    ]
    for data in [*map(str.encode, texts), b"\xe6\x97", b"\xff", b"x\xc3"]:
        assert b"".join(known.tokens[id] for id in known(data)) == data
    long = ("e\u0301 a" * LONG).encode()
    ids = known(long)
    assert ids and long.startswith(b"".join(known.tokens[id] for id in ids))
