"""Data parallelism over CPU threads: each thread runs some sequences of a batch through the whole
network.

Torch itself splits every operation among threads and waits for the slowest some thousand times per
step, which costs most on a busy machine. Here threads synchronise once per step.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Shards:
    """`count` threads of one core each; with a count of 1 only the calling thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = (
            ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
            if count > 1
            else None
        )

    @staticmethod
    def on(device: torch.device) -> "Shards":
        """Return as many shards as torch has threads if the device is the CPU, else one."""
        return Shards(torch.get_num_threads() if device.type == "cpu" else 1)

    def split(self, items: Sequence[Item]) -> list[list[Item]]:
        """Distribute items round-robin over at most `count` lists, so that items of similar length
        go to different threads.
        """
        return [list(items[first :: self.count]) for first in range(min(self.count, len(items)))]

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Run `work` on each item in a thread of its own. Returns the results in the items' order.
        Raises what `work` raises.
        """
        run = self._pool.map if self._pool else map
        return list(run(work, items))

    def close(self) -> None:
        """End the threads; waits for running work."""
        if self._pool:
            self._pool.shutdown()
