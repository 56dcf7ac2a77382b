"""Work on fixed tensors, launched as one captured program where the device can do that.

A decode step is some hundred small kernels; on a GPU their launches cost more than their work.
A CUDA graph replays them all in one launch. It freezes addresses and shapes, so everything that
changes from step to step must live in tensors made beforehand, and nothing may wait for the host.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from time import perf_counter
from typing import Generic, TypeVar

import torch

from forerun.errors import EngineError

Size = TypeVar("Size", bound=int | tuple[int, ...])
"""What tells programs of one kind apart."""


_CAPTURING = Lock()


@contextmanager
def uncollected() -> Iterator[None]:
    """One capture at a time, and no garbage collection during it: CUDA makes a capture invalid in
    whose middle a graph is destroyed, of an owner that is gone.
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

    Warm-ups and captures run on one stream of the recorder's own. A library sets itself up per
    stream (cuBLAS takes its workspace when a stream first multiplies): the warm-up has that done
    outside of the pool, so that no workspace dies with a graph, and nobody else's captures meet
    it. A pool is never captured into again once its graphs are gone: torch asserts that somebody
    still uses it while tensors in it live, and a draft head's last levels do.

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
        """Begin `work`, after all that was begun before; returns what waits until it is done."""
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
        return graph.replay

    def forget(self) -> None:
        """Wait for what was begun: everything captured so far may be dropped afterwards, and the
        next capture gets a fresh pool.
        """
        with self.cuda.device(self._device):
            self.cuda.synchronize()
            self._pool = self.cuda.graph_pool_handle()


def recorder(device: torch.device) -> CudaRecorder | None:
    """What captures on this device; None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


class Programs(Generic[Size]):
    """`work(size)` for a few sizes, each captured when it is asked for the second time.

    The first call of a size runs it as it is, which is also its warm-up: every call does the
    work exactly once.

    sealed   a size that was not captured is an error from now on, until all is forgotten
    seconds  spent on first calls and captures
    """

    def __init__(self, work: Callable[[Size], None], records: CudaRecorder | None) -> None:
        self._work, self._records = work, records
        self._replays: dict[Size, Callable[[], None] | None] = {}
        self.seconds, self.sealed = 0.0, False

    @property
    def captured(self) -> tuple[Size, ...]:
        """Sizes that are replayed."""
        return tuple(sorted(size for size, replay in self._replays.items() if replay))

    def forget(self) -> None:
        """Capture everything anew: the work is another from now on."""
        if self._records is not None:
            self._records.forget()
        self._replays.clear()
        self.sealed = False

    def run(self, size: Size) -> None:
        """Do the work of one size, once. Raises EngineError, where that is sealed, for one that was
        not captured: whoever planned it had to choose among those that were.
        """
        if self.sealed and not self._replays.get(size):
            raise EngineError(f"a round of {size} was planned, but no such size was captured")
        if self._records is None:
            self._work(size)
        elif size not in self._replays:
            begun = perf_counter()
            self._records.warm(lambda: self._work(size))
            self._replays[size] = None
            self.seconds += perf_counter() - begun
        else:
            replay = self._replays[size]
            if replay is None:
                begun = perf_counter()
                replay = self._replays[size] = self._records.capture(lambda: self._work(size))
                self.seconds += perf_counter() - begun
            replay()
