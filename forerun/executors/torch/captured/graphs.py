"""Replays a step of one shape as one CUDA graph: graphs, their streams and memory pools, and the
restrictions during a capture.

A decode step is some hundred small kernels, whose launches cost a GPU more time than their work. A
CUDA graph replays them all in one launch. Addresses and shapes in it are fixed, so everything that
changes from step to step must be in tensors allocated beforehand, and nothing may wait for the
host.
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
    """Return a context manager that allows one capture at a time and disables garbage collection,
    because CUDA invalidates a capture during which an unreferenced graph is destroyed.
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
    (cuBLAS allocates its workspace at the first product on a stream): the warm-up does that outside
    of the pool, so that no workspace is freed with a graph or shared with another capture. A pool
    is never captured into again once its graphs are freed: torch asserts that a graph still uses it
    while tensors in it exist.

    cuda  the library; tests use a replacement with the same rules and without a device
    """

    cuda = torch.cuda

    def __init__(self, device: torch.device) -> None:
        index = self.cuda.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        with self.cuda.device(self._device):
            self._stream = self.cuda.Stream()
            self._pool = self.cuda.graph_pool_handle()

    def launch(self, work: Callable[[], None]) -> Callable[[], None]:
        """Launch `work` on the current stream; returns a function that blocks until it has
        finished.
        """
        with self.cuda.device(self._device):
            work()
            event = self.cuda.Event()
            event.record(self.cuda.current_stream())
        return event.synchronize

    def warm(self, work: Callable[[], None]) -> None:
        """Run `work` without a capture, so that libraries initialise."""
        with self.cuda.device(self._device):
            current = self.cuda.current_stream()
            self._stream.wait_stream(current)
            with self.cuda.stream(self._stream):
                work()
            current.wait_stream(self._stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work` as one graph, without running it; returns a function that replays it. Other
        threads may use the device meanwhile.
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
        """Wait for all launched work; afterwards the captured graphs may be dropped, and the next
        capture gets a new pool.
        """
        with self.cuda.device(self._device):
            self.cuda.synchronize()
            self._pool = self.cuda.graph_pool_handle()


def recorder(device: torch.device) -> CudaRecorder | None:
    """Return a recorder with its own pool and stream on a CUDA device; None on other devices, where
    nothing is captured.
    """
    return CudaRecorder(device) if device.type == "cuda" else None


class CapturedPrograms(dict[Size, Callable[[], None]]):
    """Functions that run `work(size)`, by size: the replay, once captured. A size that is not
    captured runs directly the first time, which is also its warm-up, and is captured the second
    time, so that every call does the work exactly once.

    sealed   from now on a size that was not captured is an error, until `forget`
    seconds  time spent on first calls and captures
    """

    def __init__(self, work: Callable[[Size], None], records: CudaRecorder) -> None:
        super().__init__()
        self._work, self.sealed = work, False
        self._records, self._warm, self.seconds = records, set[Size](), 0.0

    def __missing__(self, size: Size) -> Callable[[], None]:
        """Return a function that runs a size that is not captured. Raises EngineError if the
        programs are sealed: plans must use captured sizes.
        """
        if self.sealed:
            raise EngineError(f"a round of {size} was planned, but no such size was captured")
        return partial(self._run_new, size)

    @property
    def captured(self) -> tuple[Size, ...]:
        """Captured sizes, in ascending order."""
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
        """Discard all programs after waiting for all launched work, and unseal, because `work`
        changes.
        """
        self._records.forget()
        self._warm.clear()
        self.clear()
        self.sealed = False
