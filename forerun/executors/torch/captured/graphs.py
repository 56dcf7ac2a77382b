"""Replays a step of one shape as one program where the device can do that: CUDA graphs, their
streams, memory pools, and what must not happen during a capture.

A decode step is some hundred small kernels; on a GPU their launches cost more than their work.
A CUDA graph replays them all in one launch. It freezes addresses and shapes, so everything that
changes from step to step must live in tensors made beforehand, and nothing may wait for the host.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from time import perf_counter
from typing import TypeVar

import torch

from forerun.errors import EngineError

Size = TypeVar("Size", bound=int | tuple[int, ...])
"""The key of a program among those of its kind."""

_CAPTURING = Lock()


@contextmanager
def uncollected() -> Iterator[None]:
    """Allow one capture at a time, without garbage collection: CUDA invalidates a capture during
    which a graph is destroyed whose owner is gone.
    """
    with _CAPTURING:
        work_on = gc.enable if gc.isenabled() else gc.disable
        gc.disable()
        try:
            yield
        finally:
            work_on()


class CudaRecorder:
    """CUDA graphs of one owner on one device. They share a memory pool: no two run at a time.

    Warm-ups and captures run on one stream of the recorder's own. A library initialises per stream
    (cuBLAS takes its workspace when a stream first multiplies): the warm-up does that outside of
    the pool, so that no workspace is freed with a graph or mixed up in another capture. A pool is
    never captured into again once its graphs are gone: torch asserts that a graph still uses it
    while tensors in it live.

    cuda  the library; tests have one with its rules and without a device
    """

    cuda = torch.cuda

    def __init__(self, device: torch.device) -> None:
        index = self.cuda.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        with self.cuda.device(self._device):
            self._stream = self.cuda.Stream()
            self._pool = self.cuda.graph_pool_handle()

    def launch(self, work: Callable[[], None]) -> Callable[[], None]:
        """Launch `work` on the current stream; return a function that blocks until it has
        finished.
        """
        with self.cuda.device(self._device):
            work()
            event = self.cuda.Event()
            event.record(self.cuda.current_stream())
        return event.synchronize

    def warm(self, work: Callable[[], None]) -> None:
        """Run `work` for real, so that libraries set themselves up outside of a capture."""
        with self.cuda.device(self._device):
            current = self.cuda.current_stream()
            self._stream.wait_stream(current)
            with self.cuda.stream(self._stream):
                work()
            current.wait_stream(self._stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work` as one graph, without running it; returns what replays it. Other threads
        may go on using the device meanwhile.
        """
        with self.cuda.device(self._device), uncollected():
            graph = self.cuda.CUDAGraph()
            with self.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        replay: Callable[[], None] = graph.replay
        return replay

    def forget(self) -> None:
        """Wait for what was begun: everything captured so far may be dropped afterwards, and the
        next capture gets a fresh pool.
        """
        with self.cuda.device(self._device):
            self.cuda.synchronize()
            self._pool = self.cuda.graph_pool_handle()


def recorder(device: torch.device) -> CudaRecorder | None:
    """Return a recorder with its own pool and stream on a CUDA device; None elsewhere, where
    nothing is captured.
    """
    return CudaRecorder(device) if device.type == "cuda" else None


class CapturedPrograms(dict[Size, Callable[[], None]]):
    """What runs `work(size)`, by size: its replay, once captured. A size that is not captured runs
    directly the first time, which is also its warm-up, and is captured the second time, so that
    every call does the work exactly once.

    sealed   a size that was not captured is an error from now on, until all is forgotten
    seconds  spent on first calls and captures
    """

    def __init__(self, work: Callable[[Size], None], records: CudaRecorder) -> None:
        super().__init__()
        self._work, self.sealed = work, False
        self._records, self._warm, self.seconds = records, set[Size](), 0.0

    def __missing__(self, size: Size) -> Callable[[], None]:
        """Return what runs a size that is not captured. Raises EngineError if the programs are
        sealed: plans must use captured sizes.
        """
        if self.sealed:
            raise EngineError(f"a round of {size} was planned, but no such size was captured")
        return partial(self._run_new, size)

    @property
    def captured(self) -> tuple[Size, ...]:
        """Sizes that are replayed, in ascending order."""
        return tuple(sorted(self))

    def _run_new(self, size: Size) -> None:
        begun = perf_counter()
        if size not in self._warm:
            self._records.warm(lambda: self._work(size))
            self._warm.add(size)
        else:
            self[size] = self._records.capture(lambda: self._work(size))
        self.seconds += perf_counter() - begun
        if size in self:
            self[size]()

    def forget(self) -> None:
        """Discard all programs after waiting for everything that was begun, and unseal: the work is
        another from now on.
        """
        self._records.forget()
        self._warm.clear()
        self.clear()
        self.sealed = False
