"""WindowedJaxExecutor: a JAX executor with window pages for sliding-window layers."""

from typing import Any

import numpy as np

from forerun.errors import EngineError
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.window_pages import WindowPages
from forerun.executors.windowed import Windowed
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints


class WindowedJaxExecutor(Windowed, JaxExecutor):
    """A JaxExecutor whose limits have window pages: it frees the window pages behind each
    window.
    """

    windows: WindowPages

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.windows = WindowPages(self.limits)

    def page_tables(self, pages: Ints) -> Ints:
        """Return int32[R,2,W]: the engine's pages, and the window page of each; for a page without
        one an arbitrary number, which no window reads.
        """
        whole = super().page_tables(pages)
        return np.concatenate([whole, self.windows.of[whole].clip(0)], 1)

    def _check_pages(self, plan: Plan, trees: TreeBatch) -> None:
        super()._check_pages(plan, trees)
        size, places = self.limits.page_size, np.arange(plan.page_table.shape[1])
        ends = plan.kv_len + np.maximum.reduceat(trees.depth, trees.start[:-1]) + 1
        written = (places >= plan.kv_len[:, None] // size) & (places < -(-ends // size)[:, None])
        if (self.windows.of[plan.page_table] < 0)[written].any():
            raise EngineError("a page of a window that was given back would be written")


def jax_executor(limits: ExecutorLimits) -> type[JaxExecutor]:
    """Return the class of executors with these limits."""
    return WindowedJaxExecutor if limits.window_pages else JaxExecutor
