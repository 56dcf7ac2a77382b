"""What an engine is put together from."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from forerun.control.policy import Policy, off
from forerun.engine.sequence import Sequence
from forerun.interface.drafter import Drafter
from forerun.interface.executor import Executor
from forerun.interface.grammars import Grammars
from forerun.text.tokenizer import Tokenizer

log = logging.getLogger("forerun.engine")

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Parts:
    """What an engine is put together from, and which slots are open to all of it.

    fault       why nothing is drafted although it should be, in the words of `off`; None = all is
                well
    open_slots  with whom they are open to; `close` of any other does nothing
    """

    executor: Executor
    drafter: Drafter
    policy: Policy
    tokenizer: Tokenizer
    grammars: Grammars
    fault: str | None = None
    open_slots: dict[int, Sequence] = field(default_factory=dict)

    def ask_drafter(self, question: Callable[[Drafter], Answer], otherwise: Answer) -> Answer:
        """The drafter's answer, until it raises for the first time: that ends speculation, but no
        request. From then on it is not asked again, since what it knows of the sequences may be
        half written; the answer is `otherwise`.
        """
        if self.fault is not None:
            return otherwise
        try:
            return question(self.drafter)
        except Exception as error:
            name, what = self.drafter.traits.name, f"{type(error).__name__}: {error}"
            self.fault = off(f"the drafter {name} failed with {what}")
            log.exception("%s", self.fault)
            self.policy.disable(self.fault)
            return otherwise

    def close(self, slot: int) -> None:
        """Close a slot to all that it was opened to."""
        sequence = self.open_slots.pop(slot, None)
        if sequence is None:
            return
        if sequence.request.grammar is not None:
            self.grammars.close(slot)
        self.ask_drafter(lambda drafter: drafter.end(slot), None)
        self.executor.close(slot)

    def abandon(self) -> None:
        """Speak to nobody any more: the engine gives up, and another failure would hide why."""
        self.open_slots.clear()
