"""Captured rounds of a target whose layers with a window have pages of their own: each round has a
second page table, of window pages.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun.executors.torch.attention.geometry import positions_of
from forerun.executors.torch.attention.window_cache import WindowCache, window_cache
from forerun.executors.torch.captured.buffers import PageTables, TableEntries
from forerun.executors.torch.captured.entries import KindOfPages
from forerun.executors.torch.captured.executor import CapturedExecutor
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.triton.record import Size
from forerun.executors.torch.triton.round_types import RoundInputs
from forerun.executors.torch.windowed import WindowedTorchExecutor
from forerun.executors.windowed import WindowedOverlap
from forerun.interface.plan import Plan
from forerun.types import AnyArray


class _Near(PageTables):
    """The window pages of slots' page tables."""

    sent = ("near_sent",)


class WindowTables(PageTables):
    """Page tables and their window pages. What was given back stays in the device's, where no
    window shows it.

    cache  which window pages there are; set before the first `send`
    """

    sent = (*PageTables.sent, *_Near.sent)
    cache: WindowCache

    def __init__(self, slots: int, width: int, rows: int, device: torch.device) -> None:
        super().__init__(slots, width, rows, device)
        self._near = _Near(slots, width, rows, device)

    @property
    def kinds(self) -> tuple[PageTables, ...]:
        """Both tables."""
        return (self, self._near)

    def send(self, buffers: dict[str, AnyArray], plan: Plan) -> tuple[TableEntries, ...]:
        """Write what the device does not have into `buffers`, as PageTables.send does, of both."""
        near = replace(plan, page_table=self.cache.table(plan.page_table))
        return (*super().send(buffers, plan), *self._near.send(buffers, near))

    def forget(self) -> None:
        """Mark the device's tables of both kinds as unknown."""
        super().forget()
        self._near.forget()

    def of(self, size: Size, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `table` and `near` int32[R,W], a round's tables of both kinds. Launches only."""
        near = self._near.of(size, inputs)["table"]
        return super().of(size, inputs) | {"near": near}


class WindowRunner(CudaGraphRunner):
    """The program of rounds with window pages."""

    Tables = WindowTables

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        assert isinstance(self.tables, WindowTables)
        self.tables.cache = window_cache(self._cache)

    def _kinds(self, inputs: RoundInputs, whole: KindOfPages) -> tuple[KindOfPages, ...]:
        table, cache = inputs["near"], window_cache(self._cache)
        position, shape = positions_of(whole.geometry), self._shape
        slots, pages = self.kernels.near(position, whole.slots, table, shape, cache.behind)
        geometry = replace(whole.geometry, slots=slots, table=table)
        return whole, KindOfPages(cache, geometry, slots, pages)


class WindowedRounds(WindowedOverlap, CapturedExecutor):
    """A CapturedExecutor around a WindowedTorchExecutor."""

    Runner = WindowRunner

    def __init__(self, eager: WindowedTorchExecutor, *arguments: Any, **named: Any) -> None:
        super().__init__(eager, *arguments, **named)
        self.windows = eager.windows
