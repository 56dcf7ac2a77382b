"""Requests that use, in turn, every option a request can have: `forerun prove --mixed`."""

from typing import Any

from forerun.client.completion import Completion
from forerun.interface.plan import TokenLogprobs
from forerun.text.tokenizer import Tokenizer

FREE = 4
"""One prompt of this many has no grammar, so that batches are mixed."""
NEAR = 1e-3
"""Log-probabilities, in nats, that differ by less count as equal, because the rounding depends on
the batch.
"""


def options(index: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the options of prompt `index` other than the temperature, as keywords of
    `make_request`: penalties, biases, several choices, stop strings, log-probabilities or cut-offs,
    nine kinds in turn.
    """
    common = set(tokenizer.encode_part(' ea1,"', False))
    bias = tuple((token, 2.0) for token in sorted(common))
    stop = ("ck", "gh", "mp", "ob", "ph")
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.6, "presence_penalty": 0.4},
        {"logit_bias": bias},
        {"n": 3},
        {"stop": stop},
        {"logprobs": 5},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.3,
            "logit_bias": bias,
            "n": 2,
            "stop": stop,
            "include_stop": True,
            "logprobs": 2,
            "top_k": 40,
        },
    )
    return kinds[index % len(kinds)]


def report_difference(expected: Completion, found: Completion) -> int | None:
    """Return the output position at which two answers with equal tokens differ: the first token
    whose log-probabilities differ by NEAR or more, or the end if text or finish reason differ; None
    if they agree.
    """
    for place, pair in enumerate(zip(expected.logprobs, found.logprobs, strict=False)):
        if not _near(*pair):
            return place
    ends = [(one.text, one.finish, one.stop_reason, len(one.logprobs)) for one in (expected, found)]
    return None if ends[0] == ends[1] else len(expected.tokens)


def _near(expected: TokenLogprobs, found: TokenLogprobs) -> bool:
    pairs = [(expected.token, expected.logprob), *expected.top]
    others = [(found.token, found.logprob), *found.top]
    return len(pairs) == len(others) and all(
        a == b and abs(x - y) < NEAR for (a, x), (b, y) in zip(pairs, others, strict=True)
    )
