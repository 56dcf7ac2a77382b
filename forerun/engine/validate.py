"""Checks a request before anything is allocated for it."""

import math
from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np

from forerun.engine.pooling import POOLINGS
from forerun.engine.request import Request
from forerun.errors import ContextError, RequestError
from forerun.speculative.sampling import Sampling
from forerun.types import Ints


def validate(
    request: Request, vocab: int, context: int, max_choices: int, adapters: int = 0
) -> None:
    """Raise RequestError, naming the wrong field, if the engine cannot honour `request`.

    vocab        V
    context      longest sequence, in tokens
    max_choices  largest n
    adapters     how many there are
    """
    prompt, max_tokens = request.prompt, request.stopping.max_tokens
    _types(request)
    if len(prompt) == 0:
        raise RequestError("The prompt is empty; it needs at least one token.", "prompt")
    _within(prompt, vocab, "prompt")
    _within(request.prediction, vocab, "prediction")
    _within([token for token, _ in request.sampling.logit_bias], vocab, "logit_bias")
    _within(request.stopping.stop_tokens, vocab, "stop_token_ids")
    if not 1 <= request.n <= max_choices:
        raise RequestError(f"n is {request.n}, but must be 1 to {max_choices}.", "n")
    if max_tokens < 0:
        raise RequestError(f"max_tokens is {max_tokens}, but must not be negative.", "max_tokens")
    if request.sampling.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {request.sampling.min_tokens}, more than max_tokens {max_tokens}.",
            "min_tokens",
        )
    if not 0 <= request.sampling.seed < 2**64:
        raise RequestError("seed must be an unsigned 64-bit number.", "seed")
    _sampling(request.sampling)
    _pooling(request)
    if not -1 <= request.adapter < adapters:
        message = f"adapter is {request.adapter}, but there are {adapters}."
        raise RequestError(message, "adapter")
    if len(prompt) + max_tokens > context:
        raise ContextError(
            f"This model's maximum context length is {context} tokens, but the prompt has "
            f"{len(prompt)} tokens and max_tokens is {max_tokens}. Shorten the prompt or lower "
            "max_tokens.",
            "prompt" if len(prompt) >= context else "max_tokens",
            len(prompt),
            max_tokens,
            context,
        )


def _pooling(request: Request) -> None:
    """Check that a request for an embedding asks for nothing else."""
    if request.pooling not in ("", *POOLINGS):
        known = " or ".join(POOLINGS)
        raise RequestError(f"pooling is {request.pooling!r}, but must be {known}.", "pooling")
    if request.pooling and (request.stopping.max_tokens or request.n != 1):
        raise RequestError("An embedding has no text: max_tokens must be 0 and n 1.", "pooling")


_WHOLE = ("top_k", "min_tokens", "seed", "logprobs", "prompt_logprobs")


def _types(request: Request) -> None:
    """Check that numbers are numbers and texts are texts: others would fail in the middle of a
    step.
    """
    values = {name: getattr(request.sampling, name) for name in _WHOLE}
    values |= {"max_tokens": request.stopping.max_tokens, "n": request.n}
    for name, value in values.items():
        if value is not None and not isinstance(value, Integral):
            raise RequestError(f"{name} is {value!r}, but must be a whole number.", name)
    for name in _RANGES:
        value = getattr(request.sampling, name)
        if not isinstance(value, Real):
            raise RequestError(f"{name} is {value!r}, but must be a number.", name)
    for text in request.stopping.stop:
        if not isinstance(text, str):
            raise RequestError(f"stop holds {text!r}, which is not a string.", "stop")


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "presence_penalty": (-1e6, 1e6),
    "accept_threshold_single": (0.0, 1.0),
    "accept_threshold_acc": (0.0, 1.0),
}


def _sampling(sampling: Sampling) -> None:
    """Check that every number is within its range. A server may allow less."""
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if not low <= value <= high:  # False for NaN.
            raise RequestError(f"{name} is {value}, but must be {low:g} to {high:g}.", name)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and value < 0:
            raise RequestError(f"{name} is {value}, but must not be negative.", name)
    if not all(math.isfinite(bias) for _, bias in sampling.logit_bias):
        raise RequestError("logit_bias holds a number that is not finite.", "logit_bias")


def _within(tokens: Sequence[int] | Ints, vocab: int, name: str) -> None:
    """Check that every id is in the vocabulary."""
    ids = np.asarray(tokens, np.int64)
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if len(wrong):
        raise RequestError(
            f"{name} has the token id {int(wrong[0])}, but ids are 0 to {vocab - 1}.", name
        )
