"""The grouped product of experts: which rows visit which experts, and the product of each row with
the matrices of its own. The kernel is triton_experts.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stacked:
    """The same matrix of N experts.

    numbers  [N,out,in] in the activations' dtype, or in float8 with `scale` float32[N,out]
    bias     [N,out]
    """

    numbers: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """M rows that visit k experts each: P = M*k pairs, those of a row contiguous.

    expert  int64[P] of each pair; N = an expert of another rank
    order   int64[P] the pairs sorted by expert
    bounds  int64[N+1] expert e's pairs are order[bounds[e]:bounds[e+1]]; those after the last bound
            are of other ranks' experts
    """

    expert: Tensor
    order: Tensor
    bounds: Tensor

    @staticmethod
    def of(chosen: Tensor, count: int) -> "Pairs":
        """Return the pairs for choices int64[M,k] among `count` experts. Does not synchronise with
        the device.
        """
        expert = chosen.flatten()
        ordered, order = expert.sort(stable=True)
        every = torch.arange(count + 1, device=expert.device)
        return Pairs(expert, order, torch.searchsorted(ordered, every))


GroupedProduct = Callable[[Tensor, Stacked, Pairs, int], Tensor]
"""(x [M,in], matrices, pairs, k) -> [P,out]: for pair p the product of its expert's matrix with x[p
// k]; undefined for experts of other ranks.
"""
