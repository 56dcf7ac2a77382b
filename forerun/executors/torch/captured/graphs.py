"""Work on fixed tensors, launched as one captured program where the device can do that.

A decode step is some hundred small kernels; on a GPU their launches cost more than their work.
A CUDA graph replays them all in one launch. It freezes addresses and shapes, so everything that
changes from step to step must live in tensors made beforehand, and nothing may wait for the host.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch


class Sortable(Protocol):
    """What has an order and a hash: a number, or a tuple of some."""

    def __lt__(self, other: Any, /) -> bool:
        """Whether it comes first."""
        ...

    def __hash__(self) -> int:
        """As for a key of a dictionary."""
        ...


Size = TypeVar("Size", bound=Sortable)
"""What tells programs of one kind apart."""


class Recorder(Protocol):
    """What captures. `CudaRecorder` on a GPU; tests have one that records calls."""

    def launch(self, work: Callable[[], None]) -> Callable[[], None]:
        """Begin `work`, after all that was begun before; returns what waits until it is done."""
        ...

    def warm(self, work: Callable[[], None]) -> None:
        """Run `work` for real, so that libraries set themselves up outside of a capture."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work`, without running it; returns what replays it."""
        ...


class CudaRecorder:
    """CUDA graphs that share one memory pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def launch(self, work: Callable[[], None]) -> Callable[[], None]:
        """On the current stream, with an event behind it."""
        work()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def warm(self, work: Callable[[], None]) -> None:
        """Run on a side stream, as a capture will."""
        staging = torch.cuda.Stream()
        staging.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(staging):
            work()
        torch.cuda.current_stream().wait_stream(staging)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """One graph; its random numbers go on from replay to replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay


def recorder(device: torch.device) -> Recorder | None:
    """What captures on this device; None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


class Programs(Generic[Size]):
    """`work(size)` for a few sizes, each captured when it is asked for the second time.

    The first call of a size runs it as it is, which is also its warm-up: every call does the
    work exactly once.
    """

    def __init__(self, work: Callable[[Size], None], records: Recorder | None) -> None:
        self._work, self._records = work, records
        self._replays: dict[Size, Callable[[], None] | None] = {}

    @property
    def captured(self) -> tuple[Size, ...]:
        """Sizes that are replayed."""
        return tuple(sorted(size for size, replay in self._replays.items() if replay))

    def forget(self) -> None:
        """Capture everything anew: the work is another from now on."""
        self._replays.clear()

    def run(self, size: Size) -> None:
        """Do the work of one size, once."""
        if self._records is None:
            self._work(size)
        elif size not in self._replays:
            self._records.warm(lambda: self._work(size))
            self._replays[size] = None
        else:
            replay = self._replays[size]
            if replay is None:
                replay = self._replays[size] = self._records.capture(lambda: self._work(size))
            replay()
