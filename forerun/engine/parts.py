"""The parts that an engine consists of."""

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
    """The parts that an engine consists of, and which slots are open in all of them.

    fault       why speculation is off, in the words of `off`; None = it is not
    open_slots  and the sequences in them; `close` of any other slot does nothing
    """

    executor: Executor
    drafter: Drafter
    policy: Policy
    tokenizer: Tokenizer
    grammars: Grammars
    fault: str | None = None
    open_slots: dict[int, Sequence] = field(default_factory=dict)

    def ask_drafter(self, question: Callable[[Drafter], Answer], otherwise: Answer) -> Answer:
        """Call the drafter. If it raises, speculation ends, but no request: from then on the
        drafter, whose state may be inconsistent, is not called any more, and every call returns
        `otherwise`.
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
        """Close a slot in all parts where it is open."""
        sequence = self.open_slots.pop(slot, None)
        if sequence is None:
            return
        if sequence.request.grammar is not None:
            self.grammars.close(slot)
        self.ask_drafter(lambda drafter: drafter.end(slot), None)
        self.executor.close(slot)

    def abandon(self) -> None:
        """Call no part for any slot from now on: the engine gives up, and a second failure would
        hide the first.
        """
        self.open_slots.clear()
