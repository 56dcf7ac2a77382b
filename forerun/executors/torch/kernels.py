"""Which kernels a device has: the one place that imports Triton."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.geometry import Geometry

Attend = Callable[[Tensor, Tensor, Tensor, Geometry], Tensor]
"""(queries [M,A,E], keys [G,slots,E], values [G,slots,E], geometry) -> context [M,A,E]."""

Choose = Callable[[Tensor, NodeNoise], Tensor]
"""(logits float32[M,V], how each node chooses) -> int32[M] tokens, or NOTHING."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that only launch: nothing in them waits for the device, so they can be captured."""

    attend: Attend
    choose: Choose


def kernels_for(device: torch.device) -> Kernels | None:
    """Our Triton kernels on CUDA; None elsewhere, where plain torch does the work."""
    if device.type != "cuda":
        return None
    from forerun.executors.torch import triton_attention, triton_choice  # noqa: PLC0415

    return Kernels(triton_attention.attend, triton_choice.choose)
