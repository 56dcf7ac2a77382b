"""At which numbers of rows a library gives each row of a product the same bits (decisions/0006)."""

from collections.abc import Iterable

import torch

from forerun.executors.torch.decoder.layers import MOST_ROWS, Product

SIZES = (1, 2, 4, 8, 16, 32, 64, MOST_ROWS)
"""Row counts that are tried, ascending."""


def invariant_sizes(linears: Iterable[Product]) -> tuple[int, ...]:
    """Row counts of SIZES at which these products give each row the bits of the largest.

    Tried on random numbers, once per shape; kernels are chosen by shape, never by value. The
    largest is always among them; that a row's place in it does not matter is seen from the
    smaller ones, which take their rows from both its ends.
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
