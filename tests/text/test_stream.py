"""Streams against the whole text: same characters, cut at the same place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.text.stream import TextStream
from forerun.text.tokenizer import Tokenizer
from tests.counted import lines
from tests.text.test_tokenizer import byte_level, sentence_piece
from tests.text.vocabularies import SMALL, vocabulary

BYTES = Tokenizer.byte_level()
TOKENIZERS = {"bytes": BYTES, "bpe": byte_level("smollm"), "spm": sentence_piece()}


def whole(tokenizer, ids, stop=(), include_stop=False, skip_special=True):
    """The reference: decode everything, then cut where a stop string is complete first; a control
    token that is skipped may be one.
    """
    marks = {tokenizer.added[s].id: s for s in stop if skip_special and s in tokenizer.added}
    silent = tokenizer.special_ids.intersection(marks)
    mark = next((place for place, id in enumerate(ids) if id in silent), len(ids))
    text = tokenizer.decode(ids[:mark], skip_special)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s and s in text]
    if not ends:
        stopped = marks[ids[mark]] if mark < len(ids) else None
        return text + (stopped or "") * include_stop, stopped
    end, _, stopped = min(ends)
    return text[: end if include_stop else end - len(stopped)], stopped


def streamed(tokenizer, ids, *args):
    stream = TextStream(tokenizer, *args)
    pieces, stopped = [], None
    for id in ids:
        piece = stream.push(id)
        pieces.append(piece.text)
        stopped = stopped or piece.stopped
        assert "\ufffd" not in piece.text or "\ufffd" in tokenizer.decode(ids, False)
    pieces.append(stream.finish())
    return "".join(pieces), stopped


@settings(max_examples=150)
@given(data=st.data(), name=st.sampled_from(sorted(TOKENIZERS)))
def test_streams_equal_the_whole_text(data, name):
    tokenizer = TOKENIZERS[name]
    if data.draw(st.booleans(), "any ids"):
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    else:
        text = data.draw(st.text("ab <|im_end>é日👍\n", max_size=30))
        ids = tokenizer.encode(text, data.draw(st.booleans())).tolist()
    controls = sorted(text for text, one in tokenizer.added.items() if one.control)
    words = st.text("ab <|é日👍", min_size=1, max_size=4) | st.sampled_from(controls)
    stop = data.draw(st.lists(words, max_size=4))
    include, skip = data.draw(st.booleans()), data.draw(st.booleans())
    expected = whole(tokenizer, ids, stop, include, skip)
    assert streamed(tokenizer, ids, stop, include, skip) == expected


@settings(max_examples=200)
@given(
    prompt=st.text("ab <s>\u00e9", max_size=9),
    answer=st.text("ab \u00e9", max_size=9),
    stop=st.lists(st.text("ab ", min_size=1, max_size=3), max_size=2),
    name=st.sampled_from(sorted(SMALL)),
    skip=st.booleans(),
)
def test_a_continuation_is_what_it_adds_to_the_text_before_it(prompt, answer, stop, name, skip):
    tokenizer = vocabulary(name)
    before = tokenizer.encode(prompt, specials=True, bos=True).tolist()
    ids = tokenizer.encode_within(answer)
    text = tokenizer.decode([*before, *ids], skip).removeprefix(tokenizer.decode(before, skip))
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    expected = (text[: sum(min(ends)[:2])], min(ends)[2]) if ends else (text, None)
    assert streamed(tokenizer, ids, stop, False, skip, before) == expected
    if prompt.strip("<s> "):
        assert text == answer


@settings(max_examples=150)
@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_overlapping_stop_strings(text, stop, include):
    ids = list(text.encode())
    assert streamed(BYTES, ids, stop, include) == whole(BYTES, ids, stop, include)


@settings(max_examples=150)
@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    early=st.integers(0, 30),
)
def test_stop_strings_that_are_complete_early_are_text(text, stop, early):
    stream, pieces = TextStream(BYTES, stop), []
    for place, token in enumerate(text.encode(), 1):
        pieces.append(stream.push(token, place <= early))
    ends = [
        (end, -len(one))
        for one in stop
        for end in range(max(early + 1, len(one)), len(text) + 1)
        if text[:end].endswith(one)
    ]
    cut = sum(min(ends)) if ends else len(text)
    assert "".join(piece.text for piece in pieces) + stream.finish() == text[:cut]


def test_half_characters_wait():
    stream = TextStream(BYTES)
    texts = [stream.push(value).text for value in "a👍b".encode()]
    assert texts == ["a", "", "", "", "👍", "b"]


def test_a_character_that_never_completes_comes_out_as_replacement_at_the_end():
    stream = TextStream(BYTES)
    assert [stream.push(value).text for value in "x👍".encode()[:-1]] == ["x", "", "", ""]
    assert stream.finish() == "\ufffd"


def test_only_what_may_be_a_stop_string_is_held():
    stream = TextStream(BYTES, ("STOP",))
    texts = [stream.push(value).text for value in b"a SxSTaSTOPz"]
    assert texts == ["a", " ", "", "Sx", "", "", "STa", "", "", "", "", ""]
    assert stream.push(ord("q")).stopped == "STOP"
    assert stream.finish() == ""


def test_held_text_is_released_at_the_end():
    stream = TextStream(BYTES, ("STOP",))
    assert "".join(stream.push(value).text for value in b"x STO") == "x "
    assert stream.finish() == "STO"


def test_stop_inside_one_token():
    tokenizer = byte_level("smollm")
    token = max(range(tokenizer.vocab_size), key=lambda id: len(tokenizer.token_bytes(id)))
    text = tokenizer.token_bytes(token).decode()
    stream = TextStream(tokenizer, (text[2:4],))
    piece = stream.push(token)
    assert (piece.text, piece.stopped) == (text[: text.find(text[2:4])], text[2:4])


def test_special_tokens_leave_text_only_with_the_option():
    ids = [97, 257, 98]
    assert streamed(BYTES, ids) == ("ab", None)
    assert streamed(BYTES, ids, (), False, False) == ("a<|im_end|>b", None)
    assert streamed(BYTES, ids, ("end|>b",), False, False) == ("a<|im_", "end|>b")


@pytest.mark.parametrize("stop", [(), ("a" * 50 + "b",)])
def test_cost_per_token_does_not_grow(stop):
    """Neither the lines that a token takes nor what is held back."""
    stream, said = TextStream(BYTES, stop), 0

    def push():
        nonlocal said
        said += sum(len(stream.push(97).text) for _ in range(1000))

    push()
    costs = [lines(push), *(push() or lines(push) for _ in range(30))]
    assert max(costs) <= costs[0] and len(stream._held) <= len("".join(stop))
    assert said + len(stream.finish()) == 62_000
