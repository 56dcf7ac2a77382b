"""TorchExecutor: the executor contract in torch. A step is eager (eager.py), or, if its device
captures, replayed as one program where its size was declared (captured/rounds.py).
"""

from forerun.executors.torch.captured.round import CapturedRound
from forerun.executors.torch.eager import EagerSteps
from forerun.executors.torch.model_runner import TorchRound
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints


class TorchExecutor(EagerSteps):
    """A target in torch, on any device it knows (ModelRunner, TorchOptions)."""

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot, with its sampling; where layers are recurrent with the state
        of its cached tokens. Raises EngineError if that was not kept.
        """
        if self.states is not None:
            self.states.open(slot_init)
        self.sampler.open(slot_init)
        if self.rounds is not None:
            self.rounds.open(slot_init)
        if self.slot_adapters is not None:
            self.slot_adapters.open(slot_init)

    def close(self, slot: int) -> None:
        """Forget a slot's sequence. Its pages are the caller's."""
        self.sampler.close(slot)
        if self.states is not None:
            self.states.book.close(slot)

    def begin(
        self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None
    ) -> TorchRound | CapturedRound:
        """Begin a step: as a round that drafts, accepts and writes by itself, if it can be one."""
        round = None if self.rounds is None else self.rounds.begin(plan, trees, masks)
        return self.begin_eager(plan, trees, masks) if round is None else round

    def begin_after(self, running: Round, plan: Plan, ends: Ints) -> CapturedRound | None:
        """Begin a round on what the running one leaves; None if no round can."""
        return None if self.rounds is None else self.rounds.begin_after(running, plan, ends)

    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Wait for a step, decide what its device has not, and make what was accepted
        permanent.
        """
        if isinstance(round, CapturedRound) and self.rounds is not None:
            return self.rounds.finish(round, masks)
        return self.finish_eager(round, masks)
