"""Opening and closing a slot with everyone who keeps something by slot."""

from forerun.engine.sequence import Sequence
from forerun.engine.step import Parts


class SlotRegistry:
    """Which slots are open to executor, drafter, policy and grammars.

    open_slots  the open slots, with whom they are open to; `close` of any other does nothing
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.open_slots: dict[int, Sequence] = {}

    def open(self, sequence: Sequence) -> None:
        """Open the slot of `sequence` to all. Raises what they raise; then `close` cleans up."""
        slot_init = sequence.slot_init()
        self._parts.executor.open(slot_init)
        self.open_slots[slot_init.slot] = sequence
        self._parts.ask_drafter(lambda drafter: drafter.begin(slot_init), None)
        self._parts.policy.open(slot_init.slot)
        grammar = sequence.request.grammar
        if grammar is not None:
            self._parts.grammars.open(slot_init.slot, grammar, sequence.output.tolist())

    def close(self, slot: int) -> None:
        """Close a slot to all that it was opened to."""
        sequence = self.open_slots.pop(slot, None)
        if sequence is None:
            return
        if sequence.request.grammar is not None:
            self._parts.grammars.close(slot)
        self._parts.ask_drafter(lambda drafter: drafter.end(slot), None)
        self._parts.executor.close(slot)

    def abandon(self) -> None:
        """Speak to nobody any more: the engine gives up, and another failure would hide why."""
        self.open_slots.clear()
