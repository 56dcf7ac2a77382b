"""Acceptance on the host, for executors whose logits the host can read: slots, rows, outcomes.

host_choice.py decides the rows that the executor has not decided itself.
"""

from array import array
from bisect import bisect_left
from functools import partial
from itertools import chain, compress, filterfalse, zip_longest
from operator import add, gt, not_, or_

import numpy as np

from forerun.columns import Column, column, consume
from forerun.errors import EngineError
from forerun.executors.device_choice import ON_HOST, Choosing
from forerun.executors.host_choice import (
    Choices,
    Logits,
    ReportsOf,
    SlotState,
    complete,
    reports_of,
)
from forerun.interface.features import StepFeatures
from forerun.interface.next_draft import NextDrafts
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.accept import NOTHING
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints

_NONE: Ints = np.zeros(0, np.int32)
_histories_of: Column[SlotState | None, "array[int]"] = column("tokens")  # Of open slots.


class HostSampler:
    """The sampler's state per slot, and acceptance by forerun.speculative."""

    def __init__(self, slots: int, vocab: int) -> None:
        self._open: list[SlotState | None] = [None] * slots
        self._vocab = vocab
        self.choosing = Choosing(
            temperature=np.full(slots, ON_HOST, np.float32),
            seed=np.zeros(slots, np.uint64),
            prompt_len=np.zeros(slots, np.int32),
        )
        # Slots that report log-probabilities, and those that report their prompts'.
        self._reports: set[int] = set()
        self._echoes: set[int] = set()

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot. Raises EngineError if the slot is open or a token is outside
        the vocabulary.
        """
        slot, sampling = slot_init.slot, slot_init.sampling
        if self._open[slot] is not None:
            raise EngineError(f"slot {slot} is already open; close it first")
        if not np.all((slot_init.tokens >= 0) & (slot_init.tokens < self._vocab)):
            raise EngineError(f"slot {slot}: a token is outside 0..{self._vocab - 1}")
        tokens = array("i", np.ascontiguousarray(slot_init.tokens, np.int32).tobytes())
        self._open[slot] = SlotState(sampling, tokens, slot_init.prompt_len)
        self.choosing.temperature[slot] = (
            sampling.temperature if sampling.temperature_only else ON_HOST
        )
        self.choosing.seed[slot] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        self.choosing.prompt_len[slot] = slot_init.prompt_len
        if sampling.prompt_logprobs is not None:
            self._echoes.add(slot)
        if sampling.prompt_logprobs is not None or sampling.logprobs is not None:
            self._reports.add(slot)

    def close(self, slot: int) -> None:
        """Discard the slot's sequence, if it has one."""
        self._open[slot] = None
        self.choosing.temperature[slot] = ON_HOST
        self._reports.discard(slot)
        self._echoes.discard(slot)

    def text(self, slot: int) -> "array[int]":
        """Return all decided tokens of an open slot's sequence, read-only."""
        return next(_histories_of([self._open[slot]]))

    def reports(self, slots: Ints) -> bool:
        """Return whether one of the slots int32[n] wants log-probabilities."""
        return bool(self._reports) and not self._reports.isdisjoint(slots.tolist())

    def scored(self, plan: Plan, trees: TreeBatch) -> Ints:
        """Return int32[n] flat nodes, ascending, whose logits `finish` may need."""
        ends, first, rows = trees.start[1:].tolist(), trees.roots.tolist(), range(plan.rows)
        # A row that does not sample carries no draft token; echo still reads its whole chain.
        for row in compress(rows, map(not_, plan.samples.tolist())):
            first[row] = ends[row]
        if self._echoes:
            for row in compress(rows, map(self._echoes.__contains__, plan.slots.tolist())):
                first[row] = trees.nodes(row).start
        return np.array([*chain.from_iterable(map(range, first, ends))], np.int32)

    def accept(
        self,
        plan: Plan,
        trees: TreeBatch,
        logits: Logits,
        masks: NodeMasks | None,
        choice: Ints | None = None,
        reports: ReportsOf | None = None,
    ) -> Choices:
        """Decide every row. Changes nothing here.

        choice   int32[M] as in Choices, for rows that the executor decided as the specification
                 would; NOTHING in all others. Completed in place.
        reports  the executor's own way to log-probabilities, which needs no logits here

        A row whose root has NaN or +inf among its logits, or a grammar mask that allows nothing,
        emits nothing and has `finite` False; other rows are unaffected. At a draft token the same
        faults end the path before it. Stop tokens do not end a path; the engine cuts there.
        """
        if choice is None:
            choice = np.full(len(trees.tokens), NOTHING, np.int32)
        # Lists: a call of NumPy takes ten times as long right after a forward pass.
        decided = map((0).__le__, map(choice.tolist().__getitem__, trees.roots.tolist()))
        pending = undecided = list(map(gt, plan.samples.tolist(), decided))
        if self._reports:
            reported = map(self._reports.__contains__, plan.slots.tolist())
            pending = list(map(or_, undecided, reported))
        if True not in pending:
            nothing = ((),) * plan.rows
            return Choices(choice, np.array([True] * plan.rows), nothing, nothing)
        choices = Choices(choice, ~np.array(undecided, np.bool_))
        rows = [(row, self.of_row(plan, row)) for row in compress(range(plan.rows), pending)]
        reports = reports or partial(reports_of, logits)
        return complete(plan, trees, rows, logits, masks, reports, choices)

    def finish(
        self,
        round: Round,
        logits: Logits,
        masks: NodeMasks | None,
        choice: Ints | None = None,
        reports: ReportsOf | None = None,
        features: StepFeatures | None = None,
        drafts: NextDrafts | None = None,
    ) -> Outcome:
        """Decide every row as `accept` does, append the emitted tokens to the slots' histories and
        return the outcome of the round, whose plan and trees are complete.

        choice int32[M] as in `accept`; features, drafts as in Outcome

        Raises EngineError if a row's known tokens do not end at the end of its history.
        """
        plan, trees = round.plan, round.trees
        choices = self.accept(plan, trees, logits, masks, choice, reports)
        emitted, accepted = _paths(trees, choices.choice)
        self._append(plan, trees, emitted)
        counts = list(map(len, emitted))
        padded = zip(*zip_longest(*emitted, fillvalue=NOTHING), strict=True)
        tokens = list(padded) if min(counts) < max(counts) else emitted
        round.outcome = Outcome(
            n_tokens=np.array(counts, np.int32),
            tokens=np.array(tokens, np.int32),
            n_draft_tokens=trees.n_draft_tokens,
            finite=choices.finite,
            logprobs=choices.logprobs,
            prompt_logprobs=choices.prompt_logprobs,
            accepted=accepted,
            drafts=drafts,
            features=features,
        )
        return round.outcome

    def _append(self, plan: Plan, trees: TreeBatch, emitted: list[list[int]]) -> None:
        """Append emitted tokens to the histories of their rows. Raises EngineError, and changes
        nothing, if the known tokens of a row that samples do not end at the end of its history.
        """
        states = list(map(self._open.__getitem__, plan.slots.tolist()))
        if not all(states):
            self.of_row(plan, states.index(None))
        histories = list(_histories_of(states))
        decided = list(map(add, plan.kv_len.tolist(), trees.known.tolist()))
        if decided != list(map(len, histories)):  # They may differ for a chunk that stops short.
            for row in compress(range(plan.rows), plan.samples.tolist()):
                if decided[row] != len(histories[row]):
                    raise EngineError(
                        f"row {row} samples after {decided[row]} tokens, but slot "
                        f"{plan.slots[row]} holds {len(histories[row])}"
                    )
        consume(map(array.extend, histories, emitted))

    def of_row(self, plan: Plan, row: int) -> SlotState:
        """Return the state of plan row `row`'s slot. Raises EngineError if the slot is not open."""
        state: SlotState | None = self._open[plan.slots[row]]
        if state is None:
            raise EngineError(f"row {row} plans slot {plan.slots[row]}, which is not open")
        return state


def _paths(trees: TreeBatch, choice: Ints) -> tuple[list[list[int]], Ints]:
    """Return the tokens that each row emits, and the nodes of all accepted draft tokens."""
    chosen = choice.tolist()
    if trees.decode_only and min(chosen) >= 0:
        return list(map(list, zip(chosen, strict=True))), _NONE
    nodes = [node for node, token in enumerate(chosen) if token >= 0]
    bounds = list(map(partial(bisect_left, nodes), trees.start.tolist()))
    tokens = list(map(chosen.__getitem__, nodes))
    emitted = list(map(tokens.__getitem__, map(slice, bounds, bounds[1:])))
    accepted = list(filterfalse(set(trees.roots.tolist()).__contains__, nodes))
    return emitted, np.array(accepted, np.int32) if accepted else _NONE
