"""DFlash2's convolutions over the places of a block."""

import torch
from torch import Tensor, nn

from forerun.drafts.block_config import KERNEL_SIZE


class BlockConvolution(nn.Module):
    """Around one sublayer of a block: out[t] = sum over o of (base[o] + dynamic[t,o]) * x[t - o],
    with zeros before the block. One kernel is for what the sublayer reads, one for what it returns;
    the dynamic part of both is made of what it would read without, the same for `group`
    neighbouring numbers. Parameter names are the published ones.
    """

    def __init__(self, hidden: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, KERNEL_SIZE, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * KERNEL_SIZE * hidden // group, bias=False)
        self._group = group

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the sublayer reads, [R,P,H], of blocks x [R,P,H], and the kernel of
        `leave`.
        """
        dynamic = self.kernel_projection(x).unflatten(-1, (2, KERNEL_SIZE, -1))
        kernels = self.base_kernel + dynamic.repeat_interleave(self._group, -1)
        return convolved(x, kernels[..., 0, :, :]), kernels[..., 1, :, :]

    def leave(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return what is added to the stream, [R,P,H], of the sublayer's x [R,P,H]."""
        return convolved(x, kernel)


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """Return [R,P,H] of x [R,P,H] by kernels [R,P,KERNEL_SIZE,H]."""
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return kernel[..., 0, :] * x + kernel[..., 1, :] * before
