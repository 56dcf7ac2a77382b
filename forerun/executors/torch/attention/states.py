"""The recurrent states of all sequences, and their update in a step.

Each layer with a state (layer_spec.Recurrent) has a table, a gated delta net two, with the rows of
state_slots.py:

    windows   float32[rows, W-1, C]       the convolution's inputs of the last W - 1 tokens
    matrices  float32[rows, Hv, Dk, Dv]   of a gated delta net

A convolution reads the rows of a node's ancestors, for all nodes of a step at once. A node's matrix
is computed from its parent's, by the compiled core or by torch (delta_walk.py), or on CUDA by a
kernel (state_nodes.Score).

Known tokens are permanent whatever is accepted, so the state after a row's root is written to its
slot at once. For draft tokens only the inputs are stored until the outcome is known, a hundredth of
the size of the states: an accepted path then advances the slot's state with the same numbers and
operations in the same order, and so to the same bits as the state that its last node was scored
with.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.executors.state_slots import rows_of
from forerun.executors.state_steps import StateStep, StateSteps
from forerun.executors.torch.attention.delta_walk import DeltaWalk, DeltaWay, chosen_walk
from forerun.executors.torch.attention.geometry import tree_intervals
from forerun.executors.torch.attention.kv import bytes_of, indices, int32s, put_bytes
from forerun.executors.torch.attention.state_nodes import (
    KnownNodes,
    StateKernels,
    StateNodes,
    StateTables,
)
from forerun.executors.torch.decoder.delta import DeltaInputs, Tokens, passed_on, tokens_of
from forerun.executors.torch.decoder.recurrent import RecurrentInputs, window_sums
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import GatedDelta
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints


@dataclass(frozen=True, slots=True)
class Paths:
    """The rows and indices of a step's nodes; the same for all layers.

    past    int64[M,W] rows that the convolution reads: of B windows, then of the nodes
    rows    int64[B] the rows of states at which the trees begin
    way     inputs for the matrices: DeltaWay, or StateNodes and KnownNodes for kernels; None
            without matrices
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
    """A StateStep with tensors.

    draft_inputs  for each layer, the inputs of the draft tokens: convolution rows float32[D,C], and
                  those of the matrices
    """

    paths: Paths
    draft_inputs: list[tuple[Tensor, Tokens | None]] = field(default_factory=list)


COPY, FOLLOW = 0, 1


class StateChanges:
    """Changes that the host makes to states between steps."""

    def __init__(self) -> None:
        self._made: list[Ints] = []

    def add(self, kind: int, first: Ints, second: Ints) -> None:
        """Append a call, with int32[n] arguments of equal length: COPY, one row (-1: zeros) and the
        row to copy it to; or FOLLOW, slots and flat nodes of the last step.
        """
        numbers = np.full((2, len(first)), [[len(self._made)], [kind]])
        self._made.append(np.stack([*numbers, first, second], 1).astype(np.int32))

    def taken(self) -> Ints:
        """Return int32[n,4], all entries added since the last call: number of the call, its kind,
        and its two arguments.
        """
        made, self._made = self._made, []
        return np.concatenate([np.zeros((0, 4), np.int32), *made])


