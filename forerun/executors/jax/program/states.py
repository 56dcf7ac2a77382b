"""The bookkeeping of recurrent states on XLA: which row of states has the state after which text.

Chunks and rounds advance the states of their rows by the nodes that they keep (functions.py). So a
chunk ends where a text gets a checkpoint, and its state is copied there; a round itself copies the
state at the last page end on its path, to a reserved row. The state of a row whose path the host
decides is not advanced: its next step runs the missing tokens again, as a chunk.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from forerun.errors import EngineError
from forerun.executors.jax.program.functions import Key
from forerun.executors.jax.program.programs import JaxPrograms
from forerun.executors.jax.rounds.batches import Batch
from forerun.executors.state_slots import Claim, StateSlots, rows_of
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Outcome, Plan
from forerun.interface.slot_init import SequenceText, SlotInit
from forerun.speculative.tree import TreeBatch, batch
from forerun.types import Ints


class CatchUp(NamedTuple):
    """A step of known tokens that a slot's state does not cover yet."""

    plan: Plan
    trees: TreeBatch


class JaxStates:
    """The rows of states of an executor; `book` maps texts to them."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self.book, self._zeros = StateSlots(limits), rows_of(limits)
        self._texts: dict[int, SequenceText] = {}
        self._lengths: dict[int, int] = {}
        self._claims: dict[int, list[Claim]] = {}

    def open(self, slot_init: SlotInit, programs: JaxPrograms) -> None:
        """Bind a sequence to its slot, with the state of its cached tokens. Raises EngineError if
        there is no such state.
        """
        row, slot = self.book.open(slot_init), slot_init.slot
        self._texts[slot], self._lengths[slot] = slot_init.text, slot_init.cached
        self._copy(programs, self._zeros if row is None else row, slot)

    def close(self, slot: int) -> None:
        """Discard the slot's sequence, if it has one."""
        self.book.close(slot)
        self._lengths.pop(slot, None)

    def missing(self, plan: Plan) -> list[CatchUp]:
        """Return the steps of tokens that the states of a plan's slots do not cover yet. Raises
        EngineError for a slot whose last step failed, or whose state is beyond the plan's kv_len.
        """
        found = []
        for row, slot in enumerate(plan.slots.tolist()):
            length, wanted = self._lengths[slot], int(plan.kv_len[row])
            if not 0 <= length <= wanted:
                raise EngineError(
                    f"slot {slot} has the recurrent state after {length} tokens; a step continues "
                    f"behind {wanted}"
                )
            if length < wanted:
                tokens = np.array(self._texts[slot].tokens[length:wanted], np.int32)
                found.append(CatchUp(_alone(plan, row, length, tokens), batch([tokens])))
                self.book.end(slot, wanted)
        return found

    def claims(self, plan: Plan, trees: TreeBatch) -> dict[int, list[int]]:
        """Reserve rows for checkpoints of the known tokens that run in chunks. Returns, by row of
        the plan, the numbers of tokens after which chunks end.
        """
        cuts = {}
        for row, slot in enumerate(plan.slots.tolist()):
            begin = int(plan.kv_len[row])
            end = begin + int(trees.known[row]) - bool(plan.samples[row])
            claims = sorted(self.book.claims(slot, begin, end), key=lambda claim: claim.length)
            self._claims[slot] = claims
            cuts[row] = [claim.length - begin for claim in claims]
            self._ended(slot, end)
        return cuts

    def reserve(self, plan: Plan, reach: Ints) -> dict[int, int]:
        """Reserve rows for the copies that a round may make, by slot. reach: int32[B] tokens at its
        end.
        """
        rows = zip(plan.slots.tolist(), reach.tolist(), strict=True)
        found = {slot: self.book.reserve(slot, end) for slot, end in rows}
        return {slot: row for slot, row in found.items() if row is not None}

    def passed(self, plan: Plan, trees: TreeBatch, cut: Batch, programs: JaxPrograms) -> None:
        """Copy a slot's state to the checkpoint that ends where a chunk does, if one does."""
        (row,), last = cut.rows, int(cut.nodes[0][-1])
        slot, end = int(plan.slots[row]), int(plan.kv_len[row] + trees.depth[last]) + 1
        for claim in [each for each in self._claims.get(slot, ()) if each.length == end]:
            self._copy(programs, slot, claim.row)
            self._claims[slot].remove(claim)
            self.book.register(slot, [claim])

    def settle(self, plan: Plan, outcome: Outcome, kept: Ints, reserved: dict[int, int]) -> None:
        """End a step: the states of sampling rows cover kept int32[B] more nodes, from their roots
        on.
        """
        for row in np.flatnonzero(plan.samples).tolist():
            slot = int(plan.slots[row])
            end = self._lengths[slot] + int(kept[row])
            self.book.settle(slot, reserved.get(slot), end, outcome.output_tokens[row])
            self._lengths[slot] = end

    def failed(self, plan: Plan, reserved: dict[int, int]) -> None:
        """Free the rows reserved for a step that failed; its slots have no valid state
        afterwards.
        """
        self.book.drop(reserved.values())
        for slot in plan.slots.tolist():
            self.book.drop(claim.row for claim in self._claims.pop(slot, ()))
            self._ended(slot, -1)

    def _ended(self, slot: int, length: int) -> None:
        self.book.end(slot, length)
        self._lengths[slot] = length

    def _copy(self, programs: JaxPrograms, source: int, target: int) -> None:
        rows = np.array([[source], [target]], np.int32)
        programs.move(Key("states"), rows[0], rows[1], self._zeros)


def _alone(plan: Plan, row: int, length: int, tokens: Ints) -> Plan:
    """Return a plan of one row, which runs these known tokens after `length`."""
    own, none = slice(row, row + 1), np.zeros(1, np.int32)
    return replace(
        plan,
        slots=plan.slots[own],
        kv_len=np.array([length], np.int32),
        known=(tokens,),
        samples=np.zeros(1, np.bool_),
        max_nodes=none,
        max_depth=none,
        page_table=plan.page_table[own],
        constrained=np.zeros(1, np.bool_),
        on_device_draft=None,
        hidden=None,
    )
