"""The LoRA adapter of each slot's sequence."""

import numpy as np

from forerun.interface.slot_init import SlotInit
from forerun.types import Ints


class SlotAdapters:
    """The adapter of each open slot (SlotInit.adapter)."""

    def __init__(self, slots: int) -> None:
        self._adapters = np.full(slots, -1, np.int32)

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot."""
        self._adapters[slot_init.slot] = slot_init.adapter

    def of(self, slots: Ints) -> Ints | None:
        """Return int32[n], the adapter of each slot, -1 = none; None if none has any."""
        found: Ints = self._adapters[slots]
        return found if (found >= 0).any() else None
