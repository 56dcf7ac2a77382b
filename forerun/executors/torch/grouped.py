"""The product of experts as data: which rows visit which experts, and each row by the matrices of
its own. The kernel is triton_experts.py; its slow twin stands here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
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

    expert  int64[P] of each pair
    order   int64[P] the pairs by expert
    bounds  int64[N+1] expert e's are order[bounds[e]:bounds[e+1]]
    """

    expert: Tensor
    order: Tensor
    bounds: Tensor

    @staticmethod
    def of(chosen: Tensor, count: int) -> "Pairs":
        """Of int64[M,k] choices among `count` experts. Only launches."""
        expert = chosen.flatten()
        ordered, order = expert.sort(stable=True)
        every = torch.arange(count + 1, device=expert.device)
        return Pairs(expert, order, torch.searchsorted(ordered, every))


GroupedProduct = Callable[[Tensor, Stacked, Pairs, int], Tensor]
"""(x [M,in], matrices, pairs, k) -> [P,out]: of pair p its expert's matrix times x[p // k]."""


def grouped_loop(x: Tensor, matrices: Stacked, pairs: Pairs, k: int) -> Tensor:
    """GroupedProduct, every expert for every pair: the slow twin of triton_experts.grouped. Shapes
    depend on shapes alone, so it can be captured.
    """
    rows = x.repeat_interleave(k, 0)
    found = x.new_zeros(len(rows), matrices.numbers.shape[1])
    for expert in range(len(matrices.numbers)):
        matrix = matrices.numbers[expert].to(x.dtype)
        product = F.linear(rows, matrix).float()
        if matrices.scale is not None:
            product = product * matrices.scale[expert]
        if matrices.bias is not None:
            product = product + matrices.bias[expert].float()
        mine = (pairs.expert == expert).unsqueeze(1)
        found = torch.where(mine, product.to(x.dtype), found)
    return found
