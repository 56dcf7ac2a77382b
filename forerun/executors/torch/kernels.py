"""Which kernels a device has: the one place that imports Triton."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from forerun.executors.torch.accept import Likely, NodeNoise
from forerun.executors.torch.geometry import Geometry
from forerun.executors.torch.kv import CacheTensor
from forerun.executors.torch.layers import Elementwise
from forerun.models.layer_spec import AttentionSpec


class Attend(Protocol):
    """Attention over pages and trees, launched."""

    def __call__(
        self,
        queries: Tensor,
        keys: CacheTensor,
        values: CacheTensor,
        geometry: Geometry,
        spec: AttentionSpec | None = None,
    ) -> Tensor:
        """Context [M,A,E] of queries [M,A,E] over keys and values of a layer, whose scores are
        made as `spec` says; None: scaled by 1/sqrt(E), no window.
        """
        ...


P = ParamSpec("P")
R = TypeVar("R")

Choose = Callable[[Tensor, NodeNoise], Tensor]
"""(logits float32[M,V], how each node chooses) -> int32[M] tokens, or NOTHING."""

Pick = Callable[[Likely, NodeNoise, int], tuple[Tensor, Tensor]]
"""(likely children of nodes, the noise at their positions, how many): see accept.py."""

Write = Callable[[Tensor, Tensor, tuple[CacheTensor, CacheTensor], int], None]
"""(keys [M,G,E], values, keys and values of a layer, slot of node 0): see kv.py."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that only launch: nothing in them waits for the device, so they can be captured."""

    attend: Attend
    choose: Choose
    pick: Pick
    write: Write
    parts: Elementwise


def guarded(device: torch.device, launch: Callable[P, R]) -> Callable[P, R]:
    """`launch` with `device` as the current one: Triton launches there, whatever it is given."""

    @wraps(launch)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device(device):
            return launch(*args, **kwargs)

    return inside


def kernels_for(device: torch.device) -> Kernels | None:
    """Our Triton kernels on CUDA; None elsewhere, where plain torch does the work."""
    if device.type != "cuda":
        return None
    from forerun.executors.torch import (  # noqa: PLC0415
        triton_attention,
        triton_choice,
        triton_layers,
    )

    return Kernels(
        attend=guarded(device, triton_attention.attend),
        choose=guarded(device, triton_choice.choose),
        pick=guarded(device, triton_choice.pick),
        write=guarded(device, triton_layers.write),
        parts=Elementwise(
            norm=guarded(device, triton_layers.norm),
            gate=guarded(device, triton_layers.gate),
            gelu_gate=guarded(device, triton_layers.gelu_gate),
            rotate=guarded(device, triton_layers.rotate),
        ),
    )
