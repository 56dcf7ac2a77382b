"""Shapes of answers that need no server to be checked."""

import json

import pytest

from forerun.engine.request import Delta, Finish, SpeculationStats
from forerun.interface.plan import TokenLogprobs
from forerun.serve.answers.session import Tally
from forerun.serve.dialects.openai.render import (
    ChatFormat,
    CompletionFormat,
    Echo,
    speculation_metrics,
    token_text,
)
from forerun.serve.dialects.sglang.generate import GenerateDialect
from forerun.text.tokenizer import Tokenizer
from forerun.types import RequestId

TOKENIZER = Tokenizer.byte_level()
END = 257


def delta(tokens, text=None, finish=None, logprob=-1.0):
    entries = tuple(TokenLogprobs(t, logprob, ((t, logprob), (98, -2.0))) for t in tokens)
    text = TOKENIZER.decode(tokens) if text is None else text
    return Delta(RequestId("r"), 0, text, tuple(tokens), entries, finish=finish)


def test_chat_chunks_in_order():
    shape = ChatFormat(TOKENIZER, frozenset())
    news = Delta(RequestId("r"), 0, "a", (97,))
    role, content = shape.chunks(0, news)
    assert role["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert content["delta"] == {"content": "a"}
    assert [chunk["delta"] for chunk in shape.chunks(0, news)] == [{"content": "a"}]
    ended = Delta(RequestId("r"), 0, "", (END,), finish=Finish.STOP)
    (last,) = shape.chunks(0, ended)
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    # Another choice has its own role, even where its first news is its last.
    both = shape.chunks(1, ended)
    assert [chunk["delta"] for chunk in both] == [
        {"role": "assistant", "content": "", "refusal": None},
        {},
    ]


def test_a_stop_token_that_leaves_no_text_has_no_logprobs():
    shape = ChatFormat(TOKENIZER, frozenset({END}))
    ended = delta([97, END], "a", Finish.STOP)
    entries = shape.choice(0, ended)["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a"]
    kept = ChatFormat(TOKENIZER, frozenset()).choice(0, ended)["logprobs"]["content"]
    assert [entry["token"] for entry in kept] == ["a", "<|im_end|>"]
    # At the limit, or by a stop string, the last token is like any other.
    for finish in (Finish.LENGTH, None):
        kept = shape.choice(0, delta([97, END], "a", finish))["logprobs"]["content"]
        assert len(kept) == 2


def test_tokens_that_are_no_whole_characters():
    assert token_text("é".encode()) == "é"
    assert token_text(b"\xc3") == "bytes:\\xc3"
    entry = ChatFormat(TOKENIZER, frozenset()).choice(0, delta([0xC3]))["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == ("bytes:\\xc3", [0xC3])


def test_minus_infinity_is_a_number_in_json():
    choice = ChatFormat(TOKENIZER, frozenset()).choice(0, delta([97], logprob=-float("inf")))
    assert choice["logprobs"]["content"][0]["logprob"] == -9999.0


def test_offsets_count_characters_of_the_text():
    """é is two tokens; the control token leaves no text; offsets go on from chunk to chunk."""
    shape = CompletionFormat(TOKENIZER, frozenset(), frozenset({END}))
    (first,) = shape.chunks(0, delta([97, 0xC3]))
    (second,) = shape.chunks(0, delta([0xA9, END, 98]))
    assert first["logprobs"]["text_offset"] == [0, 1]
    assert second["logprobs"]["text_offset"] == [1, 2, 2]


def test_echo_comes_once_and_shifts_offsets():
    echoes = [Echo("hi", (104, 105)), Echo("ho", (104, 111))]
    shape = CompletionFormat(TOKENIZER, frozenset(), frozenset(), echoes, 2)
    assert [shape.chunks(i, delta([97]))[0]["text"] for i in range(4)] == ["hia"] * 2 + ["hoa"] * 2
    assert shape.chunks(3, delta([97]))[0]["text"] == "a"
    again = CompletionFormat(TOKENIZER, frozenset(), frozenset(), echoes, 2)
    news = Delta(RequestId("r"), 0, "a", (97,), prompt_logprobs=(TokenLogprobs(105, -3.0),))
    logprobs = again.choice(0, news)["logprobs"]
    assert logprobs["tokens"] == ["h", "i"]
    assert logprobs["token_logprobs"] == [None, -3.0]


def test_the_chosen_token_is_among_the_top():
    shape = CompletionFormat(TOKENIZER, frozenset(), frozenset())
    entry = TokenLogprobs(97, -5.0, ((98, -0.1),))
    news = Delta(RequestId("r"), 0, "a", (97,), (entry,))
    assert shape.choice(0, news)["logprobs"]["top_logprobs"] == [{"b": -0.1, "a": -5.0}]


def test_speculation_metrics_are_vllms():
    stats = [
        SpeculationStats(steps=4, draft_tokens=12, accepted=5, histogram=(1, 2, 0, 1), reason="a"),
        SpeculationStats(steps=2, draft_tokens=6, accepted=1, histogram=(1, 1)),
    ]
    assert speculation_metrics(stats)["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 6 / 6,
        "draft_acceptance_rate": pytest.approx(6 / 18),
        "acceptance_histogram": [2, 3, 0, 1],
        "num_spec_steps": 6,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 18,
        "reasons": ["a", ""],
    }
    nothing = speculation_metrics([])["speculative_decoding"]
    assert nothing["mean_acceptance_length"] is None
    assert nothing["draft_acceptance_rate"] is None


# --- events of /generate say the whole text so far, at the cost of what is new -------------------


LENGTH = 96
BODY = {
    "text": "Hi",
    "return_logprob": True,
    "top_logprobs_num": 2,
    "logprob_start_len": 0,
    "token_ids_logprob": [7],
    "sampling_params": {"max_new_tokens": LENGTH},
}
NAMES = ("token_logprobs", "top_logprobs", "token_ids_logprobs")


def entry(at):
    return TokenLogprobs(at, -at / 8, ((at, -at / 8), (7, -at / 4)))


def test_each_log_probability_is_worded_once(client, monkeypatch):
    """Every event worded all of them again: a tenth of a second for each token of a long answer."""
    dialect, count, word = GenerateDialect(), 0, GenerateDialect._entry
    generation = dialect.parse(BODY, client.app.state.service).generation
    (request,) = generation.requests

    def counted(*args):
        nonlocal count
        count += 1
        return word(*args)

    monkeypatch.setattr(GenerateDialect, "_entry", counted)
    first = {"prompt_logprobs": (entry(105),)}
    for at in range(LENGTH):
        news = {"text": "x", "tokens": (at,), "logprobs": (entry(at),), **first}
        first = {}
        event = dialect.events([(0, Delta(request.id, 0, **news))], Tally(generation), False)
        meta = json.loads(event.removeprefix(b"data: "))["meta_info"]
        assert [len(meta[f"output_{name}"]) for name in NAMES] == [at + 1] * 3
        assert [len(meta[f"input_{name}"]) for name in NAMES] == [2] * 3
    assert meta["output_token_logprobs"] == [[-at / 8, at, None] for at in range(LENGTH)]
    assert meta["output_top_logprobs"][8] == [[-1, 8, None], [-2, 7, None]]
    assert meta["output_token_ids_logprobs"][8] == [[-2, 7, None]]
    assert meta["input_token_logprobs"] == [[None, 72, None], [-105 / 8, 105, None]]
    assert count == 4 * (LENGTH + 1) + LENGTH  # The first token of the prompt has no entry.
