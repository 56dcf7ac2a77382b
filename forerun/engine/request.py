"""Requests and their validation, finish reasons, and the deltas that an engine sends back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import Any

import msgspec
import numpy as np

from forerun.engine.pooling import POOLINGS
from forerun.engine.trace import StepTrace
from forerun.errors import ContextError, RequestError
from forerun.interface.plan import TokenLogprobs
from forerun.speculative.sampling import Sampling
from forerun.types import Ints, RequestId

GRAMMAR_LIMIT = "grammar_limit"
"""Code of the error that ends a sequence whose grammar is too expensive to follow further."""


class Finish(StrEnum):
    """Why a sequence ended. Values are OpenAI's `finish_reason` where one exists."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Speculation:
    """A request's settings of speculation; None = the engine decides.

    max_nodes  most draft tokens per step
    max_depth  longest path of draft tokens
    trace      its deltas report every step
    """

    enabled: bool = True
    max_nodes: int | None = None
    max_depth: int | None = None
    trace: bool = False

    @property
    def bounded(self) -> bool:
        """Whether it limits the number of draft tokens."""
        return not self.enabled or self.max_nodes is not None or self.max_depth is not None


@dataclass(frozen=True, slots=True)
class Stopping:
    """The conditions that end a sequence.

    max_tokens      most output tokens
    stop            strings; the text ends before the first (or after it, with include_stop) that is
                    complete after min_tokens
    stop_tokens     ids, end-of-text ids included unless ignored; others only after min_tokens
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One request: a prompt and n sequences that continue it.

    prompt    int32[T], T >= 1
    sampling  of choice 0; choice i uses `choice_seed(sampling.seed, i)`
    grammar   a compiled grammar (forerun.constrain) or None
    skip_special_tokens  special tokens add no text
    continues_text  the answer continues a text: its first token is decoded as one within it
    prediction  int32[.] the expected output, for drafters: never changes the text
    cache_salt  cached prefixes are shared only among requests of the same salt, "" included
    client    clients share the prompt tokens of a step evenly
    tenant    n-grams of answers are counted, and used for drafts, per tenant and salt
    tenant_key  tenant and salt as 64 bits (EngineOptions.tenant_key)
    salt      cache_salt as bytes, different for each adapter; b"" = cache_salt alone
    adapter   number of the adapter that it runs with (EngineOptions.adapters); -1 = none
    pooling   one of engine.pooling.POOLINGS: an embedding of the prompt instead of text; "" = text
    """

    id: RequestId
    prompt: Ints
    sampling: Sampling
    stopping: Stopping
    n: int = 1
    speculation: Speculation = field(default_factory=Speculation)
    grammar: Any = None
    skip_special_tokens: bool = True
    continues_text: bool = False
    prediction: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    cache_salt: str = ""
    client: str = ""
    tenant: str = ""
    tenant_key: int = 0
    pooling: str = ""
    salt: bytes = b""
    adapter: int = -1


def choice_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of choice `index`. Choice 0 has the request's own, and all seeds of a
    request differ.
    """
    return (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counts over one finished sequence (vLLM's `metrics.speculative_decoding` derives from it).

    steps      verify steps that emitted tokens
    draft_tokens  nodes proposed
    accepted   draft tokens accepted
    histogram  histogram[a] = steps in which exactly `a` draft tokens were accepted
    reason     of the last step's budget, as text for users; "" if it had none
    predicted  (draft tokens from the request's prediction, how many of them were accepted)
    """

    steps: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()
    reason: str = ""
    predicted: tuple[int, int] = (0, 0)


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New output of one choice of one request, in order. The last has `finish` set.

    text             newly final text (never half a character, never part of a stop string)
    tokens           tokens whose text is final now, stop token included
    logprobs         one entry per token if requested, else empty
    prompt_logprobs  on the first delta if requested: one entry per prompt token after the first
    cached_tokens    prompt tokens that the prefix index supplied (first delta)
    error            message, with finish == ERROR
    trace            the steps that decided `tokens`, if requested; none beyond trace.MAX_STEPS
    code             kind of error, if the request itself caused it
    embedding        float32[H] as bytes, on the last delta of a request with pooling
    """

    request: RequestId
    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    stop_reason: str | int | None = None
    stats: SpeculationStats | None = None
    cached_tokens: int = 0
    error: str | None = None
    trace: tuple[StepTrace, ...] = ()
    code: str | None = None
    embedding: bytes = b""


Sink = Callable[[Delta], None]
"""Called on the engine's thread; must not block and must not raise."""


def validate(
    request: Request, vocab: int, context: int, max_choices: int, adapters: int = 0
) -> None:
    """Raise RequestError, naming the wrong field, if the engine cannot run `request`; ContextError
    if it is too long.

    vocab        V
    context      longest sequence, in tokens
    max_choices  largest n
    adapters     number of adapters
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
        both = f" and max_tokens is {max_tokens}. Shorten the prompt or lower max_tokens."
        raise ContextError(
            f"This model's maximum context length is {context} tokens, but the prompt has "
            f"{len(prompt)} tokens"
            + (both if len(prompt) < context else ", no room for an answer. Shorten it."),
            "prompt" if len(prompt) >= context else "max_tokens",
            len(prompt),
            max_tokens,
            context,
        )


def _pooling(request: Request) -> None:
    """Raise RequestError unless a request for an embedding is for one choice without text."""
    if request.pooling not in ("", *POOLINGS):
        known = " or ".join(POOLINGS)
        raise RequestError(f"pooling is {request.pooling!r}, but must be {known}.", "pooling")
    if request.pooling and (request.stopping.max_tokens or request.n != 1):
        raise RequestError("An embedding has no text: max_tokens must be 0 and n 1.", "pooling")


_WHOLE = ("top_k", "min_tokens", "seed", "logprobs", "prompt_logprobs")


def _types(request: Request) -> None:
    """Raise RequestError unless numbers are numbers and texts are texts: others would fail in the
    middle of a step.
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


MOST_BIAS = 1e9
"""Largest amount of a logit bias: float32 holds it divided by any temperature."""
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
    """Raise RequestError unless every number is within its range. A server may allow less."""
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if not low <= value <= high:  # False for NaN.
            raise RequestError(f"{name} is {value}, but must be {low:g} to {high:g}.", name)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and value < 0:
            raise RequestError(f"{name} is {value}, but must not be negative.", name)
    if not all(abs(bias) <= MOST_BIAS for _, bias in sampling.logit_bias):  # False for NaN.
        raise RequestError(f"logit_bias holds a number beyond +-{MOST_BIAS:g}.", "logit_bias")


def _within(tokens: Sequence[int] | Ints, vocab: int, name: str) -> None:
    """Raise RequestError unless every token id is in the vocabulary."""
    ids = np.asarray(tokens, np.int64)
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if len(wrong):
        raise RequestError(
            f"{name} has the token id {int(wrong[0])}, but ids are 0 to {vocab - 1}.", name
        )
