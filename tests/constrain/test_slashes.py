r"""`\/` beside the library: only JSON comes, and whatever JSON has of it can be written."""

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.constrain.grammar import Grammar
from forerun.constrain.isolation.compile import Compiler
from forerun.constrain.matcher.matcher import Matcher
from forerun.constrain.matcher.slashes import Slashes, shown
from forerun.text.pieces import Pieces
from forerun.text.tokenizer import AddedToken, TextEnds, Tokenizer
from tests.constrain.tools import allowed, members

TOKENS = [
    *(rb"\/", rb"\\/", rb"\\\/", rb"\\\\/", rb"\/\/", b"x\\", b"/\\", b"\\/\\", b"\\\\", b"\\\\\\"),
    *(b"//", b'/"', rb"\"/", rb"n\/", rb"\u00", rb"2f\/", b"/n", b'["', b'"]', b'", "', b"\\n\\"),
]
"""What ends, begins or holds an escape in all ways that there are."""
LIST = {"type": "array", "items": {"type": "string"}}


@cache
def tokenizer() -> Tokenizer:
    table = [bytes([value]) for value in range(256)] + [b"<end>", *TOKENS]
    end = AddedToken(256, "<end>", True)
    pieces = Pieces(tuple(table), 0)
    return Tokenizer(lambda text, first: list(text.encode()), pieces, [end], TextEnds((256,)))


@pytest.fixture(scope="module")
def compiler():
    made = Compiler(tokenizer())
    yield made
    made.close()


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_the_masks_allow_is_json(compiler, data):
    matcher, text = Matcher(compiler.compile(Grammar.json_schema(LIST))), b""
    favoured = [*range(257, 257 + len(TOKENS)), *b'\\/"u2fn ,[]']
    for _ in range(data.draw(st.integers(1, 25))):
        able = [id for id in favoured if allowed(matcher.mask(), id)]
        if not able:
            break
        id = data.draw(st.sampled_from(able))
        assert matcher.commit(id)
        text += tokenizer().token_bytes(id)
    for _ in range(40):  # And then to the end, by what alone can follow or is shortest.
        if matcher.complete or allowed(matcher.mask(), 256):
            break
        next_bytes = [id for id in members(matcher.mask()) if id < 256]
        id = next((id for id in b'"]0/' if id in next_bytes), next_bytes[0])
        assert matcher.commit(id)
        text += bytes([id])
    value = json.loads(text)
    assert isinstance(value, list) and all(isinstance(one, str) for one in value)


@settings(max_examples=60)
@given(
    words=st.lists(
        st.lists(st.sampled_from(["\\/", "/", "\\\\", "\\n", "\\u002f", "x"]), max_size=6)
    )
)
def test_every_string_is_written_byte_by_byte(compiler, words):
    text = "[" + ", ".join('"' + "".join(word) + '"' for word in words) + "]"
    json.loads(text)
    matcher = Matcher(compiler.compile(Grammar.json_schema(LIST)))
    assert all(map(matcher.commit, text.encode()))
    assert matcher.complete or allowed(matcher.mask(), 256)


@settings(max_examples=60)
@given(
    word=st.lists(st.sampled_from(["\\/", "/", "\\\\", "\\n", "\\u002f", "x"]), max_size=8),
    data=st.data(),
)
def test_a_token_that_is_allowed_is_what_its_bytes_are(compiler, word, data):
    """Where a token is taken, so are its bytes one by one, and what may follow is the same."""
    compiled = compiler.compile(Grammar.json_schema(LIST))
    matcher, single = Matcher(compiled), Matcher(compiled)
    start = b'["' + "".join(word).encode()
    start = start[: data.draw(st.integers(2, len(start)))]
    assert all(map(matcher.commit, start)) and all(map(single.commit, start))
    assert matcher.mask() == single.mask()
    for id in range(257, 257 + len(TOKENS)):
        if not allowed(matcher.mask(), id):
            continue
        assert matcher.advance(id) and all(map(single.advance, tokenizer().token_bytes(id)))
        one, other = (np.frombuffer(each.mask(), np.uint8)[:32] for each in (matcher, single))
        assert np.array_equal(one, other)
        matcher.back(1)
        single.back(len(tokenizer().token_bytes(id)))


