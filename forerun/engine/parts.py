"""The parts that an engine consists of."""

from dataclasses import dataclass, field

from forerun.control.policy import Policy
from forerun.engine.guarded import GuardedDrafter
from forerun.engine.sequence import Sequence
from forerun.interface.executor import Executor
from forerun.interface.grammars import Grammars
from forerun.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Parts:
    """The parts that an engine consists of, and which slots are open in all of them.

    open_slots  and the sequences in them; `close` of any other slot does nothing
    """

    executor: Executor
    drafter: GuardedDrafter
    policy: Policy
    tokenizer: Tokenizer
    grammars: Grammars
    open_slots: dict[int, Sequence] = field(default_factory=dict)

    def close(self, slot: int) -> None:
        """Close a slot in all parts where it is open."""
        sequence = self.open_slots.pop(slot, None)
        if sequence is None:
            return
        if sequence.request.grammar is not None:
            self.grammars.close(slot)
        self.drafter.end(slot)
        self.executor.close(slot)

    def abandon(self) -> None:
        """Call no part for any slot from now on: the engine gives up, and a second failure would
        hide the first.
        """
        self.open_slots.clear()
