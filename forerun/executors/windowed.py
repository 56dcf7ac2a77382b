"""Windowed: what an executor with window pages does before it does what others do."""

from typing import Any

from forerun.executors.window_pages import WindowPages
from forerun.interface.executor import Executor
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints


class Windowed(Executor):
    """Gives back what lies behind windows. Stands before the executor's own class among the bases
    of one whose limits have window pages.
    """

    windows: WindowPages

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot. Raises EngineError if a page that it reads was given
        back.
        """
        self.windows.open(slot_init)
        super().open(slot_init)  # type: ignore[safe-super]

    def reusable_prefix_len(
        self, tokens: Ints, salt: bytes = b"", pages: Ints | None = None
    ) -> int:
        """Return how many of the cached tokens int32[n] a sequence may continue behind: the most
        whose window still has its pages.
        """
        return 0 if pages is None else self.windows.reusable_prefix_len(pages)

    def close(self, slot: int) -> None:
        """Discard the slot's sequence, if it has one."""
        self.windows.close(slot)
        super().close(slot)  # type: ignore[safe-super]

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> Any:
        """Begin a step once all that it reads and writes has its place."""
        self.windows.begin(plan, trees)
        return super().begin(plan, trees, masks)  # type: ignore[safe-super]
