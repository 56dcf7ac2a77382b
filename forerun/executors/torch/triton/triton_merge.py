"""Merges attention's results over parts of a prefix, as a Triton kernel, for CUDA; also into the
float8 rows that a product reads next.

A query's heads are merged side by side. Its float8 scale is of all of them, so each head counts
itself when it has finished, and the last one reads the whole row: one launch for both.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.attention.tiles import MOST_PARTS
from forerun.executors.torch.decoder.float8 import FLOAT8, Float8Rows
from forerun.executors.torch.triton.triton_layers import float8_rows, narrowed


class AttentionParts(NamedTuple):
    """Attention's results of Q queries of A heads, at most P = `most` parts each; with one part,
    only `out`.

    out    [Q,A,E] context of queries with one part
    parts  float32[P,Q,A,E] of queries with several: not yet divided by the sum of weights
    sums   float32[2*P*Q*A + Q]: [2,P,Q,A] the greatest score, -inf for no part and for parts
           without keys, and the sum of weights; -1 as the first of those if `out` is filled. Then,
           if it is `counted`, how many of each query's heads are merged: 0 [Q]
    """

    out: Tensor
    parts: Tensor
    sums: Tensor
    most: int
    counted: bool

    @staticmethod
    def of(queries: Tensor, most: int, counted: bool, size: int) -> "AttentionParts":
        """Return uninitialised room for queries [Q,A,.] with context of width `size`, `most` parts
        each.
        """
        (count, heads, _), several = queries.shape, most if most > 1 else 0
        return AttentionParts(
            out=queries.new_empty((count, heads, size)),
            parts=queries.new_empty((several, count, heads, size), dtype=torch.float32),
            sums=queries.new_empty(2 * several * count * heads + count, dtype=torch.float32),
            most=most,
            counted=counted,
        )


@triton.jit(do_not_specialize=["lines", "parts", "heads"])
def _merge(
    found, sums, out, numbers, scales, lines, parts, heads,
    E: tl.constexpr, PARTS: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Fill `out` [Q*A,E] from at most `parts` parts (PARTS at most) in `found`: AttentionParts.
    Does nothing if one part has filled it. lines: Q*A, heads: A.

    ROW, if not 0: A*E to the next power of two. Then the last of a query's heads reads all of them
    and fills `numbers` [Q,A*E], in float8, and `scales` [Q].
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
    if ROW > 0:
        query = line // heads
        # Each thread's numbers are written before this head counts, and the count orders them.
        tl.debug_barrier()
        through = tl.atomic_add(sums + 2 * parts * lines + query, 1.0)
        if through == heads - 1:
            each = tl.arange(0, ROW)
            there = each < heads * E
            begin = out + query * heads * E
            # Others wrote it: not from this multiprocessor's own cache.
            row = tl.load(begin + each, mask=there, other=0.0, cache_modifier=".cg")
            narrowed(row.to(tl.float32), numbers, scales, query, each, there, heads * E)


def merged(found: AttentionParts) -> Tensor:
    """Context [Q,A,E], in the queries' dtype: `found.out`, into which parts are merged by
    log-sum-exp. Launches at most one kernel.
    """
    if found.most > 1:
        _launch(found, [found.out] * 2, 0, 2)
    return found.out


def merged_rows(found: AttentionParts) -> Float8Rows:
    """float8.float8_rows of the context as [Q,A*E], in one launch; of what was counted."""
    rows = found.out.flatten(1)
    if found.most == 1:
        return float8_rows(rows)
    numbers = torch.empty(rows.shape, dtype=FLOAT8, device=rows.device)
    narrow = Float8Rows(numbers, found.sums.new_empty(len(rows), 1))
    _launch(found, narrow, triton.next_power_of_2(rows.shape[1]), 4)
    return narrow


def _launch(found: AttentionParts, narrow: Sequence[Tensor], row: int, warps: int) -> None:
    count, heads, size = found.out.shape
    _merge[(count * heads,)](
        *(found.parts, found.sums, found.out, *narrow, count * heads, found.most, heads),
        E=size,
        PARTS=MOST_PARTS,
        ROW=row,
        num_warps=warps,
    )
