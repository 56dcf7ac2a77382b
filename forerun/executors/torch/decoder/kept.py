"""Products of weights that stay in few bits, as a decoder runs them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.executors.torch.decoder.few_bits import FewBits, FewBitsProduct, few_bits_product
from forerun.executors.torch.decoder.float8 import Rows
from forerun.executors.torch.decoder.layers import Product, plain


class FewBitsLinear:
    """y = x W^T + b for a weight in few bits, by `product`. Takes 16-bit or 32-bit rows."""

    def __init__(
        self, weight: FewBits, bias: Tensor | None, product: FewBitsProduct = few_bits_product
    ) -> None:
        self.shape = weight.shape
        self.weight, self._bias, self._product = weight, bias, product

    def __call__(self, x: Rows) -> Tensor:
        """[M,K] -> [M,N]. Raises TypeError for rows in float8."""
        return self._product(plain(x), self.weight, self._bias)


class SideBySide:
    """Products of the same rows whose results stand side by side: matrices that cannot be one."""

    def __init__(self, parts: Sequence[Product], shape: tuple[int, int]) -> None:
        self.shape, self._parts = shape, parts

    def __call__(self, x: Rows) -> Tensor:
        """[M,K] -> [M,N]."""
        return torch.cat([part(x) for part in self._parts], -1)
