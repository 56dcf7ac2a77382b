"""Rows whose tokens are reported in bulk, beside the way that goes through them one by one."""

import numpy as np
import pytest

from forerun.executors.toy import ToyExecutor
from forerun.text.stream import TextStream
from forerun.text.tokenizer import Tokenizer
from tests.engine.carrying import CarryingToy
from tests.engine.toys import TOKENIZER, RecordingSink, ask, limits, make

VARIANTS = [
    {},
    {"stop": ("ab", "pp")},
    {"n": 3, "temperature": 1.0, "seed": 7},
    {"stop_tokens": tuple(range(97, 100))},
    {"stop_tokens": tuple(range(90, 109)), "min_tokens": 3, "include_stop": True},
    {"logprobs": 1},
    {"skip_special_tokens": False},
    {"max_tokens": 1},
]


def deltas_of(name, overlap):
    executor = (CarryingToy if overlap else ToyExecutor)(limits(pages=256, slots=6, max_nodes=64))
    engine, sink = make(name, executor=executor, overlap=overlap), RecordingSink()
    for number, changes in enumerate(VARIANTS):
        given = {"max_tokens": 24} | changes
        engine.submit(ask(str(number), f"Hello {number}", **given), sink)
    while engine.step_once():
        pass
    return sink.deltas


@pytest.mark.parametrize("name", ["none", "oracle", "erratic"])
@pytest.mark.parametrize("overlap", [False, True])
def test_both_ways_tell_the_same(monkeypatch, name, overlap):
    quick, sizes = deltas_of(name, overlap), []

    def none_taken(bulk, sequence, tokens):
        sizes.append(1)
        return False

    monkeypatch.setattr("forerun.engine.output.FastDetokenize.takes", none_taken)
    slow = deltas_of(name, overlap)
    assert sum(sizes) > 40
    key = lambda delta: (delta.request, delta.index)  # noqa: E731
    assert sorted(quick, key=key) == sorted(slow, key=key)


def test_most_rows_of_a_long_answer_are_reported_in_bulk(monkeypatch):
    engine, one_by_one = make("none", context=400, pages=400), []
    settle = engine._core.outputs._emit_row
    monkeypatch.setattr(
        engine._core.outputs, "_emit_row", lambda *a: one_by_one.append(a[2]) or settle(*a)
    )
    sink, request = RecordingSink(), ask("r", "Hello", 200, stop_tokens=())
    engine.submit(request, sink)
    while engine.step_once():
        pass
    sink.expect(request)
    assert len(one_by_one) < 20, "the first token, the last, and those that leave no text"


@pytest.mark.parametrize("before", [b"a", "é".encode()])
def test_whole_tokens_are_what_a_stream_makes_of_them(before):
    """Where a stream says that text passes, it does, and leaves the stream as it was."""
    tokenizer = Tokenizer.byte_level()
    whole = tokenizer.whole_tokens(300)
    assert whole[97] and not whole[0xC3] and not whole[256:].any()
    for token in np.flatnonzero(whole).tolist():
        stream = TextStream(tokenizer)
        assert not stream.passes, "nothing was said yet: a lead may be cut off"
        for byte in before:
            stream.push(byte)
        assert stream.passes
        assert stream.push(token).text == tokenizer.pieces[token].decode()
        assert stream.passes


def test_half_a_character_and_stop_strings_do_not_pass():
    stream = TextStream(TOKENIZER)
    stream.push(97)
    stream.push(0xC3)
    assert not stream.passes
    stream.push(0xA9)
    assert stream.passes
    stopping = TextStream(TOKENIZER, ("x",))
    stopping.push(97)
    assert not stopping.passes
    special = TextStream(TOKENIZER, skip_special=False)
    special.push(97)
    assert not special.passes
