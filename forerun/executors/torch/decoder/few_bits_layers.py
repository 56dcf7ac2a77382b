"""Matrix products with weights that stay quantised, in the form that a decoder uses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.executors.torch.decoder.elementwise import Gate
from forerun.executors.torch.decoder.few_bits import GATED, FewBits, FewBitsProducts
from forerun.executors.torch.decoder.layers import FeedForward, Product


class FewBitsLinear:
    """y = x W^T + b for a quantised weight. Takes 16-bit or 32-bit rows."""

    def __init__(self, weight: FewBits, bias: Tensor | None, by: FewBitsProducts) -> None:
        self.shape = weight.shape
        self.weight, self.bias, self.by = weight, bias, by

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M,N] for x [M,K]."""
        return self.by.product(x, self.weight, self.bias)


class SideBySide:
    """Several products of the same rows with concatenated results, for matrices that cannot be
    stacked.
    """

    def __init__(self, parts: Sequence[Product], shape: tuple[int, int]) -> None:
        self.shape, self._parts = shape, parts

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M,N] for x [M,K]."""
        return torch.cat([part(x) for part in self._parts], -1)


class GatedFeedForward(FeedForward):
    """A FeedForward whose first product includes the activation."""

    def __init__(self, gate_up: FewBitsLinear, down: Product, gate: Gate, activation: str) -> None:
        super().__init__(gate_up, down, gate)
        self._first, self._activation = gate_up, activation

    def __call__(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Implement FeedForward: [M,H] for x [M,H]."""
        first = self._first
        assert first.by.gated is not None
        between = first.by.gated(x, first.weight, first.bias, self._activation)
        return self._down(between)


def feed_forward(products: tuple[Product, Product], gate: Gate, activation: str) -> FeedForward:
    """Return a feed-forward of the stacked product of gate and up, and of down; gate: the
    activation's function.
    """
    gate_up, down = products
    if isinstance(gate_up, FewBitsLinear) and gate_up.by.gated and activation in GATED:
        return GatedFeedForward(gate_up, down, gate, activation)
    return FeedForward(gate_up, down, gate)
