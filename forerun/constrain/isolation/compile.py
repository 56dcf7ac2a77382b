"""Compiles grammars: first in a process that can be killed, then in this one; caches the
results.
"""

import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from forerun.constrain.grammar import Grammar, Kind, Start
from forerun.constrain.isolation.fair_queue import FairQueue
from forerun.constrain.isolation.remote_matcher import RemoteMatcher, RemoteMatchers
from forerun.constrain.matcher.automaton import Automaton, FreeText
from forerun.constrain.matcher.limits import SECONDS
from forerun.constrain.matcher.llguidance_backend import Guidance
from forerun.constrain.matcher.matcher import CompiledGrammar, Translated
from forerun.constrain.matcher.start_marker import MarkerTokens
from forerun.errors import BusyError, ModelError, RequestError, WorkerError
from forerun.sandbox import Fault, SandboxProcess
from forerun.text.tokenizer import Tokenizer

MAX_WAITING = 64
"""Grammars that may wait for the compiling processes; further ones raise BusyError."""

QUICK_SECONDS = 0.25
"""Processor time that a grammar may take in the first of two compiling processes. One that takes
longer starts again in the second, so it delays small ones for no longer than that.
"""

QUICK_BYTES = 16 * 1024
"""Larger sources go directly to the second process."""

MAX_MARKERS = 8
"""Most start texts whose token spellings are cached."""

COMMAND = (sys.executable, "-m", "forerun.constrain.isolation.llguidance_worker")
"""Command that starts a compiling process."""

_Key = tuple[str, str, bool, bool]

_ENTRY_BYTES = 1024
_ANY_TEXT = Translated("", lambda _: FreeText(), expensive=False)


