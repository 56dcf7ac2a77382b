"""The ranks that share a model, and what they say to each other within a pass."""

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from forerun.models.tensor_parallel import TensorParallel

PATIENCE = timedelta(minutes=10)
"""How long a rank waits for another within a pass. One that is gone is noticed at once
(parallel/processes.py); this is for one that hangs."""


class Group(Protocol):
    """The ranks, as one of them sees them. Every rank calls each verb, in the same order and with
    the same shapes. Raises RuntimeError where a rank is gone.
    """

    tp: TensorParallel

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, the same bits on every rank. A row's bits depend on no other
        row where the device keeps that promise elsewhere too: in float32 on the CPU.
        """
        ...

    def gathered(self, x: Tensor) -> list[Tensor]:
        """On rank 0 every rank's `x`, by rank; elsewhere nothing."""
        ...

    def everywhere(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, by rank, on every rank."""
        ...

    def close(self) -> None:
        """Let go of the others. Idempotent."""
        ...


class Processes:
    """Ranks that are processes on one machine: over gloo on the CPU, over NCCL on CUDA devices.

    store  of torch.distributed, where they meet; every rank constructs its group at about the same
           time
    """

    def __init__(self, store: Any, tp: TensorParallel, device: torch.device) -> None:
        self.tp = tp
        self._group: Any
        self._on_cpu = device.type == "cpu"
        if self._on_cpu:
            gloo: Any = dist.ProcessGroupGloo  # Its stubs lack the options.
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
        """See Group. On the CPU in the order of the ranks: gloo's own sum would add in an order
        that depends on where in the tensor a number stands.
        """
        if not self._on_cpu:
            x = x.contiguous()
            self._group.allreduce([x]).wait()
            return x
        first, *others = self.everywhere(x)
        for part in others:
            first = first + part
        return first

    def gathered(self, x: Tensor) -> list[Tensor]:
        """See Group."""
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self.tp.size)] if self.tp.rank == 0 else []
        self._group.gather([parts] if parts else [], [x.contiguous()], options).wait()
        return parts

    def everywhere(self, x: Tensor) -> list[Tensor]:
        """See Group."""
        parts = [torch.empty_like(x) for _ in range(self.tp.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return parts

    def close(self) -> None:
        """See Group."""
        group, self._group = self._group, None
        if group is not None and not self._on_cpu:
            group.abort()
