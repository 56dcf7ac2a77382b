"""The product of experts as data: which rows visit which experts, and each row by the matrices of
its own. The kernel is triton_experts.py.
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
    """M rows that visit k experts each: P = M*k pairs, a row's side by side.

    expert  int64[P] of each pair; N = one that is not here
    order   int64[P] the pairs by expert
    bounds  int64[N+1] expert e's are order[bounds[e]:bounds[e+1]]; behind the last are those of
            experts that are not here
    """

    expert: Tensor
    order: Tensor
    bounds: Tensor

    @staticmethod
    def of(chosen: Tensor, count: int) -> "Pairs":
        """Return rows and experts, ordered by expert, of choices int64[M,k] among `count` experts.
        Only launches.
        """
        expert = chosen.flatten()
        ordered, order = expert.sort(stable=True)
        every = torch.arange(count + 1, device=expert.device)
        return Pairs(expert, order, torch.searchsorted(ordered, every))


GroupedProduct = Callable[[Tensor, Stacked, Pairs, int], Tensor]
"""(x [M,in], matrices, pairs, k) -> [P,out]: of pair p its expert's matrix times x[p // k];
anything where its expert is not here.
"""
