"""The recurrent states of all sequences, and a step's way through them.

Of each layer with a state (layer_spec.GatedDelta) two tables, whose rows are state_slots.py's:

    windows   float32[rows, W-1, C]       what the convolution reads of the last W - 1 tokens
    matrices  float32[rows, Hv, Dk, Dv]

A step goes down its trees level by level: the state of a node is made of its parent's, all nodes of
a level at once, and a known chain is a tree without branches. Known tokens are permanent whatever
is accepted, so the state after a row's root goes into its slot at once. Of draft tokens not the
states are kept until the outcome is known but what they are made of, a hundredth of the numbers:
an accepted path advances the slot's state by the same numbers, multiplied and added in the same
order, and so to the same bits as the state that its last node was scored with.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun.executors.state_slots import Claim, StateSlots, rows_of
from forerun.executors.torch.decoder.delta import (
    DeltaInputs,
    Tokens,
    advance,
    convolved,
    read,
)
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Outcome, Plan, SlotInit
from forerun.models.arch import Architecture
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Ints

TextOf = Callable[[int], "array[int]"]
"""The decided tokens of a slot's sequence, all that a step runs at least."""


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes of equal depth, as a slice of all nodes ordered by depth.

    above   int64[n] the parents' places in the level above; None: one after the other
    ends    int64[m] places whose states are kept, and int64[m] the rows that they go to
    """

    begin: int
    end: int
    above: Tensor | None
    ends: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a step's nodes stand; the same for all layers.

    past    int64[M,W] rows of what the convolution reads: of B windows, then of the nodes
    order   int64[M] the nodes by depth; back: int64[M] each one's place in that
    rows    int64[B] the rows of states that the trees begin with
    ends    int64[m] nodes whose windows are kept, and the rows that they go to
    drafts  int64[D] the draft tokens
    """

    past: Tensor
    order: Tensor
    back: Tensor
    rows: Tensor
    levels: list[Level]
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


class States:
    """The tables, and the book of who has which row."""

    def __init__(self, arch: Architecture, limits: ExecutorLimits, device: torch.device) -> None:
        about, rows = arch.delta, rows_of(limits)
        assert about is not None
        layers, self._width, self._device = arch.recurrent_layers, about.window, device
        self.book = StateSlots(limits)
        matrix = about.value_heads, about.key_size, about.value_size
        self.windows = torch.zeros(layers, rows, about.window - 1, about.channels, device=device)
        self.matrices = torch.zeros(layers, rows, *matrix, device=device)

    @staticmethod
    def bytes(arch: Architecture, limits: ExecutorLimits) -> int:
        """Bytes of the tables; 0 of a model without recurrent layers."""
        if arch.delta is None:
            return 0
        return rows_of(limits) * arch.delta.state_bytes(arch.recurrent_layers)

    def open(self, slot_init: SlotInit) -> None:
        """A sequence takes a slot, with the state of its cached tokens. Raises EngineError where
        that is not kept.
        """
        row, slot = self.book.open(slot_init), slot_init.slot
        for table in (self.windows, self.matrices):
            table[:, slot] = 0.0 if row is None else table[:, row]

    def begin(self, plan: Plan, trees: TreeBatch, text_of: TextOf) -> StateStep:
        """Where the nodes of a step stand. Of the plan kv_len and slots are read. Raises
        EngineError where a slot's state is not the one that the plan goes on from.
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
        sorted_tokens, found = tokens.ordered(paths.order), []
        states = matrices.index_select(0, paths.rows)
        for level in paths.levels:
            if level.above is not None:
                states = states.index_select(0, level.above)
            here = sorted_tokens.part(level.begin, level.end)
            advance(states, here)
            found.append(read(states, here))
            if level.ends is not None:
                matrices[level.ends[1]] = states[level.ends[0]]
        out = tokens.values.new_zeros(len(inputs.mixed), *states.shape[1:2], states.shape[-1])
        out[: len(paths.back)] = torch.cat(found).index_select(0, paths.back)
        return out

    def known(self, step: StateStep) -> None:
        """All layers have run: the states of known tokens are there."""
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
        where, which = self._there(slots), self._there(nodes)
        for number, (mixed, tokens) in enumerate(step.kept):
            windows, matrices = self.windows[number], self.matrices[number]
            entering = mixed.index_select(0, which).unsqueeze(1)
            windows[where] = torch.cat([windows[where][:, 1:], entering], 1)
            states = matrices.index_select(0, where)
            advance(states, tokens.ordered(which))
            matrices[where] = states

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
        order = np.argsort(trees.depth, kind="stable")
        back = np.empty(count, np.int64)
        back[order] = np.arange(count)
        nodes, targets = np.array(list(ends.values())), np.array(list(ends))
        drafted = np.arange(count) - trees.start[row] >= trees.known[row]
        return Paths(
            past=self._there(past),
            order=self._there(order),
            back=self._there(back),
            rows=self._there(plan.slots),
            levels=self._levels(trees, order, back, ends),
            ends=(self._there(nodes), self._there(targets)),
            drafts=self._there(np.flatnonzero(drafted)),
        )

    def _levels(
        self, trees: TreeBatch, order: AnyArray, back: AnyArray, ends: dict[int, int]
    ) -> list[Level]:
        counts = np.bincount(trees.depth).tolist()
        at: dict[int, list[tuple[int, int]]] = {}
        for target, node in ends.items():
            at.setdefault(int(trees.depth[node]), []).append((int(back[node]), target))
        levels, begin, width = [], 0, counts[0]
        for depth, count in enumerate(counts):
            nodes, above = order[begin : begin + count], None
            if depth:
                places = back[trees.parents[nodes]] - (begin - width)
                if count != width or np.any(places != np.arange(count)):
                    above = self._there(places)
            kept = None
            if depth in at:
                places, targets = zip(*at[depth], strict=True)
                kept = self._there(np.array(places) - begin), self._there(np.array(targets))
            levels.append(Level(begin, begin + count, above, kept))
            begin, width = begin + count, count
        return levels

    def _there(self, array: AnyArray) -> Tensor:
        return torch.from_numpy(np.array(array, np.int64, order="C")).to(self._device)
