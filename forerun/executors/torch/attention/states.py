"""The recurrent states of all sequences, and their update in a step.

Each layer with a state (layer_spec.GatedDelta) has two tables, with the rows of state_slots.py:

    windows   float32[rows, W-1, C]       the convolution's inputs of the last W - 1 tokens
    matrices  float32[rows, Hv, Dk, Dv]

A node's state is computed from its parent's, by the compiled core (delta_native.py) or by torch
(delta_levels.py). Known tokens are permanent whatever is accepted, so the state after a row's root
is written to its slot at once. For draft tokens not the states are stored until the outcome is
known but their inputs, a hundredth of the numbers: an accepted path advances the slot's state by
the same numbers, multiplied and added in the same order, and so to the same bits as the state that
its last node was scored with.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.executors.cpu import native
from forerun.executors.state_slots import Claim, StateSlots, rows_of
from forerun.executors.torch.attention.delta_levels import ByLevels, DeltaWalk
from forerun.executors.torch.attention.delta_native import NativeDelta
from forerun.executors.torch.attention.kv import indices
from forerun.executors.torch.decoder.delta import DeltaInputs, Tokens, convolved
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Outcome, Plan
from forerun.interface.slot_init import SlotInit
from forerun.networks.arch import Architecture
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Ints

TextOf = Callable[[int], "array[int]"]
"""The decided tokens of a slot's sequence, all that a step runs at least."""


@dataclass(frozen=True, slots=True)
class Paths:
    """The rows and places of a step's nodes; the same for all layers.

    past    int64[M,W] rows that the convolution reads: of B windows, then of the nodes
    rows    int64[B] the rows of states at which the trees begin
    way     through the matrices, from DeltaWalk
    ends    int64[m] nodes whose windows are stored, and the rows to store them in
    drafts  int64[D] the draft tokens
    """

    past: Tensor
    rows: Tensor
    way: Any
    ends: tuple[Tensor, Tensor]
    drafts: Tensor


@dataclass(slots=True)
class StateStep:
    """A step that is under way.

    claims  by slot, the checkpoints that it makes of known tokens
    kept    of each layer, what is kept of the draft tokens: convolution rows float32[D,C], and the
            others
    """

    plan: Plan
    trees: TreeBatch
    paths: Paths
    claims: dict[int, list[Claim]]
    kept: list[tuple[Tensor, Tokens]] = field(default_factory=list)


def chosen_walk(device: torch.device) -> DeltaWalk:
    """NativeDelta on a CPU where the compiled core is there; else ByLevels on `device`."""
    if device.type == "cpu" and native.available() is None:
        return NativeDelta()
    return ByLevels(device)


