"""Captured rounds of models with recurrent states: which row of states gets a checkpoint, and the
paths that the host decides. What happens on the device: states.py.

A checkpoint's row is reserved before its round, which may begin before the outcome of the one
before it is known; it is made when the round has passed an end of a page, and dropped if not.
"""

from collections.abc import Callable

import numpy as np
import torch

from forerun.executors.torch.captured.buffers import StagingBuffer
from forerun.executors.torch.captured.executor import CapturedExecutor
from forerun.executors.torch.captured.graphs import CudaRecorder
from forerun.executors.torch.captured.round import CapturedRound
from forerun.executors.torch.captured.states import RoundStates
from forerun.executors.torch.executor import TorchExecutor
from forerun.executors.torch.model_runner import TorchRound
from forerun.executors.torch.triton.kernels import Kernels
from forerun.executors.torch.triton.record import Size
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Bools, Ints

Reserved = dict[int, int]
"""Slot -> the row of states that a round may copy its state to."""


class RecurrentExecutor(CapturedExecutor):
    """CapturedExecutor where layers have recurrent states."""

    def __init__(
        self, eager: TorchExecutor, kernels: Kernels, records: CudaRecorder, overlap: bool = False
    ) -> None:
        super().__init__(eager, kernels, records, overlap)
        assert eager.states is not None
        self._states = eager.states
        self.round_states = self.runner.states = RoundStates(
            eager.states, kernels.states, eager.decoder.arch, eager.limits
        )
        self._reserved: dict[CapturedRound, Reserved] = {}

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot, with the state of its cached tokens. Raises EngineError if
        that was not kept.
        """
        self._states.open(slot_init)
        super().open(slot_init)

    def reusable_prefix_len(
        self, tokens: Ints, salt: bytes = b"", pages: Ints | None = None
    ) -> int:
        """Return how many tokens int32[n] a sequence may continue behind, as TorchExecutor does."""
        return self.eager.reusable_prefix_len(tokens, salt, pages)

    def close(self, slot: int) -> None:
        """Forget a slot's sequence. Its pages are the caller's."""
        super().close(slot)
        self._states.book.close(slot)

    def begin(
        self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None
    ) -> TorchRound | CapturedRound:
        """Begin a round as CapturedExecutor does. Raises EngineError if a slot's state does not
        stand for the plan's kv_len tokens.
        """
        for slot, length in zip(plan.slots.tolist(), plan.kv_len.tolist(), strict=True):
            self._states.book.check_length(slot, length)
        return super().begin(plan, trees, masks)

    def _launch(
        self,
        size: Size,
        staging: StagingBuffer,
        plan: Plan,
        decided: Bools,
        first: Callable[[], None] | None = None,
    ) -> CapturedRound:
        """Launch with a row reserved for each slot that may pass an end of a page."""
        book, copies = self._states.book, staging.buffers["copies"]
        reserved = Reserved()
        for row, slot in enumerate(plan.slots.tolist()):
            to = book.reserve(slot, int(plan.kv_len[row]) + size.nodes)
            if to is not None:
                reserved[slot] = copies[row] = to
        try:
            round = super()._launch(size, staging, plan, decided, first)
        except BaseException:
            book.drop(reserved.values())
            raise
        self._reserved[round] = reserved
        return round

    @torch.inference_mode()
    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Finish as CapturedExecutor does; advance the states of rows that the host decides, and
        make the checkpoints of all.
        """
        if not isinstance(round, CapturedRound):
            return super().finish(round, masks)
        book, reserved = self._states.book, self._reserved.pop(round)
        try:
            outcome = super().finish(round, masks)
            self._follow(round, outcome)
        except BaseException:
            book.drop(reserved.values())
            raise
        for row, slot in enumerate(round.plan.slots.tolist()):
            end = int(round.plan.kv_len[row]) + 1 + len(outcome.paths[row])
            to = reserved.get(slot)
            if not outcome.finite[row]:  # The device has not gone so far, and no step follows.
                book.drop([to] if to is not None else ())
                book.end(slot, -1)
                continue
            book.settle(slot, to, end, outcome.output_tokens[row])
        return outcome

    def _follow(self, round: CapturedRound, outcome: Outcome) -> None:
        """Advance the states of rows that the device has left to the host."""
        size, left = round.size, np.flatnonzero(~round.decided).tolist()
        if not left:
            return
        kept = np.zeros(size.total, np.bool_)
        for row in left:
            kept[round.place[outcome.permanent(round.trees, row)]] = True
        path = torch.from_numpy(kept.reshape(size.rows, size.nodes)).to(self.device)
        self.round_states.follow(size, self.runner.of(size).buffers, path)
