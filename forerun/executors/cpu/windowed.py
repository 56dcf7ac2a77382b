"""WindowedCpuExecutor: the compiled core with window pages for layers that see a window."""

from dataclasses import replace
from typing import Any

from forerun.executors.cpu.adapted import AdaptedCpuExecutor
from forerun.executors.cpu.executor import CpuExecutor, CpuRound
from forerun.executors.window_pages import WindowPages
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints


class WindowedCpuExecutor(CpuExecutor):
    """A CpuExecutor whose limits have window pages: it gives back what lies behind windows."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.windows = WindowPages(self.limits)
        self._library.forerun_set_window_pages(self.native_model(), self.windows.of.ctypes.data)
        self.pages = None  # What was given back cannot be copied.
        self.capabilities = replace(self.capabilities, unwritten=False)

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot, as CpuExecutor does. Raises EngineError if a page that it
        reads was given back.
        """
        self.windows.open(slot_init)
        super().open(slot_init)

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
        super().close(slot)

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> CpuRound:
        """Run every node, as CpuExecutor does, once all that it reads and writes has its place."""
        self.windows.begin(plan, trees)
        return super().begin(plan, trees, masks)


class _AdaptedWindowedCpuExecutor(AdaptedCpuExecutor, WindowedCpuExecutor):
    pass


def kind_of(limits: ExecutorLimits, adapted: bool) -> type[CpuExecutor]:
    """Return the class that runs these limits. adapted: with LoRA adapters beside the weights."""
    if limits.window_pages:
        return _AdaptedWindowedCpuExecutor if adapted else WindowedCpuExecutor
    return AdaptedCpuExecutor if adapted else CpuExecutor
