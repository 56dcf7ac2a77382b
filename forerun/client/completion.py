"""Running requests on an engine from synchronous Python code. The engine calls a request's sink on
its own thread; a queue carries the deltas to the caller.
"""

import itertools
import queue
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from forerun.constrain.matcher.matcher import CompiledGrammar
from forerun.engine.request import (
    Delta,
    Finish,
    Request,
    Sink,
    Speculation,
    SpeculationStats,
    Stopping,
)
from forerun.errors import EngineError, RequestError
from forerun.interface.plan import TokenLogprobs
from forerun.speculative.sampling import Sampling
from forerun.types import Ints, RequestId

POLL_SECONDS = 0.5
"""Seconds between two checks of a waiting caller that the engine is still alive."""


class Submits(Protocol):
    """The methods of an engine that a caller needs."""

    @property
    def alive(self) -> bool:
        """False once the engine's thread or process has ended: no more deltas will arrive."""
        ...

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its deltas are passed to `sink`, on the engine's thread. Raises
        RequestError if the request is invalid or not supported, EngineError if the engine has
        ended.
        """
        ...

    def abort(self, request: RequestId) -> None:
        """End a request early; its last delta follows. An unknown request is ignored."""
        ...


@dataclass(slots=True)
class Completion:
    """One finished choice: text, tokens, log-probabilities, finish reason and statistics."""

    index: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str | int | None = None
    stats: SpeculationStats | None = None
    cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        """Append one delta of this choice. Raises EngineError if the delta reports that the engine
        ended the request with an error.
        """
        self.take(delta)
        if delta.finish == Finish.ERROR:
            raise EngineError(delta.error or "the engine ended the request with an error")

    def take(self, delta: Delta) -> None:
        """Append one delta of this choice, whatever its finish reason."""
        self.text += delta.text
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        self.cached_tokens += delta.cached_tokens
        if delta.finish is not None:
            self.finish, self.stop_reason, self.stats = (
                delta.finish,
                delta.stop_reason,
                delta.stats,
            )


_names = itertools.count()
_SAMPLING = {item.name for item in fields(Sampling)} - {"stop_tokens"}
_STOPPING = {"max_tokens", "stop", "stop_token_ids", "include_stop"}


def make_request(
    prompt: Ints,
    eos: Sequence[int] = (),
    *,
    max_tokens: int = 128,
    n: int = 1,
    ignore_eos: bool = False,
    speculation: Speculation | None = None,
    grammar: CompiledGrammar | None = None,
    **options: Any,
) -> Request:
    """Return a request from keyword options: the fields of `Sampling`, plus stop, stop_token_ids
    and include_stop.

    prompt       int32[T], not empty
    eos          end-of-text ids of the model, left out with ignore_eos
    speculation  None = as the engine is configured, with statistics
    options      temperature is 0 (greedy) unless given

    Values are not checked here. Raises RequestError naming an option that does not exist, and for
    an empty prompt.
    """
    unknown = set(options) - _SAMPLING - _STOPPING
    if unknown:
        name = min(unknown)
        raise RequestError(f"There is no sampling option {name!r}.", name)
    if len(prompt) == 0:
        raise RequestError("The prompt is empty; give at least one token.", "prompt")
    ends = () if ignore_eos else eos
    stop_tokens = tuple(dict.fromkeys((*ends, *options.get("stop_token_ids", ()))))
    chosen = {"temperature": 0.0} | {key: options[key] for key in options if key in _SAMPLING}
    stop = options.get("stop") or ()
    return Request(
        id=RequestId(f"local-{next(_names)}"),
        prompt=np.asarray(prompt, np.int32),
        sampling=Sampling(stop_tokens=stop_tokens, **chosen),
        stopping=Stopping(
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_tokens=stop_tokens,
            include_stop=bool(options.get("include_stop", False)),
        ),
        n=n,
        speculation=speculation or Speculation(),
        grammar=grammar,
    )


def stream(engine: Submits, request: Request) -> Generator[Delta]:
    """Submit a request and yield the deltas of all choices as they arrive; blocks between them.
    Closing the iterator early aborts the request. Raises RequestError if the engine refuses it,
    EngineError if the engine has ended.
    """
    inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    engine.submit(request, inbox.put)
    left = request.n
    try:
        while left:
            delta = _take(engine, inbox)
            left -= delta.finish is not None
            yield delta
    finally:
        if left:
            engine.abort(request.id)


def complete(
    engine: Submits,
    requests: Sequence[Request],
    at_once: int | None = None,
    finished: Callable[[int], None] = lambda _: None,
) -> list[list[Completion]]:
    """Run requests together and wait for all. Returns one list of n completions per request, in
    order.

    at_once   the most requests in flight; the next starts when one ends. None = all
    finished  called with the number of requests that have ended

    Raises RequestError if the engine refuses one, EngineError if it fails one or has ended; the
    others are aborted.
    """
    inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    results: dict[RequestId, list[Completion]] = {}
    open_choices: dict[RequestId, int] = {}
    waiting = list(reversed(requests))
    try:
        while waiting or open_choices:
            while waiting and (at_once is None or len(open_choices) < at_once):
                request = waiting.pop()
                engine.submit(request, inbox.put)
                open_choices[request.id] = request.n
                results[request.id] = [Completion(index) for index in range(request.n)]
            delta = _take(engine, inbox)
            results[delta.request][delta.index].add(delta)
            if delta.finish is not None:
                open_choices[delta.request] -= 1
            if not open_choices[delta.request]:
                del open_choices[delta.request]
                finished(len(requests) - len(waiting) - len(open_choices))
    finally:
        for name in open_choices:
            engine.abort(name)
    return [results[request.id] for request in requests]


def _take(engine: Submits, inbox: "queue.SimpleQueue[Delta]") -> Delta:
    """Return the next delta. Raises EngineError if the engine ended without sending one."""
    while True:
        try:
            return inbox.get(timeout=POLL_SECONDS)
        except queue.Empty:
            if not engine.alive:
                raise EngineError("the engine's thread has died; see its log") from None


def acceptance_length(stats: Sequence[SpeculationStats | None]) -> float:
    """Return the mean number of tokens per verify step over finished sequences, ignoring those
    without statistics; 1.0 if no draft token was accepted or there was no step.
    """
    steps = sum(item.steps for item in stats if item)
    accepted = sum(item.accepted for item in stats if item)
    return (steps + accepted) / steps if steps else 1.0