class Compiler:
    """Compiles grammars for one tokenizer. Safe to share between threads; cheap until first used.

    cache_bytes  size of the cache of compiled grammars; the least recently used are dropped first

    A grammar that takes more than SECONDS of processor time is rejected.
    """

    def __init__(self, tokenizer: Tokenizer, cache_bytes: int = 128 << 20) -> None:
        if not tokenizer.eos_ids:
            raise ModelError("the model declares no end-of-text token; a grammar could not end")
        self._tokenizer = tokenizer
        self._library = Guidance(tokenizer)
        self._matchers = RemoteMatchers(tokenizer)
        self._lanes = [
            _Lane(SandboxProcess(COMMAND, limit), FairQueue()) for limit in (QUICK_SECONDS, SECONDS)
        ]
        self._cache = _Cache(cache_bytes)
        self._markers: dict[Start, MarkerTokens] = {}
        self._lock = threading.Lock()
        self._waiting = threading.Semaphore(MAX_WAITING)

    def compile(self, grammar: Grammar, client: str = "") -> CompiledGrammar:
        """Return a grammar ready to run, from the cache or compiled in another process first.

        Blocks up to some seconds; do not call it on the engine's thread.

        client  whose request it is: among waiting clients the one with the least use comes first
                ("" = one client)

        Raises RequestError naming the field and, if known, the place of the fault; BusyError if
        MAX_WAITING wait already; WorkerError if the compiling process was ended or stopped from
        outside.
        """
        if grammar.kind is Kind.FREE:
            return self._compiled(grammar, _ANY_TEXT, FreeText())
        key = (grammar.kind, grammar.source, grammar.lenient, grammar.one_line)
        with self._lock:
            found = self._cache.get(key)
        if found is None:
            found = self._compile_queued(key, grammar, client)
        beginning: Automaton | str | None = None
        if isinstance(found, Translated):
            beginning = self._begin(found)
        if isinstance(found, str) or isinstance(beginning, str):
            reason = found if isinstance(found, str) else str(beginning)
            raise RequestError(self._library.explained(grammar, reason), grammar.field)
        return self._compiled(grammar, found, beginning)

    def _compiled(
        self, grammar: Grammar, found: Translated, beginning: Automaton | None
    ) -> CompiledGrammar:
        start, budget = grammar.start, grammar.budget
        call = None
        if start is not None and budget is not None and budget.call:
            call = self._marker(replace(start, text=budget.call))
        return CompiledGrammar(
            prototype=beginning,
            start=None if start is None else self._marker(start),
            vocab=self._tokenizer.vocab_size,
            ends=self._tokenizer.eos_ids,
            translated=found,
            remote=partial(RemoteMatcher, self._matchers, found.text),
            unenforced=tuple(_named(grammar, path) for path in found.unenforced),
            budget=budget,
            call=call,
        )

    def _marker(self, start: Start) -> MarkerTokens:
        """Return how this tokenizer spells a start text; cached, since a server has one or two of
        them.
        """
        marker = self._markers.get(start)
        if marker is None:
            marker = MarkerTokens(start, self._tokenizer)
            if len(self._markers) < MAX_MARKERS:
                self._markers[start] = marker
        return marker

    def close(self) -> None:
        """Wait for running compilations, and end the compiling processes."""
        for lane in self._lanes:
            with lane.queue.place("", 0.0):
                lane.worker.close()

    def _compile_queued(self, key: _Key, grammar: Grammar, client: str) -> Translated | str:
        """Compile, unless another request for the same grammar has filled the cache meanwhile."""
        if not self._waiting.acquire(blocking=False):
            raise BusyError("Too many grammars are being compiled; try again later.")
        size = len(grammar.source)
        try:
            for lane in self._lanes[len(self._lanes) - 1 if size > QUICK_BYTES else 0 :]:
                with lane.queue.place(client, size / QUICK_BYTES * QUICK_SECONDS):
                    with self._lock:
                        cached = self._cache.get(key)
                    if cached is not None:
                        return cached
                    answer = self._ask(lane.worker, grammar)
                    if answer is None:  # It takes too long for this one, or its process was ended.
                        continue
                    return self._remember(key, grammar, answer, lane.worker)
            worker = self._lanes[-1].worker
            return self._remember(key, grammar, None, worker)
        finally:
            self._waiting.release()

    def _ask(self, worker: SandboxProcess, grammar: Grammar) -> dict[str, Any] | None:
        names = ("kind", "source", "lenient", "one_line")
        return worker.ask({name: getattr(grammar, name) for name in names})

    def _remember(
        self,
        key: _Key,
        grammar: Grammar,
        answer: dict[str, Any] | None,
        worker: SandboxProcess,
    ) -> Translated | str:
        """Cache the result if it would be the same the next time."""
        if answer is None:
            fault = worker.fault or Fault.DIED
            message = f"{grammar.field} cannot be compiled: {fault.words(worker.seconds)}"
            if fault.ours:
                raise WorkerError(f"{message}; try again later.")
            raise RequestError(message, grammar.field)
        result: Translated | str
        if "error" in answer:
            result = str(answer["error"])
        else:
            text = str(answer["grammar"])
            left_out = tuple(answer.get("unenforced", ()))
            begin = self._library.build(text)
            result = Translated(text, begin, bool(answer.get("expensive")), left_out)
        size = len(result.text if isinstance(result, Translated) else result)
        with self._lock:
            self._cache.put(key, result, size + len(grammar.source) + _ENTRY_BYTES)
        return result

    def _begin(self, translated: Translated) -> Automaton | str | None:
        """Return a new automaton for one request; None if it has to be matched in another process;
        a string says why there is none.
        """
        if translated.expensive:
            return None
        beginning = translated.begin(False)
        if not isinstance(beginning, str):
            return beginning
        # Too expensive for the engine's thread, or invalid?
        beginning = translated.begin(True)
        if isinstance(beginning, str):
            return beginning
        translated.expensive = True
        return None


def open_compiler(tokenizer: Tokenizer) -> Compiler | None:
    """Return a compiler for the tokenizer; None if that declares no end-of-text token, so that no
    constrained text could end.
    """
    return Compiler(tokenizer) if tokenizer.eos_ids else None


@dataclass(frozen=True, slots=True)
class _Lane:
    """A compiling process and its queue."""

    worker: SandboxProcess
    queue: FairQueue


def _named(grammar: Grammar, path: str) -> str:
    """Return a path in a schema as a path in the request; those of other grammars are paths there
    already.
    """
    return f"{grammar.field}.{path}" if grammar.kind is Kind.JSON_SCHEMA else path


class _Cache:
    """A cache of least recently used values, bounded in bytes. Not locked."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._values: OrderedDict[_Key, tuple[Translated | str, int]] = OrderedDict()

    def get(self, key: _Key) -> Translated | str | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: _Key, value: Translated | str, size: int) -> None:
        _, before = self._values.pop(key, ("", 0))  # Both lanes may have compiled it.
        self._values[key] = (value, size)
        self._used += size - before
        while self._used > self._limit and len(self._values) > 1:
            _, (_, freed) = self._values.popitem(last=False)
            self._used -= freed
