"""Merges attention's results over parts of a prefix, as a Triton kernel, for CUDA."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.sizes import MOST_PARTS


class AttentionParts(NamedTuple):
    """Attention's results of Q queries of A heads, in at most P = `most` parts each; with one part,
    only `out`.

    out    [Q,A,E] attention output of queries with one part
    parts  float32[P,Q,A,E] of queries with several: not yet divided by the sum of weights
    sums   float32[2,P,Q,A]: the greatest score, -inf for missing parts and parts without keys, and
           the sum of weights; -1 as the first of those if `out` is filled
    """

    out: Tensor
    parts: Tensor
    sums: Tensor
    most: int

    @staticmethod
    def of(queries: Tensor, most: int, size: int) -> "AttentionParts":
        """Return uninitialised tensors for queries [Q,A,.] with an output of size `size`, `most`
        parts each.
        """
        (count, heads, _), several = queries.shape, most if most > 1 else 0
        return AttentionParts(
            out=queries.new_empty((count, heads, size)),
            parts=queries.new_empty((several, count, heads, size), dtype=torch.float32),
            sums=queries.new_empty((2, several, count, heads), dtype=torch.float32),
            most=most,
        )


@triton.jit(do_not_specialize=["lines", "parts"])
def _merge(found, sums, out, lines, parts, E: tl.constexpr, PARTS: tl.constexpr):
    """Fill `out` [Q*A,E] from at most `parts` parts (PARTS at most) in `found`: AttentionParts.
    Skips queries whose single part has filled it. lines: Q*A.
    """
    line = tl.program_id(0)
    WIDE: tl.constexpr = triton.next_power_of_2(E)
    part, e = tl.arange(0, PARTS), tl.arange(0, WIDE)
    at = part * lines + line
    if tl.load(sums + parts * lines + line) >= 0:
        level = tl.load(sums + at, mask=part < parts, other=float("-inf"))
        real = level != float("-inf")
        total = tl.load(sums + parts * lines + at, mask=real, other=0.0)
        weight = tl.where(real, tl.exp2(level - tl.max(level, 0)), 0.0)
        place = at.to(tl.int64)[:, None] * E + e[None, :]
        mixed = tl.load(found + place, mask=real[:, None] & (e[None, :] < E), other=0.0)
        summed = tl.sum(weight[:, None] * mixed, 0) / tl.sum(weight * total, 0)
        tl.store(out + line * E + e, summed.to(out.dtype.element_ty), mask=e < E)


def merged(found: AttentionParts) -> Tensor:
    """Return the attention output [Q,A,E], in the queries' dtype: `found.out`, into which parts are
    merged by log-sum-exp. Launches at most one kernel.
    """
    if found.most > 1:
        count, heads, size = found.out.shape
        _merge[(count * heads,)](
            *(found.parts, found.sums, found.out, count * heads, found.most),
            E=size,
            PARTS=MOST_PARTS,
            num_warps=2,
        )
    return found.out
