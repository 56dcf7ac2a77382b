"""TorchExecutor: the Executor interface in torch, and its captured rounds, steps that are replayed
as one CUDA graph if the device supports capture.

A step in which every row samples and begins with exactly one known token runs as one round
(captured/runner.py), padded to one of the sizes that were declared and captured before the first
request (declared.py); the host waits only when its record is read (round.py). Every other step,
such as a prompt's, is eager (eager.py). Sampling parameters, masks and log-probabilities are
handled within a round (shaped_rows.py). Rows that the device cannot decide are decided and
committed from its logits, as in any other step.

Another round may begin before the record of this one is read (`begin_after`): on the device it
continues from the state that this one leaves there (FutureState).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch

from forerun.executors.device_choice import device_nodes
from forerun.executors.host_choice import history_of, reports_of
from forerun.executors.host_sampler import HostSampler
from forerun.executors.torch.captured.graphs import recorder
from forerun.executors.torch.captured.round import (
    CapturedRound,
    Reserved,
    StagingBuffer,
    TableEntries,
    check_pages,
    prepare_inputs,
    prepare_inputs_carried,
)
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.captured.shaped_rows import ShapedRows
from forerun.executors.torch.captured.warm_up import runner_of
from forerun.executors.torch.eager import EagerSteps
from forerun.executors.torch.features import TorchStepFeatures
from forerun.executors.torch.model_runner import ModelRunner
from forerun.executors.torch.sizes import Size
from forerun.interface.executor import Capabilities
from forerun.interface.next_draft import OnDeviceDraftSpec
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.sampling import History, Sampling
from forerun.speculative.tree import NodeMasks, TreeBatch, full_size
from forerun.types import Bools, Floats, Ints

MOST_NODES = 64
"""The most nodes of a row in a round."""


class CapturedRounds:
    """The captured rounds of one executor.

    target  has the weights, cache and states; if ranks share it, rounds support temperature only
    runner  the program and its tensors
    last    the last round begun
    """

    def __init__(self, target: ModelRunner, sampler: HostSampler, runner: CudaGraphRunner) -> None:
        self._target, self._sampler, self.runner = target, sampler, runner
        limits = target.limits
        self._scored = limits.scored_nodes
        self._shaped = ShapedRows(limits.slots, limits.vocab, target.device, sampler.choosing)
        runner.shaped = self._shaped
        self.last: CapturedRound | None = None
        # Rounds so far, and the seconds from their launches to their results: the rest of a step's
        # time is the host's.
        self._rounds, self._seconds, self._read = 0, 0.0, 0.0

    def open(self, slot_init: SlotInit) -> None:
        """Store the sampling parameters of a slot's new sequence."""
        self._shaped.open(slot_init)

    def size_of(self, plan: Plan, trees: TreeBatch, masked: bool = False) -> Size | None:
        """Return the declared size that the step runs as, with the requested drafting if it fits;
        None if it cannot run as a round.
        """
        if not (trees.known == 1).all() or not plan.samples.all():
            return None
        if self._target.group is not None and plan.constrained.any():
            return None  # The host needs whole rows of logits.
        return self._size(plan.slots, int(np.diff(trees.start).max()), plan.on_device_draft, masked)

    def _size(
        self,
        slots: Ints,
        nodes: int,
        on_device_draft: OnDeviceDraftSpec | None,
        masked: bool = False,
    ) -> Size | None:
        """Return the declared size of a round of `slots`, each row with `nodes` nodes; None if the
        round must run eagerly.
        """
        runner, drafting = self.runner, self.runner.drafting
        size = Size(len(slots), nodes)
        more = masked or not self._sampler.choosing.on_device[slots].all()
        more = more or self._sampler.reports(slots)
        adapters = self._target.slot_adapters
        if adapters is not None and adapters.of(slots) is not None:
            return None
        if nodes > MOST_NODES or size.total > self._scored or (more and self._target.group):
            return None
        if more:
            size = self._shaped.size(size, slots, masked)
        if not (on_device_draft and drafting and np.isin(slots, on_device_draft.slots).any()):
            return runner.runs_as(size)
        # The most levels whose draft tokens fit into scratch with these rows.
        for levels in range(on_device_draft.levels, 0, -1):
            larger = size._replace(levels=levels, width=on_device_draft.width)
            if drafting.fits(larger) and (larger_runs := runner.runs_as(larger)):
                return larger_runs
        return runner.runs_as(size)

    @torch.inference_mode()
    def begin(
        self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None
    ) -> CapturedRound | None:
        """Begin a round, which also accepts and writes everything that it can decide, and drafts if
        requested; None if the step cannot run as one. Does not wait for the device. Raises
        EngineError if a slot's recurrent state does not cover exactly the plan's kv_len tokens.
        """
        size = self.size_of(plan, trees, masks is not None)
        if size is None:
            return None
        if self.runner.states is not None:
            self.runner.states.check(plan)
        deepest = np.maximum.reduceat(trees.depth, trees.start[:-1])
        check_pages(plan, plan.kv_len + deepest, self._target.limits.page_size)
        staging = self.runner.staging(size)
        held = np.zeros_like(plan.constrained) if masks is not None else plan.constrained
        nodes = device_nodes(self._shaped.choosing, replace(plan, constrained=held), trees)
        place, decided = prepare_inputs(staging.buffers, size, plan, trees, nodes)
        staging.split(plan.kv_len)
        first = None
        if size.shaping or size.masked:
            self._shaped.fill(staging.buffers, size, plan.slots, masks, place)
            first = self._shaped.stale(plan.slots, lambda row: self._text(plan, row))
        round = self._launch(size, staging, plan, decided, first)
        round.trees, round.masks, round.place = trees, masks, place
        reads = self._sampler.reports(plan.slots) and not size.reports
        round.can_overlap = bool(decided.all()) and masks is None and not reads
        return round

    @torch.inference_mode()
    def begin_after(self, running: Round, plan: Plan, ends: Ints) -> CapturedRound | None:
        """Begin a round on the results of the running one; None if no round can."""
        before, runner, choosing = self.last, self.runner, self._shaped.choosing
        if runner.future is None or before is None or before is not running:
            return None  # The running step is not a round of this program.
        levels = np.minimum(plan.max_depth, before.size.levels)
        grown = [full_size(before.size.width, level) for level in range(before.size.levels + 1)]
        most = np.minimum(plan.max_nodes, np.array(grown)[levels])
        size = self._size(plan.slots, 1 + int(most.max()), plan.on_device_draft)
        # No captured size has room for the requested trees.
        if (
            size is None
            or (plan.on_device_draft is not None and not size.levels)
            or runner.lacks(size)
        ):
            return None
        deepest = np.minimum(plan.kv_len + plan.max_depth, ends - 1)
        check_pages(plan, np.maximum(plan.kv_len, deepest), self._target.limits.page_size)
        staging = runner.staging(size)
        prepare_inputs_carried(staging.buffers, size, plan, ends, choosing, most)
        staging.split(plan.kv_len)
        if size.shaping:
            self._shaped.fill(staging.buffers, size, plan.slots)
        round = self._launch(size, staging, plan, np.ones(plan.rows, np.bool_))
        round.previous = before
        round.can_overlap = size.reports > 0 or not self._sampler.reports(plan.slots)
        return round

    def _launch(
        self,
        size: Size,
        staging: StagingBuffer,
        plan: Plan,
        decided: Bools,
        first: Callable[[], None] | None = None,
    ) -> CapturedRound:
        """Launch a round with the inputs in `staging`, after calling `first`; decided: see
        CapturedRound.
        """
        runner, slots, count = self.runner, plan.slots, plan.rows
        staging.buffers["slot"][:count] = slots
        extends, calibration = np.zeros(count, np.bool_), None
        if plan.on_device_draft is not None and size.levels:
            extends = decided & np.isin(slots, plan.on_device_draft.slots)
            staging.buffers["draft_slot"][:count][extends] = slots[extends]
            if runner.drafting is not None and plan.on_device_draft.chances is not None:
                calibration = partial(runner.drafting.calibrate, plan.on_device_draft.chances)
        reserved = {} if runner.states is None else runner.states.reserve(size, staging, plan)
        changes, begun = self._send(staging, plan), perf_counter()
        try:
            wait = runner.launch(
                size, staging, [each for each in (*changes, first, calibration) if each]
            )
        except BaseException:
            for tables in runner.tables:
                tables.forget()
            self._drop(reserved)
            raise
        self.last = CapturedRound(
            plan,
            drafting=slots[extends],
            size=size,
            decided=decided,
            result=staging.result,
            wait=wait,
            begun=begun,
            reserved=reserved,
        )
        return self.last

    def _send(self, staging: StagingBuffer, plan: Plan) -> list[TableEntries]:
        """Write the changes of the plan's page tables to `staging`, as PageTables.send does."""
        (tables, *others), near = self.runner.tables, self.runner.near
        changes = [*tables.send(staging.buffers, plan.slots, plan.page_table)]
        if near is not None:
            (tables,), table = others, near.table(plan.page_table)
            changes += tables.send(staging.buffers, plan.slots, table)
        return changes

    def _drop(self, reserved: Reserved) -> None:
        """Free the rows of states that a failed round would have written."""
        if self.runner.states is not None:
            self.runner.states.drop(reserved)

    @torch.inference_mode()
    def finish(self, round: CapturedRound, masks: NodeMasks | None = None) -> Outcome:
        """Wait for the round's decisions, decide the remaining rows, and copy their keys and values
        to pages.
        """
        states = self.runner.states
        try:
            outcome = self._decide(round, masks)
            left = np.flatnonzero(~round.decided)
            if len(left):
                self._target.keep(round, outcome, left, self._target.cache.scratch(round.place))
            if states is not None:
                states.finish(round, self.runner.of(round.size).buffers, outcome, left)
        except BaseException:
            self._drop(round.reserved)
            raise
        if round.size.shaping:
            total = round.plan.kv_len + round.trees.known + outcome.n_tokens
            for row in np.flatnonzero(round.decided).tolist():
                self._shaped.set_counted(int(round.plan.slots[row]), int(total[row]))
        return outcome

    def _decide(self, round: CapturedRound, masks: NodeMasks | None) -> Outcome:
        """Wait for the record and decide the remaining rows from the round's logits."""
        round.read()
        now = perf_counter()
        self._rounds += 1
        self._seconds += now - max(round.begun, self._read)
        self._read = now
        target, runner, size, logits = self._target, self.runner, round.size, list[Floats]()

        def of_node(node: int) -> Floats:
            if self.last is not round or target.group:
                # Overwritten, or parts of ranks. Only a row without finite logits needs them.
                return np.full(target.limits.vocab, np.nan, np.float32)
            if not logits:
                logits.append(runner.logits[: size.total].float().cpu().numpy())
            row: Floats = logits[0][round.place[node]]
            return row

        features = None
        if runner.features is not None:
            every = np.arange(len(round.place))
            written = size.nodes == 1 and not size.levels
            features = TorchStepFeatures(
                *(runner.features, round.place, every, round.plan, round.trees),
                *(target.ring, written),
            )
        choice, masks = round.record.choices[round.place], masks or round.masks
        reports = partial(reports_of, of_node, made=round.report)
        return self._sampler.finish(
            round, of_node, masks, choice, reports, features, round.drafts()
        )

    def _text(self, plan: Plan, row: int) -> tuple[Sampling, History]:
        slot_init = self._sampler.of_row(plan, row)
        return slot_init.sampling, history_of(slot_init)

    def describe(self) -> dict[str, Any]:
        """Return facts of the rounds for /server_info."""
        programs = self.runner.programs
        return {
            "captured": [tuple(size) for size in programs.captured],
            "capture_seconds": programs.seconds,
            "rounds": self._rounds,
            "round_seconds": self._seconds,
        }


