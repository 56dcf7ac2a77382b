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

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.executors.cpu import native
from forerun.executors.state_slots import rows_of
from forerun.executors.state_steps import StateStep, StateSteps
from forerun.executors.torch.attention.delta_levels import ByLevels, DeltaWalk
from forerun.executors.torch.attention.delta_native import NativeDelta
from forerun.executors.torch.attention.kv import indices
from forerun.executors.torch.decoder.delta import DeltaInputs, Tokens, convolved
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.networks.arch import Architecture
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints


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


@dataclass(frozen=True, slots=True)
class TorchStateStep(StateStep):
    """The same with tensors.

    kept  of each layer, what is kept of the draft tokens: convolution rows float32[D,C], and the
          others
    """

    paths: Paths
    kept: list[tuple[Tensor, Tokens]] = field(default_factory=list)


def chosen_walk(device: torch.device) -> DeltaWalk:
    """NativeDelta on a CPU where the compiled core is there; else ByLevels on `device`."""
    if device.type == "cpu" and native.available() is None:
        return NativeDelta()
    return ByLevels(device)


class States(StateSteps):
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
        super().__init__(limits)
        about, rows = arch.delta, rows_of(limits)
        assert about is not None
        layers, self._width, self._device = arch.recurrent_layers, about.window, device
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

    def copy(self, row: int | None, to: int) -> None:
        """As StateSteps.copy, in all layers."""
        for table in (self.windows, self.matrices):
            table[:, to] = 0.0 if row is None else table[:, row]

    def begin(self, plan: Plan, trees: TreeBatch) -> TorchStateStep:
        """Begin a step; return it with the paths of its nodes. Raises EngineError as `prepare`."""
        step = self.prepare(plan, trees)
        paths = self._paths(plan, trees, step.ends)
        return TorchStateStep(plan, trees, step.claims, step.ends, paths)

    def layer(self, step: TorchStateStep, number: int, inputs: DeltaInputs) -> Tensor:
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

    def follow(self, step: StateStep, slots: Ints, nodes: Ints) -> None:
        """As StateSteps.follow, in all layers."""
        assert isinstance(step, TorchStateStep)
        trees = step.trees
        row = np.searchsorted(trees.start, nodes, side="right") - 1
        known = np.concatenate([[0], np.cumsum(trees.known)])
        where = indices(slots, self._device)
        which = indices(nodes - known[row + 1], self._device)  # Among the draft tokens.
        for number, (mixed, tokens) in enumerate(step.kept):
            windows, matrices = self.windows[number], self.matrices[number]
            entering = mixed.index_select(0, which).unsqueeze(1)
            windows[where] = torch.cat([windows[where][:, 1:], entering], 1)
            self._walk.follow(matrices, slots, tokens.ordered(which))

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
