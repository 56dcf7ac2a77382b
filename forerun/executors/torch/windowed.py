"""WindowedTorchExecutor: a torch executor with window pages for sliding-window layers."""

from typing import Any

from forerun.executors.torch.attention.window_cache import window_cache
from forerun.executors.torch.executor import TorchExecutor
from forerun.executors.window_pages import WindowPages
from forerun.executors.windowed import Windowed
from forerun.interface.executor import ExecutorLimits


class WindowedTorchExecutor(Windowed, TorchExecutor):
    """A TorchExecutor whose limits have window pages: it frees the window pages behind each
    window.
    """

    windows: WindowPages

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.windows = WindowPages(self.limits)
        window_cache(self.cache).of = self.windows.of


def torch_executor(limits: ExecutorLimits) -> type[TorchExecutor]:
    """Return the class of executors with these limits."""
    return WindowedTorchExecutor if limits.window_pages else TorchExecutor