class TorchExecutor(EagerSteps):
    """A target in torch, on any device that torch supports (ModelRunner, TorchOptions).

    rounds  the steps that are replayed; None: all are eager
    """

    rounds: CapturedRounds | None = None
    Runner = CudaGraphRunner  # Of the captured programs.

    def capture(self, overlap: bool = False) -> Self:
        """Replay steps from now on, if the device supports capture; returns the executor itself.
        overlap: rounds may begin before the previous one has finished.
        """
        records = recorder(self.device)
        if records is not None and self.kernels is not None:
            self.runner = runner_of(self.Runner, self, records, overlap)
            self.rounds = CapturedRounds(self, self.sampler, self.runner)
            self.capabilities = Capabilities(
                needs_masks_before_forward=True, overlap=overlap, padded=True, drafts=True
            )
        return self

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot, with its sampling parameters, and with recurrent layers the
        state of its cached tokens. Raises EngineError if there is no such state.
        """
        if self.states is not None:
            self.states.open(slot_init)
        self.sampler.open(slot_init)
        if self.rounds is not None:
            self.rounds.open(slot_init)
        if self.slot_adapters is not None:
            self.slot_adapters.open(slot_init)

    def close(self, slot: int) -> None:
        """Discard a slot's sequence. Its pages belong to the caller."""
        self.sampler.close(slot)
        if self.states is not None:
            self.states.book.close(slot)

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> Round:
        """Begin a step: if possible as a round that drafts, accepts and writes by itself."""
        round = None if self.rounds is None else self.rounds.begin(plan, trees, masks)
        return super().begin(plan, trees, masks) if round is None else round

    def begin_after(self, running: Round, plan: Plan, ends: Ints) -> CapturedRound | None:
        """Begin a round on the results of the running one. Returns None if that is impossible, for
        example if the step must run eagerly.
        """
        return None if self.rounds is None else self.rounds.begin_after(running, plan, ends)

    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Wait for a step, decide the rows that its device has not, and write the accepted tokens
        to pages.
        """
        if isinstance(round, CapturedRound) and self.rounds is not None:
            return self.rounds.finish(round, masks)
        return super().finish(round, masks)

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: the model's, and those of the rounds."""
        return super().describe() | ({} if self.rounds is None else self.rounds.describe())