@pytest.mark.parametrize(
    ("token", "as_shown"),
    [
        (rb"\/", b"/"),
        (rb"a\/b\/", b"a/b/"),
        (rb"\\/", rb"\\/"),
        (rb"\\\/", rb"\\/"),
        (b"/", b"/"),
        (b"\\", b"\\"),
        (b"\\n\\", b"\\n\\"),
        (b"\\\n\\/", b"\\\n/"),
        (b"", b""),
    ],
)
def test_tokens_as_they_are_shown(token, as_shown):
    assert shown(token) == as_shown


def of_tokens(*tokens, special=(), of_json=True):
    """The slashes of a vocabulary of these tokens, in which the longest are found."""

    def longest(text):
        sizes = range(len(text), 0, -1)
        size = next((size for size in sizes if text[:size] in tokens), 0)
        return [tokens.index(text[:size]), *longest(text[size:])] if size else []

    return Slashes(tokens, longest, special, of_json)


def test_what_is_known_of_tokens():
    slashes = of_tokens(b"/", b"a\\", b"a", b"\\", b"z\\", b"/a", b"/c", special=[6])
    assert [slashes.begins(id) for id in range(7)] == [
        True,
        False,
        False,
        False,
        False,
        True,
        False,
    ]
    before = [[inner for _, inner in slashes.readings(id)] for id in range(7)]
    assert before == [[None], [[2]], [None], [[]], [None], [None], [None]]
    assert [*of_tokens(b"a", b"ab", b"b", b"abb\\").readings(3)] == [([3], [1, 2])]
    assert slashes.of(bytes([0b0111_1111, 0, 0, 0])) == bytes([0b0010_0001, 0, 0, 0])


TOKENS_WITHIN = b"/", b"\\/", b"a", b"a\\/a\\", b"\\/a", b"/a", b"z\\/", b"\\/"


def test_how_tokens_with_an_escaped_slash_are_taken():
    slashes = of_tokens(*TOKENS_WITHIN, special=[7])
    assert [*slashes.readings(1)] == [([1], None), ([0], None)]
    assert [*slashes.readings(3)] == [([3], [2, 4])], "no token is a backslash"
    assert [*slashes.readings(4)] == [([4], None), ([5], None)]
    assert [*slashes.readings(6)] == [([6], None)], "no token has its z"
    assert [*slashes.readings(7)] == [([7], None)], "it is no text"
    mask, none = bytes([0b0000_0001, 0, 0, 0]), bytes(4)
    assert slashes.with_shown(mask, lambda ids: False) == bytes([0b0000_0011, 0, 0, 0])
    assert slashes.with_shown(none, lambda ids: False) == none
    longer = of_tokens(*TOKENS_WITHIN, b"\\")
    assert [*longer.readings(3)] == [([3], [2, 4]), ([2, 5, 8], [2, 5])]
    calls = []
    assert longer.with_shown(none, lambda ids: calls.append(ids) or True)[0] == 0b0000_1000
    assert calls == [[2, 5, 8]]
    outside = of_tokens(*TOKENS_WITHIN, of_json=False)
    assert outside.with_shown(mask, lambda ids: True) == mask
    assert [*outside.readings(1)] == [([1], None)]


@pytest.mark.parametrize(
    ("parts", "allowed_last"),
    [((b'"', rb"\/"), True), ((b'"', b"\\", b"/"), True), ((b'"', b"\\", rb"\/"), False)],
)
def test_an_escaped_slash_behind_a_backslash_is_two_characters(compiler, parts, allowed_last):
    r"""The text of backslash and `\/` is `\\/`: a backslash and a slash, not a slash."""
    table = [tokenizer().token_bytes(id) for id in range(tokenizer().vocab_size)]
    *before, last = map(table.index, parts)
    matcher = Matcher(compiler.compile(Grammar.json_schema({"type": "string", "maxLength": 1})))
    assert all(map(matcher.commit, before))
    assert allowed(matcher.mask(), last) == allowed_last
    assert matcher.advance(last) == allowed_last
