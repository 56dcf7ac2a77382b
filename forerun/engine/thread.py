"""The engine: a thread with an inbox, its limits, and its methods for other threads."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import count
from os import urandom
from typing import Any

from forerun.cache.store import PageStore
from forerun.control.policy import Policy
from forerun.engine.adapter_counts import AdapterCounters
from forerun.engine.core import EngineCore, EngineLoop
from forerun.engine.disk_pages import LEAST_TOKENS, DiskPages
from forerun.engine.disk_states import DiskRecords
from forerun.engine.learning import Learning, Learnt
from forerun.engine.overlap import make_core
from forerun.engine.parts import GuardedDrafter, Parts
from forerun.engine.request import Finish, Request, Sink, validate
from forerun.engine.row_output import Ending
from forerun.engine.sequence import Sequence
from forerun.engine.stats import Stats, snapshot
from forerun.errors import BusyError, EngineError, RankError, RequestError
from forerun.interface.drafter import Drafter
from forerun.interface.executor import Executor
from forerun.interface.grammars import Grammars, NoGrammars
from forerun.options.config import MAX_CHOICES
from forerun.text.stream import TextStream
from forerun.text.tokenizer import Tokenizer
from forerun.types import RequestId

GIVE_UP_SECONDS = 1.0
"""Seconds that a step may still take to end after a rank was lost."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits of the engine itself.

    max_waiting   most sequences that wait for a slot; further requests are rejected
    max_choices   largest n of a request
    max_failures  consecutive failed steps after which the engine gives up
    overlap       begin the next step before this one is finished, or before its outputs are
                  reported (overlap.py), if the executor can
    accept_threshold_single, accept_threshold_acc
                  defaults for requests (speculative/thresholds.py); 1 = lossless
    adapters      (name, 16 bytes that identify its weights) of each of the executor's adapters
    secret        key of the hash in `tenant_key`
    """

    max_waiting: int = 1024
    max_choices: int = MAX_CHOICES
    max_failures: int = 3
    overlap: bool = False
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
    adapters: tuple[tuple[str, bytes], ...] = ()
    secret: bytes = field(default_factory=lambda: urandom(16), repr=False)

    def tenant_key(self, request: Request) -> int:
        """Return SlotInit.tenant of a request: 0 without tenant and salt, else 64 bits that a
        client cannot predict, so that no text can be made to collide with another tenant's.
        """
        if not request.tenant and not request.cache_salt:
            return 0
        name = f"{len(request.tenant)}:{request.tenant}{request.cache_salt}".encode()
        return int.from_bytes(blake2b(name, key=self.secret, digest_size=8).digest(), "little")

    def salt(self, request: Request) -> bytes:
        """Return the salt of a request's cached prefixes: its cache_salt, and its adapter's bytes
        if it has one. The byte before these begins no client's text, so the two cannot collide.
        """
        own = request.cache_salt.encode()
        return own if request.adapter < 0 else b"\xff" + self.adapters[request.adapter][1] + own

    def on(self, request: Request) -> Request:
        """Return the request with the engine's default accept thresholds where it sets none."""
        sampling = request.sampling
        single, acc = sampling.accept_threshold_single, sampling.accept_threshold_acc
        filled = replace(
            sampling,
            accept_threshold_single=self.accept_threshold_single if single is None else single,
            accept_threshold_acc=self.accept_threshold_acc if acc is None else acc,
        )
        return replace(request, sampling=filled)


