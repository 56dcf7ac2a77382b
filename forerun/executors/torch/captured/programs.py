"""Work on fixed tensors, launched as one captured program where the device can do that.

A decode step is some hundred small kernels; on a GPU their launches cost more than their work.
A CUDA graph replays them all in one launch. It freezes addresses and shapes, so everything that
changes from step to step must live in tensors made beforehand, and nothing may wait for the host.
How that is captured, before the first step, is in graphs.py.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from forerun.errors import EngineError

Size = TypeVar("Size", bound=int | tuple[int, ...])
"""The key of a program among those of its kind."""


class Programs(Generic[Size]):
    """`work(size)` for a few sizes, replayed where it was captured.

    sealed  a size that was not captured is an error from now on, until all is forgotten
    """

    def __init__(self, work: Callable[[Size], None]) -> None:
        self._work, self.sealed = work, False
        self._replays: dict[Size, Callable[[], None]] = {}

    @property
    def captured(self) -> tuple[Size, ...]:
        """Sizes that are replayed, in ascending order."""
        return tuple(sorted(self._replays))

    def run(self, size: Size) -> None:
        """Run the program of one size, once. Raises EngineError, if the programs are sealed, for a
        size that was not captured: plans must use captured sizes.
        """
        replay = self._replays.get(size)
        if replay is not None:
            replay()
        elif self.sealed:
            raise EngineError(f"a round of {size} was planned, but no such size was captured")
        else:
            self.run_new(size)

    def run_new(self, size: Size) -> None:
        """Do the work of a size that is not captured: here as it is."""
        self._work(size)

    def forget(self) -> None:
        """Drop what was captured, and unseal: the work is another from now on."""
        self._replays.clear()
        self.sealed = False
