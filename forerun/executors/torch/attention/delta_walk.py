"""Advances recurrent states over the nodes of a step: node by node in plain torch if there is no
compiled core, else by the core (csrc/delta.inl), one call per layer, with bit-identical results.
The torch version defines the order of sums. In the core sixteen columns of a state stay in the L1
cache while all tokens of a prompt are processed.
"""

from dataclasses import dataclass
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.executors.state_steps import StateStep
from forerun.executors.torch.attention.kv import indices
from forerun.executors.torch.decoder.delta import Tokens, advance, read
from forerun.types import AnyArray, Ints


@dataclass(frozen=True, slots=True)
class DeltaWay:
    """The layer-independent inputs of a step; arrays that the compiled core reads.

    start    int32[R+1]  row r has nodes start[r]:start[r+1]
    known    int32[R] how many leading nodes of a row, a chain, are permanent, at least one
    parents  int32[M] flat; -1: none
    slots    int64[R] rows of the state table at which the trees begin, and to which the states
             after the known nodes are written
    targets  int64[M] row to which the state after a node is copied; -1: none
    """

    start: AnyArray
    known: AnyArray
    parents: AnyArray
    slots: AnyArray
    targets: AnyArray

    @staticmethod
    def of(step: StateStep) -> "DeltaWay":
        """Return the arrays of a step, on the host."""
        trees = step.trees
        start, known, parents = (
            np.ascontiguousarray(each, np.int32)
            for each in (trees.start, trees.known, trees.parents)
        )
        return DeltaWay(start, known, parents, step.plan.slots.astype(np.int64), step.targets)


class PlainDelta:
    """Advances states in torch: computes each node's state from its parent's, one node after the
    other.
    """

    def advance(self, states: Tensor, way: DeltaWay, tokens: Tokens) -> Tensor:
        """Return float32[M,Hv,Dv], the nodes' outputs along a step's trees. Writes the states
        float32[rows,Hv,Dk,Dv] after known tokens.
        """
        found = torch.zeros_like(tokens.values)

        def run(here: Tensor, node: int) -> None:
            mine = tokens.part(node, node + 1)
            advance(here, mine)
            found[node] = read(here, mine)[0]

        rows = zip(way.slots.tolist(), way.start.tolist(), way.known.tolist(), strict=False)
        for row, (slot, begin, known) in enumerate(rows):
            here = states[slot : slot + 1].clone()
            for node in range(begin, begin + known):
                run(here, node)
                if way.targets[node] >= 0:
                    states[int(way.targets[node])] = here[0]
            states[slot] = here[0]
            made = {begin + known - 1: here}
            for node in range(begin + known, int(way.start[row + 1])):
                made[node] = made[int(way.parents[node])].clone()
                run(made[node], node)
        return found

    def follow(self, states: Tensor, rows: Ints, tokens: Tokens) -> None:
        """Advance the states of rows int32[n], which are distinct, by one token each; tokens: of n
        nodes. Writes `states`.
        """
        where = indices(rows, states.device)
        here = states.index_select(0, where)
        advance(here, tokens)
        states[where] = here


class NativeDelta:
    """Advances the states of a torch executor on the CPU, with as many threads as torch has.

    kernels  an instruction set by name; "": the best

    Raises OSError if there is no core, EngineError if it has no such kernels.
    """

    def __init__(self, kernels: str = "") -> None:
        self._library = native.load()
        self._handle = self._library.forerun_delta_open(kernels.encode(), torch.get_num_threads())
        if not self._handle:
            raise EngineError(f"the core: {self._library.forerun_error().decode()}")
        finalize(self, self._library.forerun_delta_close, self._handle)

    def advance(self, states: Tensor, way: DeltaWay, tokens: Tokens) -> Tensor:
        """Compute PlainDelta.advance, float32[M,Hv,Dv], in the same order of nodes."""
        found = torch.empty(tokens.values.shape)
        self._run(states, way, tokens, found)
        return found

    def follow(self, states: Tensor, rows: Ints, tokens: Tokens) -> None:
        """Compute PlainDelta.follow: update the rows int32[n] of `states`."""
        count = len(rows)
        ones, none = np.ones(count, np.int32), np.full(count, -1, np.int64)
        start = np.arange(count + 1, dtype=np.int32)
        way = DeltaWay(
            start, ones, none.astype(np.int32), np.ascontiguousarray(rows, np.int64), none
        )
        self._run(states, way, tokens, None)

    def _run(self, states: Tensor, way: DeltaWay, tokens: Tokens, out: Tensor | None) -> None:
        """Run one layer. Makes all tensors contiguous, since the core receives pointers."""
        assert states.is_contiguous() and states.dtype == torch.float32
        kept = [
            part.contiguous()
            for part in (tokens.queries, tokens.keys, tokens.values, tokens.decay, tokens.beta)
        ]
        queries, *others = (part.data_ptr() for part in kept)
        arrays = way.start, way.known, way.parents, way.slots, way.targets
        step = native.DeltaStep(
            len(way.slots),
            *(tokens.keys.shape[1], states.shape[1], *states.shape[2:], tokens.tiled),
            *(each.ctypes.data for each in arrays),
            states.data_ptr(),
            queries if out is not None else None,
            *others,
            out.data_ptr() if out is not None else None,
        )
        self._library.forerun_delta_run(self._handle, step)


DeltaWalk = PlainDelta | NativeDelta
"""The implementations that advance a layer's states."""


def chosen_walk(device: torch.device) -> DeltaWalk:
    """Return NativeDelta on a CPU with the compiled core; else PlainDelta."""
    if device.type == "cpu" and native.available() is None:
        return NativeDelta()
    return PlainDelta()
