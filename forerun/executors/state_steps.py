"""Advances an executor's recurrent states step by step: assigns the states of known nodes to rows
of the pool, and advances slots along accepted paths. The executor owns the arrays.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.errors import EngineError
from forerun.executors.state_slots import Claim, StateSlots
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Outcome, Plan
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints


@dataclass(frozen=True, slots=True)
class StateStep:
    """A step in progress.

    claims  by slot, the checkpoints of known tokens that it creates
    ends    row of the pool -> the known node whose state is copied to it
    """

    plan: Plan
    trees: TreeBatch
    claims: dict[int, list[Claim]]
    ends: dict[int, int]

    @property
    def targets(self) -> NDArray[np.int64]:
        """int64[M]: the row of the pool, not a slot's of this step, to which the state after each
        node is copied; -1 = none.
        """
        targets, slots = np.full(len(self.trees.tokens), -1, np.int64), {*self.plan.slots.tolist()}
        for row, node in self.ends.items():
            if row not in slots:
                targets[node] = row
        return targets


class StateSteps(ABC):
    """The bookkeeping of one pool (`book`) over the steps, and the StateContents of its executor. A
    subclass owns the states.
    """

    def __init__(self, limits: ExecutorLimits) -> None:
        self.book = StateSlots(limits)

    @abstractmethod
    def copy(self, row: int | None, to: int) -> None:
        """Copy the state of row `row` to row `to`; None: zeros."""

    @abstractmethod
    def follow(self, step: StateStep, slots: Ints, nodes: Ints) -> None:
        """Advance the states of slots int32[n], which are distinct, by one draft token each: flat
        nodes int32[n] of the step.
        """

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of a state, over all layers."""

    @abstractmethod
    def content(self, row: int) -> bytes:
        """Return the state of a row as bytes, over all layers."""

    @abstractmethod
    def put(self, row: int, content: bytes | memoryview) -> None:
        """Write a row's state from the bytes that `content` returned, state_bytes in number."""

    def state_lengths(self, tokens: Ints, salt: bytes = b"") -> list[int]:
        """Implement StateContents.state_lengths."""
        return self.book.lengths(tokens, salt)

    def read_state(self, tokens: Ints, salt: bytes = b"") -> bytes | None:
        """Implement StateContents.read_state."""
        row = self.book.row(tokens, salt)
        return None if row is None else self.content(row)

    def write_state(self, tokens: Ints, content: bytes | memoryview, salt: bytes = b"") -> bool:
        """Implement StateContents.write_state."""
        if len(content) != self.state_bytes:
            raise EngineError(f"{len(content)} bytes are not a state of {self.state_bytes}")
        if self.book.row(tokens, salt) is not None:
            return True
        row = self.book.insert(tokens, salt)
        if row is None:
            return False
        try:
            self.put(row, content)
        except BaseException:
            self.book.remove(tokens, salt)  # The row still has another text's state.
            raise
        return True

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot and copy the state of its cached tokens there. Raises
        EngineError if that state has no checkpoint.
        """
        self.copy(self.book.open(slot_init), slot_init.slot)

    def prepare(self, plan: Plan, trees: TreeBatch) -> StateStep:
        """Begin a step: reserve rows for its checkpoints. Returns the assignment of states to rows.
        Raises EngineError if a slot's state does not cover exactly the plan's kv_len tokens.
        """
        claims: dict[int, list[Claim]] = {}
        ends: dict[int, int] = {}
        known, slots, lengths = trees.known.tolist(), plan.slots.tolist(), plan.kv_len.tolist()
        for slot, length in zip(slots, lengths, strict=True):
            self.book.begin(slot, length)
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            root = trees.root(row)
            claims[slot] = self.book.claims(slot, length, length + known[row])
            # A row that was claimed twice in a step has the state of the later claim.
            ends |= {c.row: root - (length + known[row] - c.length) for c in claims[slot]}
            ends[slot] = root
        return StateStep(plan, trees, claims, ends)

    def known(self, step: StateStep) -> None:
        """Register the step's checkpoints, and set each slot's state to that after its known
        tokens. Call once per step, after the last layer.
        """
        known = step.trees.known.tolist()
        for row, slot in enumerate(step.plan.slots.tolist()):
            self.book.register(slot, step.claims.pop(slot))
            self.book.end(slot, int(step.plan.kv_len[row]) + known[row])

    def failed(self, step: StateStep) -> None:
        """Free the checkpoints of a failed step; its slots have no valid state afterwards."""
        for claims in step.claims.values():
            self.book.drop(claim.row for claim in claims)
        step.claims.clear()

    def accept(self, step: StateStep, outcome: Outcome) -> None:
        """Advance the slots' states along the accepted paths, all rows at once, token by token."""
        paths = [(row, path) for row, path in enumerate(outcome.paths) if len(path)]
        paths.sort(key=lambda pair: -len(pair[1]))
        for depth in range(len(paths[0][1]) if paths else 0):
            rows = [row for row, path in paths if len(path) > depth]
            nodes = [path[depth] for _, path in paths[: len(rows)]]
            slots = step.plan.slots[rows]
            self.follow(step, slots, np.array(nodes, np.int32))
            for row, slot in zip(rows, slots.tolist(), strict=True):
                self._passed(step, row, slot, depth, outcome.output_tokens[row])

    def _passed(self, step: StateStep, row: int, slot: int, depth: int, emitted: list[int]) -> None:
        """Advance the slot's state by one accepted token, and copy it to a checkpoint if the text
        gets one there.
        """
        length = int(step.plan.kv_len[row]) + int(step.trees.known[row]) + depth
        self.book.begin(slot, length)
        claims = self.book.claims(slot, length, length + 1, emitted)
        try:
            for claim in claims:
                self.copy(slot, claim.row)
        except BaseException:
            self.book.drop(claim.row for claim in claims)
            raise
        self.book.register(slot, claims)
        self.book.end(slot, length + 1)