class States(StateSteps):
    """The state tables, and the bookkeeping of their rows.

    walk      advances matrices; None: `chosen_walk`
    kernels   run a step's nodes instead, if the device has any
    matrices  None if layers have none
    changes   records the calls of `copy` and `follow` if other ranks must repeat them with `change`
    """

    def __init__(
        self,
        arch: Architecture,
        limits: ExecutorLimits,
        device: torch.device,
        walk: DeltaWalk | None = None,
        kernels: StateKernels | None = None,
    ) -> None:
        super().__init__(limits)
        about, rows = arch.recurrent, rows_of(limits)
        assert about is not None
        self._kernels = kernels
        self.changes: StateChanges | None = None
        layers, self._width, self._device = arch.recurrent_layers, about.window, device
        self.windows = torch.zeros(layers, rows, about.window - 1, about.channels, device=device)
        self.matrices: Tensor | None = None
        if isinstance(about, GatedDelta):
            matrix = about.value_heads, about.key_size, about.value_size
            self._walk = walk or chosen_walk(device)
            self.matrices = torch.zeros(layers, rows, *matrix, device=device)

    def copy(self, row: int | None, to: int) -> None:
        """Implement StateSteps.copy, in all layers."""
        if self.changes is not None:
            self.changes.add(COPY, np.array([-1 if row is None else row]), np.array([to]))
        for table in (self.windows, self.matrices):
            if table is not None:
                table[:, to] = 0.0 if row is None else table[:, row]

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, in all layers."""
        return sum(part.numel() * part.element_size() for part in self._of_row(0))

    @torch.inference_mode()
    def content(self, row: int) -> bytes:
        """Implement StateSteps.content."""
        return bytes_of(self._of_row(row))

    @torch.inference_mode()
    def put(self, row: int, content: bytes | memoryview) -> None:
        """Implement StateSteps.put."""
        put_bytes(self._of_row(row), content)

    def _of_row(self, row: int) -> list[Tensor]:
        """Return views of a row's state."""
        return [table[:, row] for table in (self.windows, self.matrices) if table is not None]

    def begin(self, plan: Plan, trees: TreeBatch) -> TorchStateStep:
        """Begin a step. Returns it with the paths of its nodes. Raises EngineError as `prepare`."""
        return self.way_of(self.prepare(plan, trees))

    def way_of(self, step: StateStep) -> TorchStateStep:
        """Return a step with the paths of its nodes."""
        return TorchStateStep(step.plan, step.trees, step.claims, step.ends, self._paths(step))

    def layer(self, step: TorchStateStep, number: int, inputs: RecurrentInputs) -> Tensor:
        """Run recurrent layer `number` (counted among recurrent layers) for a step's nodes; write
        the states after known tokens. Returns float32[M,Hv,Dv], or float32[M,C] for a convolution;
        padding rows are 0.
        """
        paths, windows = step.paths, self.windows[number]
        before = windows.index_select(0, paths.rows).flatten(0, 1)
        rows = torch.cat([before, inputs.mixed])
        tokens, entering = None, inputs.mixed[paths.drafts]
        if isinstance(inputs, DeltaInputs):
            assert self.matrices is not None
            passed = passed_on(window_sums(rows, paths.past, inputs.numbers.kernel))
            tokens = tokens_of(inputs.about, inputs.numbers, passed)
            if self._kernels is None:
                found = self._walk.advance(self.matrices[number], paths.way, tokens)
            else:
                numbers = replace(inputs.numbers, mixed=passed)
                tables = StateTables(windows, self.matrices[number])
                nodes, known = paths.way
                found = self._kernels.score(inputs.about, numbers, tables, nodes, None, known)
            tokens = tokens.ordered(paths.drafts)
        else:
            found = window_sums(rows, paths.past, inputs.kernel, inputs.bias)
        nodes, targets = paths.ends
        windows[targets] = rows[paths.past[nodes, 1:]]
        step.draft_inputs.append((entering, tokens))
        out = found.new_zeros(len(inputs.mixed), *found.shape[1:])
        out[: len(found)] = found
        return out

    def follow(self, step: StateStep, slots: Ints, nodes: Ints) -> None:
        """Implement StateSteps.follow, in all layers."""
        assert isinstance(step, TorchStateStep)
        if self.changes is not None:
            self.changes.add(FOLLOW, slots, nodes)
        trees = step.trees
        row = np.searchsorted(trees.start, nodes, side="right") - 1
        known = np.concatenate([[0], np.cumsum(trees.known)])
        where = indices(slots, self._device)
        which = indices(nodes - known[row + 1], self._device)  # Among the draft tokens.
        for number, (mixed, tokens) in enumerate(step.draft_inputs):
            windows = self.windows[number]
            entering = mixed.index_select(0, which).unsqueeze(1)
            windows[where] = torch.cat([windows[where][:, 1:], entering], 1)
            if tokens is not None and self.matrices is not None:
                self._walk.follow(self.matrices[number], slots, tokens.ordered(which))

    @torch.inference_mode()
    def change(self, step: TorchStateStep | None, changes: Ints) -> None:
        """Repeat the changes that another rank has made to its states: StateChanges.taken. step:
        the last one.
        """
        for number in np.unique(changes[:, 0]).tolist():
            _, kind, first, second = changes[changes[:, 0] == number].T
            if kind[0] == FOLLOW:
                assert step is not None
                self.follow(step, first, second)
            else:
                self.copy(None if first[0] < 0 else int(first[0]), int(second[0]))

    def _paths(self, step: StateStep) -> Paths:
        trees, ends = step.trees, step.ends
        count, rows = len(trees.tokens), trees.rows
        row = np.repeat(np.arange(rows), np.diff(trees.start))
        past = np.empty((count, self._width), np.int64)
        span = rows * (self._width - 1)
        past[:, -1] = span + np.arange(count)
        first = row * (self._width - 1)
        for place in range(self._width - 2, -1, -1):
            # The entry before: the parent, or the previous one in the row's window.
            after = past[:, place + 1]
            parent = trees.parents[np.maximum(after - span, 0)]
            above = np.where(parent >= 0, span + parent, first + self._width - 2)
            past[:, place] = np.where(after >= span, above, after - 1)
        nodes, targets = np.array(list(ends.values())), np.array(list(ends))
        drafted = np.arange(count) - trees.start[row] >= trees.known[row]
        return Paths(
            past=indices(past, self._device),
            rows=indices(step.plan.slots, self._device),
            way=None if self.matrices is None else self._way(step),
            ends=(indices(nodes, self._device), indices(targets, self._device)),
            drafts=indices(np.flatnonzero(drafted), self._device),
        )

    def _way(self, step: StateStep) -> Any:
        """Return the layer-independent inputs of a step for the matrices."""
        if self._kernels is None:
            return DeltaWay.of(step)
        trees = step.trees
        counts = np.diff(trees.start)
        begin = np.repeat(trees.start[:-1], counts)
        parents = np.where(trees.parents < 0, -1, trees.parents - begin)
        parts = step.plan.slots, trees.start, counts, parents, tree_intervals(trees)
        known = int32s(trees.known, self._device), int32s(step.targets, self._device)
        return StateNodes(*(int32s(part, self._device) for part in parts)), KnownNodes(*known)
