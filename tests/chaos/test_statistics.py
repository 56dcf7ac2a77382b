"""Sampled tokens against the returned log-probabilities, over HTTP, with speculation on.

The server returns the model's raw log-probabilities. What each sampling parameter makes of them is
written down here once more, from its definition. Of every sampled token the rank among the
probabilities so computed is taken; over thousands of tokens the ranks must be as frequent as the
probabilities say (chi-square). Seeds are fixed, so a run gives the same result every time.
"""

import re

import numpy as np
import pytest

from tests.lazy import LazyModule
from tests.worlds.real_server import NIGHTLY, forerun_serve

stats = LazyModule("scipy.stats")


pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
REQUESTS = 240 if NIGHTLY else 24
CHOICES, TOKENS, SHOWN = 16, 4, 40
LEAST = 1e-4
"""A p-value below this fails: by chance once in some 700 runs of 15 settings, were seeds drawn."""
QUESTION = "cdjecdjecdjecdje"
PROMPT = list(f"user: {QUESTION}\nassistant: ".encode())
END = 257
SETTINGS = {
    "nothing": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all cuts": {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "negative": {"frequency_penalty": -1.0, "presence_penalty": -0.5},
    "bias": {"logit_bias": {"101": 3.0, "102": -3.0, "100": 1.0}},
    "min_tokens": {"min_tokens": 2, "logit_bias": {str(END): 8.0}, "ignore_eos": False},
    "grammar": {"regex": "[a-h]{4}", "top_logprobs": 259},
    "everything": {
        "temperature": 1.3, "top_k": 8, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2,
        "frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {"104": 2.0},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ("--max-logprobs", "259", "--policy", "fixed", "--speculative-num-draft-tokens", "6")
    with forerun_serve(tmp_path_factory.mktemp("statistics"), *flags) as server:
        yield server


def probabilities(raw, body, history, output):
    """float64[V] after every parameter, from raw log-probabilities float64[V]."""
    scores = raw.copy()
    repetition = body.get("repetition_penalty", 1.0)
    if repetition != 1.0:
        # Of logits: the toy's best is 0, which log-probabilities are a constant away from.
        logits = scores - scores.max()
        seen = list(set(history))
        logits[seen] = np.where(
            logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition
        )
        scores = logits
    for token in output:
        scores[token] -= body.get("frequency_penalty", 0.0)
    for token in set(output):
        scores[token] -= body.get("presence_penalty", 0.0)
    for token, bias in body.get("logit_bias", {}).items():
        scores[int(token)] += bias
    if len(output) < body.get("min_tokens", 0):
        scores[[END, END + 1]] = -np.inf
    if "regex" in body:
        allowed = np.arange(ord("a"), ord("i"))
        scores = np.where(np.isin(np.arange(len(scores)), allowed), scores, -np.inf)
    scores = scores / body.get("temperature", 1.0)
    chances = np.exp(scores - scores.max())
    chances /= chances.sum()
    if "min_p" in body:
        chances[chances < body["min_p"] * chances.max()] = 0
    order = np.argsort(-chances, kind="stable")
    if "top_k" in body:
        chances[order[body["top_k"] :]] = 0
    if "top_p" in body:
        chances /= chances.sum()
        mass = np.cumsum(chances[order])
        chances[order[int(np.searchsorted(mass, body["top_p"])) + 1 :]] = 0
    return chances / chances.sum()


def token_of(entry):
    special = {"<|im_start|>": 256, "<|im_end|>": 257, "<|endoftext|>": 258}
    if entry["token"] in special:
        return special[entry["token"]]
    assert len(entry["bytes"]) == 1, entry
    return entry["bytes"][0]


def accepted(server):
    page = server.http.get("/metrics").text
    found = re.findall(r"(?m)^vllm:spec_decode_num_accepted_tokens_total\{[^}]*\} (\S+)", page)
    return float(found[0])


def ranks(server, body):
    """Observed and expected counts by rank, of all sampled tokens."""
    observed, expected = np.zeros(259), np.zeros(259)
    for number in range(REQUESTS):
        answer = server.post("/v1/chat/completions", body | {"seed": 1000 + number})
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            output = []
            for entry in choice["logprobs"]["content"]:
                raw = np.full(259, -np.inf)
                for shown in entry["top_logprobs"]:
                    raw[token_of(shown)] = shown["logprob"]
                assert np.exp(raw).sum() > 1 - 1e-6
                chances = probabilities(raw, body, PROMPT + output, output)
                token = token_of(entry)
                assert chances[token] > 0, (token, output)
                order = np.argsort(-chances, kind="stable")
                observed[int(np.flatnonzero(order == token)[0])] += 1
                expected += chances[order]
                output.append(token)
    return observed, expected


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_are_as_frequent_as_they_should_be(server, name):
    body = {
        "messages": [{"role": "user", "content": QUESTION}], "n": CHOICES, "max_tokens": TOKENS,
        "logprobs": True, "top_logprobs": SHOWN, "temperature": 1.0, "ignore_eos": True,
    } | SETTINGS[name]  # fmt: skip
    before = accepted(server)
    observed, expected = ranks(server, body)
    assert accepted(server) > before, "nothing was speculated"
    assert observed.sum() > REQUESTS * CHOICES
    # Rare ranks together, so that each class is expected often enough.
    head = int(np.count_nonzero(np.cumsum(expected[::-1])[::-1] >= 10)) - 1
    classes = [(observed[i], expected[i]) for i in range(head)]
    classes.append((observed[head:].sum(), expected[head:].sum()))
    assert len(classes) >= 2
    statistic = sum((o - e) ** 2 / e for o, e in classes)
    chance = float(stats.chi2.sf(statistic, len(classes) - 1))
    assert chance > LEAST, (classes, chance)
