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
        found = [id for id in members(matcher.mask()) if id < 256]
        id = next((id for id in b'"]0/' if id in found), found[0])
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


def test_what_is_known_of_tokens():
    slashes = Slashes([b"/", b"a\\", b"a", b"\\", b"z\\", b"/a", b"/c"], [6])
    assert [slashes.begins(id) for id in range(7)] == [
        True,
        False,
        False,
        False,
        False,
        True,
        False,
    ]
    assert [slashes.before(id) for id in range(7)] == [None, [2], None, [], None, None, None]
    assert Slashes([b"a", b"ab", b"b", b"abb\\"], []).before(3) == [1, 2]
    assert slashes.of(bytes([0b0111_1111, 0, 0, 0])) == bytes([0b0010_0001, 0, 0, 0])
