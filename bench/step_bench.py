"""Steps of any executor, timed: R rows of chains of k nodes behind cached tokens."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from forerun.build.memory import CHECKPOINTS
from forerun.drafts.eagle_config import expected_draft_tensors, head_for
from forerun.drafts.eagle_folder import DraftFile
from forerun.interface.draft_model import DraftModel
from forerun.interface.executor import Executor, ExecutorLimits
from forerun.interface.next_draft import OnDeviceDraftSpec
from forerun.interface.plan import Plan, Round
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.networks.arch import Architecture
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, TreeBatch, batch
from forerun.types import Floats, Ints

PAGE = 16
GREEDY = Sampling(temperature=0.0)
WARM_UP = 3
"""Calls that are not counted; the second of a new size is the one that captures."""


def limits_for(arch: Architecture, rows: int, nodes: int, context: int) -> ExecutorLimits:
    """Return ExecutorLimits for a StepBench of `rows` sequences of such a model with `context`
    cached tokens and chains of at most `nodes` nodes.
    """
    pages = -(-(context + nodes) // PAGE)
    return ExecutorLimits(
        page_size=PAGE,
        pages=pages * rows,
        slots=rows,
        max_nodes=max(rows * nodes, context),
        context=min(arch.context, pages * PAGE),
        vocab=arch.vocab,
        max_scored=rows * nodes,
        checkpoints=CHECKPOINTS * rows if arch.recurrent_layers else 0,
    )


class _RandomDraft(DraftFile):
    __slots__ = ()

    def tensor(self, name: str) -> Floats:
        """Return a tensor of random numbers; norms are ones."""
        shape = expected_draft_tensors(self.head)[name]
        if len(shape) == 1:
            return np.full(shape, 0.0 if name.endswith(".bias") else 1.0, np.float32)
        return np.resize(
            np.random.default_rng(1).normal(0, 0.02, 1 << 20).astype(np.float32), shape
        )


def random_draft(target: Architecture, vocab: int) -> DraftFile:
    """Return an EAGLE-3 draft of random numbers for `target`, with an output head of `vocab`
    tokens. Raises ModelError if the target has too few layers.
    """
    head = replace(head_for(target, vocab), trained_head=True)
    return _RandomDraft(Path("random"), head, np.arange(vocab, dtype=np.int32), (), {})


class StepBench:
    """Sequences of random tokens, one for every slot of an executor, of which `context` tokens are
    cached, and steps that begin there. A step may be repeated: what it writes lies behind the
    cached tokens, and `rewind` makes the sequences what they were; recurrent states too, from the
    checkpoint at the last end of a page.

    executor  built for `limits_for`, with every slot closed; the bench opens all of them
    head      a draft model added to the executor, if any
    wait      returns when the device has done everything
    clock     seconds; the wall's, or the process's own where others share the machine
    """

    def __init__(
        self,
        executor: Executor,
        context: int,
        head: DraftModel | None = None,
        wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        limits = executor.limits
        self.executor, self._context, self._head = executor, context, head
        self._timed = partial(milliseconds, wait=wait, clock=clock)
        self._rows, self._pages = limits.slots, limits.pages // limits.slots
        random = np.random.default_rng(0)
        longest = self._pages * limits.page_size
        self._tokens = random.integers(0, limits.vocab, longest).astype(np.int32)
        self._sampling = GREEDY
        self._begun: Round | None = None
        self.fill()

    def fill(self, sampling: Sampling | None = None) -> float:
        """Cache every sequence's `context` tokens anew, and sample by `sampling` (None = as before)
        from now on. Returns the milliseconds of the last sequence's step.
        """
        self._sampling, took = sampling or self._sampling, 0.0
        self._finish()
        for row in range(self._rows):
            (took,) = self._timed(partial(self._fill, row, self._context), 1, warm_up=0)
        self.rewind()
        return took

    def rewind(self) -> None:
        """Finish what `forward` began, and reopen every slot with its cached tokens and the one
        behind them.
        """
        self._finish()
        for row in range(self._rows):
            behind = self.executor.reusable_prefix_len(self._tokens[: self._context])
            self._reopen(row, behind)
            if behind < self._context:
                self._run(*self._plan([row], behind, self._tokens[behind : self._context], 0))

    def times(self, work: Callable[[], object], count: int, warm_up: int = WARM_UP) -> list[float]:
        """Return the milliseconds of each of `count` calls of `work`, after `warm_up` more;
        sequences are rewound before each, untimed.
        """
        return self._timed(work, count, before=self.rewind, warm_up=warm_up)

    def median(self, work: Callable[[], object], count: int) -> float:
        """Return the median of `times`, milliseconds."""
        return median(self.times(work, count))

    def step(self, rows: int, nodes: int) -> Callable[[], Round]:
        """Return a callable that runs one step of `rows` sequences, each a chain of `nodes` nodes,
        whose draft tokens are random and so mostly rejected, and returns its finished Round.
        """
        return partial(self._run, *self._decoding(rows, nodes))

    def forward(self, rows: int, nodes: int) -> Callable[[], None]:
        """Return a callable that begins the step of `step` and leaves it to `rewind` to finish it:
        for an executor that does everything in `begin` this is the forward pass without choosing.
        """
        plan, trees = self._decoding(rows, nodes)

        def begin() -> None:
            self._begun = self.executor.begin(plan, trees)

        return begin

    def prompt(self, tokens: int) -> Callable[[], Round]:
        """Return a callable that opens the first sequence anew, without cached tokens, and runs a
        chunk of `tokens` prompt tokens, at most the context.
        """
        return partial(self._fill, 0, tokens)

    def drafted(self, rows: int, nodes: int, levels: int) -> Callable[[], Round] | None:
        """Return a callable as of `step` whose step also extends the head and grows a chain of
        `levels` draft tokens within it; None without a head, or if the executor's steps do not
        draft. Runs one step to see that.
        """
        if self._head is None:
            return None
        plan, trees = self._decoding(
            rows, nodes, OnDeviceDraftSpec(np.arange(rows, dtype=np.int32), 1, levels)
        )
        work = partial(self._run, plan, trees)
        self.rewind()
        return work if len(work().drafting) else None

    def _fill(self, row: int, tokens: int) -> Round:
        self._reopen(row, 0)
        return self._run(*self._plan([row], 0, self._tokens[:tokens], 0))

    def _reopen(self, row: int, cached: int) -> None:
        """Open the slot's sequence anew, with a prompt of `cached` tokens, behind all of them."""
        self.executor.close(row)
        text = TokenText(self._tokens[: self._context + 1])
        self.executor.open(SlotInit(row, text, self._context, self._sampling, cached=cached))

    def _finish(self) -> None:
        if self._begun is not None:
            self.executor.finish(self._begun)
            self._begun = None

    def _run(self, plan: Plan, trees: TreeBatch) -> Round:
        round = self.executor.begin(plan, trees)
        self.executor.finish(round)
        return round

    def _decoding(
        self, rows: int, nodes: int, request: OnDeviceDraftSpec | None = None
    ) -> tuple[Plan, TreeBatch]:
        known = self._tokens[self._context : self._context + 1]
        return self._plan(list(range(rows)), self._context, known, nodes - 1, request)

    def _plan(
        self,
        rows: list[int],
        kv_len: int,
        known: Ints,
        draft_tokens: int,
        request: OnDeviceDraftSpec | None = None,
    ) -> tuple[Plan, TreeBatch]:
        parents = np.arange(-1, draft_tokens - 1, dtype=np.int32)
        draft, slots = Draft(self._tokens[:draft_tokens].copy(), parents), np.array(rows, np.int32)
        plan = Plan(
            slots=slots,
            kv_len=np.full(len(rows), kv_len, np.int32),
            known=(known,) * len(rows),
            samples=np.full(len(rows), kv_len == self._context),
            max_nodes=np.full(len(rows), draft_tokens, np.int32),
            max_depth=np.full(len(rows), draft_tokens, np.int32),
            page_table=self._page_table(slots),
            constrained=np.zeros(len(rows), np.bool_),
            on_device_draft=request,
        )
        return plan, batch([known] * len(rows), [draft] * len(rows))

    def _page_table(self, slots: Ints) -> Ints:
        return (slots[:, None] * self._pages + np.arange(self._pages)).astype(np.int32)


def milliseconds(
    work: Callable[[], object],
    count: int,
    wait: Callable[[], None] = lambda: None,
    before: Callable[[], None] = lambda: None,
    warm_up: int = WARM_UP,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the milliseconds of each of `count` calls of `work`, after `warm_up` more that are not
    counted.

    wait    returns when the device has done everything; called before and after each
    before  called ahead of each, untimed
    clock   seconds
    """
    taken = []
    for _ in range(count + warm_up):
        before()
        wait()
        start = clock()
        work()
        wait()
        taken.append((clock() - start) * 1e3)
    return taken[warm_up:]