class Engine(EngineLoop):
    """Runs requests on one executor.

    `submit`, `abort`, `drain`, `shutdown`, `stats`, `describe` and `alive` may be used from any
    thread; everything else happens on the engine's own thread, which `start` starts. Without
    `start`, the thread that calls `step_once` takes its place.

    fault       why speculation is off from the start although it was requested; None = it is on
    """

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter,
        policy: Policy,
        tokenizer: Tokenizer,
        grammars: Grammars,
        options: EngineOptions,
        fault: str | None = None,
    ) -> None:
        guarded = GuardedDrafter(drafter, policy, fault)
        self._parts = Parts(executor, guarded, policy, tokenizer, grammars)
        self._options = options
        super().__init__(make_core(self._parts, options.overlap, options.max_failures, self._ended))
        self._orders = count()
        self._adapters = AdapterCounters()
        self._learning: Learning | None = None
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether the engine runs requests: False after it gave up or was shut down."""
        ended = self._broken is not None or self._stopping
        return not ended and (self._thread is None or self._thread.is_alive())

    @property
    def fault(self) -> str | None:
        """Why speculation is off although it was requested, as text for users; None if it is on."""
        return self._parts.drafter.fault

    @property
    def context(self) -> int:
        """The longest sequence, prompt and output, in tokens."""
        return self._core.scheduler.context

    @property
    def lookahead(self) -> int:
        """PrefixIndex.lookahead of its pages."""
        return self._core.scheduler.index.lookahead

    def start(self) -> None:
        """Start the engine's own thread. Raises EngineError the second time."""
        if self._thread is not None:
            raise EngineError("the engine was started already; two threads would share its slots")
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. `sink` receives its deltas on the engine's thread; the last one of each
        choice has `finish`.

        Raises RequestError (ContextError, BusyError) if the request cannot be run, EngineError if
        the engine has ended; nothing was allocated then.
        """
        limits, options = self._parts.executor.limits, self._options
        request = options.on(request)
        validate(request, limits.vocab, self.context, options.max_choices, len(options.adapters))
        key = options.tenant_key(request)
        request = replace(request, salt=options.salt(request), tenant_key=key)
        if request.adapter >= 0:
            sink = self._adapters.counting(options.adapters[request.adapter][0], sink)
        if request.grammar is not None and isinstance(self._parts.grammars, NoGrammars):
            raise RequestError("This engine was started without structured output.", "grammar")
        with self._changed:
            self._refuse(request)
            order = next(self._orders)
            sequences = [
                Sequence((order, index), request, sink, self._stream(request))
                for index in range(request.n)
            ]
            self._ids.add(request.id)
            self._entering += request.n
            self._inbox.append(partial(self._enter, sequences))
            self._changed.notify_all()

    def attach_store(
        self, store: PageStore, least: int = LEAST_TOKENS, beside: DiskRecords | None = None
    ) -> None:
        """Read and write full pages in `store`, and records that texts need besides them in that of
        `beside`; the engine closes both. Call it before `start`. AssertionError unless the executor
        has `pages`, or without `beside` if it has `state_contents` or `window_contents`.

        least: see DiskPages.
        """
        scheduler, executor = self._core.scheduler, self._parts.executor
        assert executor.pages is not None
        contents = executor.state_contents, executor.window_contents
        assert (beside is None) == (contents == (None, None))
        scheduler.disk = DiskPages(
            store,
            executor.pages,
            scheduler.index,
            scheduler.pace,
            scheduler.running,
            lambda order: self.run_in_engine(lambda core: order()),
            least=least,
            beside=beside,
        )

    def attach_learning(self, learnt: Learnt, secret: bytes) -> None:
        """Save what is learned from now on. Call it before `start`.

        secret  replaces EngineOptions.secret: engines with the same one find each other's tenants
        """
        self._options = replace(self._options, secret=secret)
        self._learning = Learning(learnt, lambda order: self.run_in_engine(lambda core: order()))

    def on_step_done(self, callback: Callable[[], None]) -> None:
        """Set a callback for the engine's thread to call after the sinks have received the deltas
        of a step.
        """
        self._step_done = callback

    def abort(self, request: RequestId) -> None:
        """End a request before the next step; its choices finish with ABORT. Ignores an unknown
        id.
        """
        with self._changed:
            if request in self._ids:
                self._inbox.append(partial(self._core.outputs.end, request, Ending(Finish.ABORT)))
                self._changed.notify_all()

    def run_in_engine(self, callback: Callable[[EngineCore], None]) -> None:
        """Call `callback` on the engine's thread before its next step."""
        with self._changed:
            self._inbox.append(partial(callback, self._core))

    def forget_prefixes(self) -> None:
        """Evict, before the next step, all cached pages that no running sequence holds."""

        def forget(core: EngineCore) -> None:
            index = core.scheduler.index
            for page in index.take(index.available) or ():
                index.release(page)

        self.run_in_engine(forget)

    def fail(self, message: str) -> None:
        """End all requests with an error and accept no more: the executor can run no step. If the
        engine's own thread hangs for GIVE_UP_SECONDS, the callback of `on_rank_lost` is called
        instead, which has to end the requests.
        """

        def give_up(core: EngineCore) -> None:
            if self._broken is None:
                raise RankError(message)

        self.run_in_engine(give_up)
        with self._changed:
            self._changed.notify_all()
            if self._thread in (None, threading.current_thread()):
                return  # This thread's next step, or the one that it is in, gives up.
            ended = self._changed.wait_for(lambda: self._broken is not None, GIVE_UP_SECONDS)
        if not ended:
            self._lost(message)

    def on_rank_lost(self, lost: Callable[[str], None]) -> None:
        """Set a callback, called with a sentence when a process that shares the model has ended: on
        the engine's thread after every sink was notified, or on another one if that thread hangs.
        """
        self._lost = lost

    def drain(self, timeout: float) -> bool:
        """Reject new requests and wait for the others, at most `timeout` seconds. Returns True if
        all have ended.
        """
        with self._changed:
            self._draining = True
            # A sequence that ends in the current step is reported when that step ends.
            return self._changed.wait_for(
                lambda: not self._ids and self.step_began is None, timeout
            )

    def shutdown(self) -> None:
        """Abort all running requests and end the thread. Idempotent. The executor's slots are
        closed; the executor itself belongs to its creator.
        """
        with self._changed:
            self._draining = self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            self._stop()
        if (disk := self._core.scheduler.disk) is not None:
            disk.close(self._take_inbox, flush=self._broken is None)
        if self._learning is not None:
            self._learning.close(flush=self._broken is None)

    def stats(self) -> Stats:
        """Return a snapshot of the counters."""
        scheduler = self._core.scheduler
        store = None if scheduler.disk is None else scheduler.disk.stats()
        load = scheduler.load(self._entering)
        return snapshot(self._core.metrics, load, store, self._adapters.counts())

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: drafter and policy."""
        parts = self._parts
        learning = {"kept": self._learning.describe()} if self._learning is not None else {}
        return {
            "drafter": parts.drafter.describe(),
            "speculation": parts.policy.describe(),
        } | learning

    def check(self) -> None:
        """Raise AssertionError if a page, slot or sequence leaked. Call it on the engine's thread,
        or while that is idle.
        """
        self._core.check()

    def _refuse(self, request: Request) -> None:
        """Raise an error if the engine accepts no requests, or not this one."""
        if self._broken is not None:
            raise EngineError(self._broken)
        if self._stopping:
            raise EngineError("The engine was shut down; it takes no more requests.")
        if self._draining:
            raise BusyError("The engine is shutting down; it takes no more requests.")
        if request.id in self._ids:
            raise RequestError(f"A request with the id {request.id!r} is running.", "id")
        waiting = self._entering + len(self._core.scheduler.waiting)
        if waiting >= self._options.max_waiting:
            raise BusyError(f"{waiting} sequences are waiting already; try again later.")

    def _stream(self, request: Request) -> TextStream:
        stopping = request.stopping
        return TextStream(
            self._parts.tokenizer,
            stopping.stop,
            stopping.include_stop,
            request.skip_special_tokens,
            request.prompt if request.continues_text else (),
        )