class States:
    """The tables, and the bookkeeping of their rows.

    walk  advances matrices; None: `chosen_walk`
    """

    def __init__(
        self,
        arch: Architecture,
        limits: ExecutorLimits,
        device: torch.device,
        walk: DeltaWalk | None = None,
    ) -> None:
        about, rows = arch.delta, rows_of(limits)
        assert about is not None
        layers, self._width, self._device = arch.recurrent_layers, about.window, device
        self.book = StateSlots(limits)
        matrix = about.value_heads, about.key_size, about.value_size
        self._walk = walk or chosen_walk(device)
        self.windows = torch.zeros(layers, rows, about.window - 1, about.channels, device=device)
        self.matrices = torch.zeros(layers, rows, *matrix, device=device)

    @staticmethod
    def bytes(arch: Architecture, limits: ExecutorLimits) -> int:
        """Return the bytes of the tables of states; 0 for a model without recurrent layers."""
        if arch.delta is None:
            return 0
        return rows_of(limits) * arch.delta.state_bytes(arch.recurrent_layers)

    def open(self, slot_init: SlotInit) -> None:
        """A sequence takes a slot, with the state of its cached tokens. Raises EngineError if
        that is not kept.
        """
        row, slot = self.book.open(slot_init), slot_init.slot
        for table in (self.windows, self.matrices):
            table[:, slot] = 0.0 if row is None else table[:, row]

    def begin(self, plan: Plan, trees: TreeBatch, text_of: TextOf) -> StateStep:
        """Begin a step; return the paths of its nodes. Reads the plan's kv_len and slots. Raises
        EngineError if a slot's state does not stand for the plan's kv_len tokens.
        """
        claims: dict[int, list[Claim]] = {}
        ends: dict[int, int] = {}
        known, slots, lengths = trees.known.tolist(), plan.slots.tolist(), plan.kv_len.tolist()
        for slot, length in zip(slots, lengths, strict=True):
            self.book.begin(slot, length)
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            root = trees.root(row)
            found = self.book.claims(slot, text_of(slot), length, length + known[row])
            claims[slot] = found
            # A row that was claimed twice in a step has the state of the later claim.
            ends |= {c.row: root - (length + known[row] - c.length) for c in found}
            ends[slot] = root
        return StateStep(plan, trees, self._paths(plan, trees, ends), claims)

    def layer(self, step: StateStep, number: int, inputs: DeltaInputs) -> Tensor:
        """float32[M,Hv,Dv]: what the nodes read in layer `number`, counted among those with a
        state; zeros of padding. Writes the states after known tokens.
        """
        paths, windows, matrices = step.paths, self.windows[number], self.matrices[number]
        before = windows.index_select(0, paths.rows).flatten(0, 1)
        rows = torch.cat([before, inputs.mixed])
        tokens = convolved(inputs, rows, paths.past)
        nodes, targets = paths.ends
        windows[targets] = rows[paths.past[nodes, 1:]]
        step.kept.append((inputs.mixed[paths.drafts], tokens.ordered(paths.drafts)))
        out = tokens.values.new_zeros(len(inputs.mixed), *tokens.values.shape[1:])
        out[: len(paths.past)] = self._walk.advance(matrices, paths.way, tokens)
        return out

    def known(self, step: StateStep) -> None:
        """All layers of the step have run: checkpoints that it claimed are kept, and each slot's
        state stands behind its known tokens. Call it once, after the last layer.
        """
        known = step.trees.known.tolist()
        for row, slot in enumerate(step.plan.slots.tolist()):
            self.book.keep(slot, step.claims.pop(slot))
            self.book.end(slot, int(step.plan.kv_len[row]) + known[row])

    def failed(self, step: StateStep) -> None:
        """The step could not be run; its slots have no state any more."""
        for claims in step.claims.values():
            self.book.drop(claims)
        step.claims.clear()

    def accept(self, step: StateStep, outcome: Outcome, text_of: TextOf) -> None:
        """Advance the slots' states along the accepted paths, all rows at once, token by token."""
        dropped = np.concatenate([[0], np.cumsum(step.trees.known)])
        paths = [  # By their numbers among the draft tokens.
            (row, (path - int(dropped[row + 1])).tolist())
            for row, path in enumerate(outcome.paths)
            if len(path)
        ]
        paths.sort(key=lambda pair: -len(pair[1]))
        for depth in range(len(paths[0][1]) if paths else 0):
            rows = [row for row, path in paths if len(path) > depth]
            nodes = [path[depth] for _, path in paths[: len(rows)]]
            slots = step.plan.slots[rows]
            self._follow(step, slots, np.array(nodes))
            for row, slot in zip(rows, slots.tolist(), strict=True):
                self._passed(step, row, slot, depth, text_of)

    def _follow(self, step: StateStep, slots: Ints, nodes: AnyArray) -> None:
        """One draft token more, of each of these slots."""
        where, which = indices(slots, self._device), indices(nodes, self._device)
        for number, (mixed, tokens) in enumerate(step.kept):
            windows, matrices = self.windows[number], self.matrices[number]
            entering = mixed.index_select(0, which).unsqueeze(1)
            windows[where] = torch.cat([windows[where][:, 1:], entering], 1)
            self._walk.follow(matrices, slots, tokens.ordered(which))

    def _passed(self, step: StateStep, row: int, slot: int, depth: int, text_of: TextOf) -> None:
        """The slot's state is one accepted token further: see whether it is to be kept."""
        length = int(step.plan.kv_len[row]) + int(step.trees.known[row]) + depth
        self.book.begin(slot, length)
        for claim in (claims := self.book.claims(slot, text_of(slot), length, length + 1)):
            for table in (self.windows, self.matrices):
                table[:, claim.row] = table[:, slot]
        self.book.keep(slot, claims)
        self.book.end(slot, length + 1)

    def _paths(self, plan: Plan, trees: TreeBatch, ends: dict[int, int]) -> Paths:
        count, rows = len(trees.tokens), trees.rows
        row = np.repeat(np.arange(rows), np.diff(trees.start))
        past = np.empty((count, self._width), np.int64)
        span = rows * (self._width - 1)
        past[:, -1] = span + np.arange(count)
        first = row * (self._width - 1)
        for place in range(self._width - 2, -1, -1):
            # One step up from the entry after it: to a parent, or back within the row's window.
            after = past[:, place + 1]
            parent = trees.parents[np.maximum(after - span, 0)]
            above = np.where(parent >= 0, span + parent, first + self._width - 2)
            past[:, place] = np.where(after >= span, above, after - 1)
        nodes, targets = np.array(list(ends.values())), np.array(list(ends))
        drafted = np.arange(count) - trees.start[row] >= trees.known[row]
        return Paths(
            past=indices(past, self._device),
            rows=indices(plan.slots, self._device),
            way=self._walk.way(trees, plan.slots, ends),
            ends=(indices(nodes, self._device), indices(targets, self._device)),
            drafts=indices(np.flatnonzero(drafted), self._device),
        )
