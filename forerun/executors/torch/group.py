"""The ranks that share a model, and their communication within a pass."""

import mmap
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from forerun.checkpoints.tensor_parallel import TensorParallel

PATIENCE = timedelta(minutes=10)
"""Time that a rank waits for another within a pass. An ended rank is noticed at once
(parallel/processes.py); this limit is for one that hangs.
"""

END_SECONDS = 1.0
"""Seconds for gloo to end."""

LOOK = timedelta(seconds=0.25)
"""Interval between two checks of the other ranks while waiting for a collective on the CPU."""


class Waits:
    """A table in shared memory that shows which ranks are within a collective: for each, how many
    it has entered, how many it has left, and how often it has polled.

    file  a descriptor of a file of `size_of` bytes, zeros
    """

    def __init__(self, file: int, tp: TensorParallel) -> None:
        self._counts = memoryview(mmap.mmap(file, self.size_of(tp))).cast("q")
        self._place = 3 * tp.rank
        self._seen: list[int] = []
        self._looks: list[int] = []

    @staticmethod
    def size_of(tp: TensorParallel) -> int:
        """Return the bytes of the shared file: three int64 for each rank."""
        return 24 * tp.size

    def enter(self) -> None:
        """Count that this rank has entered a collective."""
        self._counts[self._place] += 1

    def leave(self) -> None:
        """Count that this rank has left a collective."""
        self._counts[self._place + 1] += 1

    def look(self) -> None:
        """Count that this rank has polled without a result."""
        self._counts[self._place + 2] += 1

    def entered(self) -> list[int]:
        """Return the number of collectives that each rank has entered."""
        return self._counts.tolist()[::3]

    def silent(self) -> int:
        """Return how often every rank has polled since all of them wait and none got its message; 0
        while one of them is computing. Counts polls and not seconds, because a rank without a
        processor makes none, nor does any rank while the machine is suspended.
        """
        counts = self._counts.tolist()
        entered, left, looks = counts[::3], counts[1::3], counts[2::3]
        waiting = all(a > b for a, b in zip(entered, left, strict=True))
        if not waiting or self._seen != entered + left:
            self._seen, self._looks = entered + left, looks
            return 0
        return min(now - then for now, then in zip(looks, self._looks, strict=True))


class Group:
    """The ranks that share a model, from the point of view of one of them: processes on one
    machine, connected by gloo on the CPU and by NCCL on CUDA devices. Every rank calls the same
    methods in the same order with the same shapes; a method raises RuntimeError if a rank has
    ended.

    store  of torch.distributed, for the rendezvous; every rank constructs its group at about the
           same time
    waits  of these ranks; used on the CPU
    check  called periodically on rank 0 while it waits on the CPU: raises if a rank has failed
    """

    def __init__(
        self,
        store: Any,
        tp: TensorParallel,
        device: torch.device,
        waits: Waits | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.tp, self._waits, self._check = tp, waits, check
        self._group: Any
        self._on_cpu = device.type == "cpu"
        if self._on_cpu:
            gloo: Any = dist.ProcessGroupGloo  # The type stubs lack the options.
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            options._timeout = PATIENCE
            self._group = gloo(store, tp.rank, tp.size, options)
        else:
            torch.cuda.set_device(device)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = PATIENCE
            self._group = dist.ProcessGroupNCCL(store, tp.rank, tp.size, nccl)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, with the same bits on every rank. In float32 on the CPU
        a row's bits are independent of other rows: the ranks are added in order of rank, whereas
        the order of gloo's own sum depends on an element's index in the tensor.
        """
        if not self._on_cpu:
            x = x.contiguous()
            self._wait(self._group.allreduce([x]))
            return x
        first, *others = self.everywhere(x)
        for part in others:
            first = first + part
        return first

    def gathered(self, x: Tensor) -> list[Tensor]:
        """Return on rank 0 every rank's `x` [...], by rank; elsewhere []. Waits for all ranks."""
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self.tp.size)] if self.tp.rank == 0 else []
        self._wait(self._group.gather([parts] if parts else [], [x.contiguous()], options))
        return parts

    def everywhere(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x` [...], by rank, on every rank (all-gather). Waits for all
        ranks.
        """
        parts = [torch.empty_like(x) for _ in range(self.tp.size)]
        self._wait(self._group.allgather([parts], [x.contiguous()]))
        return parts

    def _wait(self, work: Any) -> None:
        """Wait for `work`; on the CPU in intervals of LOOK."""
        if not self._on_cpu or self._waits is None:
            work.wait()
            return
        self._waits.enter()
        while not _done(work):
            self._waits.look()
            self._check()
        self._waits.leave()

    def close(self) -> None:
        """Leave the group; no other method may be called afterwards. Idempotent. On CUDA running
        collectives are aborted. Gloo threads may continue for PATIENCE at most: sometimes gloo does
        not notice that the rank it sends to has ended.
        """
        held = [self._group]
        self._group = None
        if held[0] is None:
            return
        if not self._on_cpu:
            held[0].abort()
            return
        ending = threading.Thread(target=held.clear, name="forerun-gloo-end", daemon=True)
        ending.start()
        ending.join(END_SECONDS)


def _done(work: Any) -> bool:
    """Return whether `work` is done within LOOK seconds. Raises RuntimeError if it failed."""
    try:
        work.wait(LOOK)
    except RuntimeError:
        if not work.is_completed():
            return False
        # It failed, or finished just after LOOK: its own result decides.
        work.wait()
    return True
