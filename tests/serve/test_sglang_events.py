"""Events of /generate say the whole text so far, at the cost of what is new."""

import json

from forerun.serve.dialects.sglang.generate import GenerateDialect

LENGTH = 96
BODY = {
    "text": "Hi",
    "return_logprob": True,
    "top_logprobs_num": 2,
    "logprob_start_len": 0,
    "speculative": {"enabled": False},
    "token_ids_logprob": [5],
    "sampling_params": {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": 0},
}
SAID = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs",
        "input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")  # fmt: skip


def test_each_log_probability_is_worded_once(client, monkeypatch):
    """Every event worded all of them again: a second for each token of a long answer with many."""
    whole = client.post("/generate", json=BODY).json()
    count, entry = 0, GenerateDialect._entry

    def counted(*args):
        nonlocal count
        count += 1
        return entry(*args)

    monkeypatch.setattr(GenerateDialect, "_entry", counted)
    told = client.post("/generate", json={**BODY, "stream": True}).text.split("\n\n")
    events = [json.loads(one.removeprefix("data: ")) for one in told[:-2]]
    assert len(events) > LENGTH // 16
    for at, event in enumerate(events):
        for name in SAID:
            said, every = event["meta_info"][name], whole["meta_info"][name]
            assert said == every[: len(said)], (at, name)
    assert all(events[-1]["meta_info"][name] == whole["meta_info"][name] for name in SAID)
    prompt = whole["meta_info"]["prompt_tokens"]
    assert count <= 4 * (LENGTH + prompt) + len(events)
