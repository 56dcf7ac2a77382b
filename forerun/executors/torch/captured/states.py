"""Recurrent states in captured rounds: scored over trees, and advanced along accepted paths before
the round ends.

    forward   each layer's inputs of the nodes are kept; the states do not change
    accept    every decided row's state advances along its path, in all layers at once; other
              branches have no effect
    finish    the host advances the rows that it decided itself

A path is scored and made permanent with the same numbers in the same order, so a state does not
depend on the trees of earlier steps. The kept inputs are a hundredth of the size of as many nodes'
states.

A checkpoint's row of states is reserved before its round, which may begin before the outcome of the
previous one is known; it becomes a checkpoint if the round has passed a page end, else it is freed.
"""

import numpy as np
import torch
from torch import Tensor

from forerun.executors.torch.attention.state_nodes import (
    PathNodes,
    StateKernels,
    StateNodes,
    StateTables,
)
from forerun.executors.torch.attention.states import States
from forerun.executors.torch.captured.round import CapturedRound, Reserved, StagingBuffer
from forerun.executors.torch.decoder.delta import DeltaInputs, DeltaNumbers
from forerun.executors.torch.decoder.recurrent import Recur, RecurrentInputs
from forerun.executors.torch.sizes import Size
from forerun.executors.torch.triton.round_types import RoundInputs
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Outcome, Plan
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import GatedDelta
from forerun.types import AnyArray


def _nodes(inputs: RoundInputs) -> StateNodes:
    names = "slot", "start", "count", "parents", "tree_intervals"
    return StateNodes(*(inputs[name] for name in names))


class RoundStates:
    """The part of a round's program that handles recurrent states. Between rounds it keeps only the
    nodes' inputs and the checkpoints that rounds write.
    """

    def __init__(
        self, states: States, kernels: StateKernels, arch: Architecture, limits: ExecutorLimits
    ) -> None:
        """Allocate room for the inputs of the most nodes of a round."""
        self._kernels, self._page_size, most = kernels, limits.page_size, limits.scored_nodes
        self._book = states.book
        self._tables, device = StateTables(states.windows, states.matrices), states.windows.device
        about = arch.recurrent
        assert about is not None
        self._about, self._layers, self._width = about, arch.recurrent_layers, about.window
        self._past = torch.zeros(most, about.window, dtype=torch.int32, device=device)
        self._mixed = torch.zeros(self._layers, most, about.channels, device=device)
        self._numbers: DeltaNumbers | None = None
        if isinstance(about, GatedDelta):
            kernel = torch.zeros(self._layers, about.channels, about.window, device=device)
            rate, step = torch.zeros(2, self._layers, about.value_heads, device=device)
            gates = torch.zeros(self._layers, most, 2 * about.value_heads, device=device)
            self._numbers = DeltaNumbers(self._mixed, gates, kernel, rate, step)
        self._known = set[int]()  # Layers whose weights are in `_numbers`.

    # --- asynchronous: no shape and no branch depends on a value ---------------------------

    def enter(self, size: Size, inputs: RoundInputs) -> Recur:
        """Return the function that runs the recurrent layers of one round."""
        nodes = _nodes(inputs)
        past = self._past[: size.total]
        past.copy_(self._kernels.ancestors(nodes, self._width))

        def recur(layer: int, found: RecurrentInputs) -> Tensor:
            tables = self._of_layer(layer)
            mixed = self._mixed[layer, : size.total]
            if not isinstance(found, DeltaInputs):
                mixed.copy_(found.mixed)
                return self._kernels.convolve(mixed, found.kernel, found.bias, tables, nodes, past)
            own, numbers = found.numbers, self._kept(layer, found.numbers)
            gates = numbers.gates[layer, : size.total]
            mixed.copy_(own.mixed)
            gates.copy_(own.gates)
            brought = DeltaNumbers(mixed, gates, own.kernel, own.rate, own.step)
            return self._kernels.score(found.about, brought, tables, nodes, past)

        return recur

    def follow(self, size: Size, inputs: RoundInputs, kept: Tensor) -> None:
        """Advance the states of rows along paths, bool[R,N] nodes, of the round that ran last;
        those of other rows do not change. Copies states at page ends to the rows named in `inputs`.
        """
        nodes, past = _nodes(inputs), self._past[: size.total]
        path = PathNodes(kept, inputs["depth"], inputs["kv_len"], inputs["copies"], self._page_size)
        if self._numbers is not None and isinstance(self._about, GatedDelta):
            self._kernels.advance(self._about, self._numbers, self._tables, nodes, past, path)
        self._kernels.shift(self._mixed, self._tables, nodes, past, path)

    def _of_layer(self, layer: int) -> StateTables:
        windows, matrices = self._tables.windows, self._tables.matrices
        return StateTables(windows[layer], None if matrices is None else matrices[layer])

    def _kept(self, layer: int, own: DeltaNumbers) -> DeltaNumbers:
        """Return the numbers of all layers; the first time a layer runs, which is never in a
        captured round, its weights are copied there.
        """
        numbers = self._numbers
        assert numbers is not None
        if layer not in self._known:
            self._known.add(layer)
            numbers.kernel[layer], numbers.rate[layer] = own.kernel, own.rate
            numbers.step[layer] = own.step
        return numbers

    # --- the host's half ---------------------------------------------------------------------

    def check(self, plan: Plan) -> None:
        """Raise EngineError if a slot's state does not cover exactly the plan's kv_len tokens."""
        for slot, length in zip(plan.slots.tolist(), plan.kv_len.tolist(), strict=True):
            self._book.check_length(slot, length)

    def reserve(self, size: Size, staging: StagingBuffer, plan: Plan) -> Reserved:
        """Reserve a row for each slot that may pass a page end, and write it to `staging`."""
        reserved, copies = Reserved(), staging.buffers["copies"]
        for row, slot in enumerate(plan.slots.tolist()):
            to = self._book.reserve(slot, int(plan.kv_len[row]) + size.nodes)
            if to is not None:
                reserved[slot] = copies[row] = to
        return reserved

    def drop(self, reserved: Reserved) -> None:
        """Free the rows reserved for a round that failed."""
        self._book.drop(reserved.values())

    def finish(
        self, round: CapturedRound, inputs: RoundInputs, outcome: Outcome, left: AnyArray
    ) -> None:
        """Advance the states of the rows int[n] in `left`, which the device has left to the host,
        and create the checkpoints of all rows.
        """
        if len(left):
            self._follow_host(round, inputs, outcome, left)
        for row, slot in enumerate(round.plan.slots.tolist()):
            end = int(round.plan.kv_len[row]) + 1 + len(outcome.paths[row])
            to = round.reserved.pop(slot, None)
            if not outcome.finite[row]:  # The device has not advanced so far, and no step follows.
                self._book.drop([to] if to is not None else ())
                self._book.end(slot, -1)
                continue
            self._book.settle(slot, to, end, outcome.output_tokens[row])

    def _follow_host(
        self, round: CapturedRound, inputs: RoundInputs, outcome: Outcome, left: AnyArray
    ) -> None:
        size, kept = round.size, np.zeros(round.size.total, np.bool_)
        for row in left.tolist():
            kept[round.place[outcome.permanent(round.trees, row)]] = True
        path = torch.from_numpy(kept.reshape(size.rows, size.nodes)).to(self._past.device)
        self.follow(size, inputs, path)
