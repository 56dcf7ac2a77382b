"""The CPU executor with window pages for sliding-window layers."""

from dataclasses import replace
from typing import Any

from forerun.executors.cpu.adapted import AdaptedCpuExecutor
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.window_pages import WindowPages
from forerun.executors.windowed import Windowed, WindowedPages
from forerun.interface.executor import ExecutorLimits


class WindowedCpuExecutor(Windowed, CpuExecutor):
    """A CpuExecutor whose limits have window pages: it frees pages behind every window."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.windows = WindowPages(self.limits)
        self._library.forerun_set_window_pages(self.native_model(), self.windows.of.ctypes.data)
        self.pages = self.window_contents = WindowedPages(self.model, self.windows)
        self.capabilities = replace(self.capabilities, unwritten=False)


class _AdaptedWindowedCpuExecutor(AdaptedCpuExecutor, WindowedCpuExecutor):
    pass


def kind_of(limits: ExecutorLimits, adapted: bool) -> type[CpuExecutor]:
    """Return the executor class for these limits. adapted: whether LoRA adapters are loaded."""
    if limits.window_pages:
        return _AdaptedWindowedCpuExecutor if adapted else WindowedCpuExecutor
    return AdaptedCpuExecutor if adapted else CpuExecutor
