"""Rounds of models with recurrent states: which row of states gets a checkpoint, and the paths that
the host decides. What happens on the device: states.py.

A checkpoint's row is reserved before its round, which may begin before the outcome of the one
before it is known; it is made when the round has passed an end of a page, and dropped if not.
"""

import numpy as np
import torch

from forerun.executors.torch.attention.states import States
from forerun.executors.torch.captured.round import CapturedRound, Reserved, StagingBuffer
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.triton.record import Size
from forerun.interface.plan import Outcome, Plan
from forerun.types import AnyArray


class StateRows:
    """The rows of states that rounds write, beside those of their slots."""

    def __init__(self, states: States, runner: CudaGraphRunner) -> None:
        self._book, self._runner, self._device = states.book, runner, states.windows.device

    def check(self, plan: Plan) -> None:
        """Raise EngineError if a slot's state does not stand for the plan's kv_len tokens."""
        for slot, length in zip(plan.slots.tolist(), plan.kv_len.tolist(), strict=True):
            self._book.check_length(slot, length)

    def reserve(self, size: Size, staging: StagingBuffer, plan: Plan) -> Reserved:
        """Reserve a row for each slot that may pass an end of a page, and write it into
        `staging`.
        """
        reserved, copies = Reserved(), staging.buffers["copies"]
        for row, slot in enumerate(plan.slots.tolist()):
            to = self._book.reserve(slot, int(plan.kv_len[row]) + size.nodes)
            if to is not None:
                reserved[slot] = copies[row] = to
        return reserved

    def drop(self, reserved: Reserved) -> None:
        """Free the rows of a round that failed."""
        self._book.drop(reserved.values())

    def finish(self, round: CapturedRound, outcome: Outcome, left: AnyArray) -> None:
        """Advance the states of the rows int[n] that the device has `left` to the host, and make
        the checkpoints of all.
        """
        if len(left):
            self._follow(round, outcome, left)
        for row, slot in enumerate(round.plan.slots.tolist()):
            end = int(round.plan.kv_len[row]) + 1 + len(outcome.paths[row])
            to = round.reserved.pop(slot, None)
            if not outcome.finite[row]:  # The device has not gone so far, and no step follows.
                self._book.drop([to] if to is not None else ())
                self._book.end(slot, -1)
                continue
            self._book.settle(slot, to, end, outcome.output_tokens[row])

    def _follow(self, round: CapturedRound, outcome: Outcome, left: AnyArray) -> None:
        size, states = round.size, self._runner.states
        assert states is not None
        kept = np.zeros(size.total, np.bool_)
        for row in left.tolist():
            kept[round.place[outcome.permanent(round.trees, row)]] = True
        path = torch.from_numpy(kept.reshape(size.rows, size.nodes)).to(self._device)
        states.follow(size, self._runner.of(size).buffers, path)
