"""The matrix products of a decoder, in which a row's bits are independent of the other rows.

Libraries choose their kernel, and with it the order of the sums, by the number of rows. So on the
CPU a product only ever runs at a few row counts (powers of two, with padding), and
`invariant_sizes` keeps those at which every row has the same bits as in the largest (decision
0006).
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.decoder.elementwise import Gate

MOST_ROWS = 128
"""The most rows of one product on the CPU. Twice as many made prefill about 5 % faster, but
start-up slower.
"""


def for_products(weight: Tensor) -> Tensor:
    """Return a float32 weight [N,K] on the CPU in oneDNN's layout."""
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return reordered


class Linear:
    """y = x W^T + b for weight [N,K], any number of rows. In float32 on the CPU the weight is
    stored in oneDNN's own layout: this avoids repacking per call, and gives the same order of sums
    for any number of rows on the machines seen so far.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))
        self._bias = bias
        self._on_cpu = weight.device.type == "cpu"
        packs = self._on_cpu and weight.dtype == torch.float32
        self._packed = packs and torch.backends.mkldnn.is_available()
        if self._packed:
            weight = for_products(weight)
        self._weight: Tensor = weight

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M,N] for x [M,K]."""
        if not self._on_cpu or len(x) <= MOST_ROWS:
            return self._product(x)
        return torch.cat([self._product(part) for part in x.split(MOST_ROWS)])

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """Write [M,N] for x [M,K] to `out`, without a copy if the device's library supports
        that.
        """
        if self._on_cpu or self._bias is not None:
            return out.copy_(self(x))
        return torch.mm(x, self._weight.t(), out=out)

    def _product(self, x: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


class Product(Protocol):
    """A matrix product with a weight of shape [N,K]: [M,K] -> [M,N]."""

    shape: tuple[int, int]

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M,N] for x [M,K]."""
        ...


MakeProduct = Callable[[Tensor, Tensor | None], Product]
"""Returns the product with a weight [N,K] and a bias [N]."""


class FeedForward:
    """down(activation(x W_gate) * x W_up), from [M,H] to [M,H]; gate_up: the stacked product of
    both.
    """

    def __init__(self, gate_up: Product, down: Product, gate: Gate) -> None:
        self.linears: tuple[Product, Product] = (gate_up, down)
        self._gate_up, self._down, self.gate = gate_up, down, gate

    def __call__(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return [M,H] for x [M,H]. `sizes` is used by experts only: here M is already one of
        them.
        """
        return self._down(self.gate(*self._gate_up(x).chunk(2, -1)))


def alone(x: Tensor) -> Tensor:
    """Return `x` [M,H] unchanged, the sum over a single rank."""
    return x


def padded_rows(rows: int, sizes: tuple[int, ...]) -> int:
    """Return the number of rows to run for `rows` rows, so that products run only at row counts in
    `sizes`. If `sizes` is empty, `rows`.
    """
    if not sizes:
        return rows
    whole, rest = divmod(rows, MOST_ROWS)
    return whole * MOST_ROWS + (next(size for size in sizes if size >= rest) if rest else 0)


SIZES = (1, 2, 4, 8, 16, 32, 64, MOST_ROWS)
"""Row counts to test, ascending."""


def invariant_sizes(linears: Iterable[Product]) -> tuple[int, ...]:
    """Return the row counts of SIZES at which these products give each row the same bits as the
    largest count.

    Tested on random numbers, once per shape: kernels are chosen by shape, not by value. The largest
    is always included; that a row's index in it does not matter is tested with the smaller ones,
    which take rows from both of its ends.
    """
    sizes = set(SIZES)
    random = torch.Generator().manual_seed(0)
    for linear in {linear.shape: linear for linear in linears}.values():
        x = torch.randn(MOST_ROWS, linear.shape[1], generator=random)
        expected = linear(x)
        for size in sorted(sizes - {MOST_ROWS}):
            first, last = linear(x[:size]), linear(x[-size:])
            if not (torch.equal(first, expected[:size]) and torch.equal(last, expected[-size:])):
                sizes.discard(size)
    return tuple(sorted(sizes))


class TrainingLinear:
    """y = x W^T + b at any number of rows in one call, for whole sequences in training. A row's
    last bits may depend on the number of rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))
        self.weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M,N] for x [M,K]."""
        return F.linear(x, self.weight, self._bias)
