"""Requests, finish reasons, and the deltas that an engine sends back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from forerun.engine.trace import StepTrace
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

    trace  its deltas report every step
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
    """When a sequence ends.

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
    tenant    n-grams counted of answers draft only for the same tenant and salt
    tenant_key  both as 64 bits (EngineOptions.tenant_key)
    salt      the same as bytes, apart by adapter; b"" = cache_salt alone
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
    """Return the seed of choice `index`: choice 0 has the request's own; others are 64-bit
    distinct.
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


class Delta(msgspec.Struct, frozen=True):
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
