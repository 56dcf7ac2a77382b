"""Events of /generate say the whole text so far, at the cost of what is new."""

import json

from forerun.engine.request import Delta
from forerun.interface.plan import TokenLogprobs
from forerun.serve.answers.session import Tally
from forerun.serve.dialects.sglang.generate import GenerateDialect

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
        told = dialect.events([(0, Delta(request.id, 0, **news))], Tally(generation), False)
        meta = json.loads(told.removeprefix(b"data: "))["meta_info"]
        assert [len(meta[f"output_{name}"]) for name in NAMES] == [at + 1] * 3
        assert [len(meta[f"input_{name}"]) for name in NAMES] == [2] * 3
    assert meta["output_token_logprobs"] == [[-at / 8, at, None] for at in range(LENGTH)]
    assert meta["output_top_logprobs"][8] == [[-1, 8, None], [-2, 7, None]]
    assert meta["output_token_ids_logprobs"][8] == [[-2, 7, None]]
    assert meta["input_token_logprobs"] == [[None, 72, None], [-105 / 8, 105, None]]
    assert count == 4 * (LENGTH + 1) + LENGTH  # The first token of the prompt has no entry.
