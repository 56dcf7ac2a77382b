"""The grouped product of experts as one Triton kernel for CUDA (grouped.GroupedProduct).

Pairs of a row and an expert are sorted by expert and divided into tiles of one expert each. The
host knows only the greatest possible number of tiles: further programs have no work. So nothing
waits for the device, shapes do not depend on values, and a round can be captured. Each matrix that
some row needs is read once for every tile of its rows, the others not at all. The reference is
`grouped_loop` in tests/references/kernels.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.decoder.grouped import Pairs, Stacked

COLUMNS, DEPTH = 64, 64
"""COLUMNS: outputs of a program. DEPTH: inputs that it reads in one iteration."""


@triton.jit(do_not_specialize=["k"])
def _grouped(
    x, numbers, scales, bias, out, order, tiles, k, line_stride, outputs, inputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of pairs by COLUMNS rows of its expert's matrix. tiles int64[T,3]: expert,
    or -1 for no tile, and its bounds in `order`.
    """
    entry = tiles + 3 * tl.program_id(0)
    expert, first, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if expert >= 0:
        line = tl.arange(0, ROWS)
        there = first + line < end
        pair = tl.load(order + first + line, mask=there, other=0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        real = column < outputs
        each = tl.arange(0, DEPTH)
        rows = x + (pair // k)[:, None] * line_stride + each[None, :]
        matrix = numbers + (expert * outputs + column)[None, :] * inputs + each[:, None]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(0, inputs, DEPTH):
            inside = at + each < inputs
            left = tl.load(rows + at, mask=there[:, None] & inside[None, :], other=0.0)
            right = tl.load(matrix + at, mask=inside[:, None] & real[None, :], other=0.0)
            total += tl.dot(left, right.to(left.dtype), input_precision="tf32x3")
        if SCALED:
            total = (
                total * tl.load(scales + expert * outputs + column, mask=real, other=0.0)[None, :]
            )
        if BIASED:
            more = tl.load(bias + expert * outputs + column, mask=real, other=0.0)
            total = total + more.to(tl.float32)[None, :]
        place = out + pair[:, None] * outputs + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=there[:, None] & real[None, :])


def rows_for(pairs: int, experts: int) -> int:
    """Return the pairs of a tile, for `pairs` pairs among `experts` experts: the least that tensor
    cores support, more if each expert has many.
    """
    rows = 16
    while rows < 64 and pairs > 2 * rows * experts:
        rows *= 2
    return rows


def tiles_of(pairs: Pairs, rows: int) -> Tensor:
    """Return int64[T,3] as `_grouped` reads them; T depends on shapes alone."""
    bounds, count = pairs.bounds, len(pairs.expert)
    experts = len(bounds) - 1
    most = min(count, count // rows + experts)
    parts = (bounds.diff() + (rows - 1)) // rows
    ends = parts.cumsum(0)
    tile = torch.arange(most, device=bounds.device)
    expert = torch.searchsorted(ends, tile, right=True)
    inside = expert.clamp(max=experts - 1)
    first = bounds[inside] + (tile - (ends - parts)[inside]) * rows
    end = torch.minimum(first + rows, bounds[inside + 1])
    return torch.stack([torch.where(expert < experts, expert, -1), first, end], 1)


def grouped(x: Tensor, matrices: Stacked, pairs: Pairs, k: int) -> Tensor:
    """Return products of rows x [M,K] with the matrices of their experts: see
    grouped.GroupedProduct. Asynchronous.
    """
    numbers, scale, bias = matrices.numbers, matrices.scale, matrices.bias
    experts, outputs, inputs = numbers.shape
    count = len(pairs.expert)
    rows = rows_for(count, experts)
    tiles = tiles_of(pairs, rows)
    out = x.new_empty(count, outputs)
    _grouped[len(tiles), triton.cdiv(outputs, COLUMNS)](
        *(x, numbers, out if scale is None else scale, out if bias is None else bias, out),
        *(pairs.order, tiles, k, x.stride(0), outputs, inputs),
        ROWS=rows,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        SCALED=scale is not None,
        BIASED=bias is not None,
        num_warps=4,
        num_stages=3,
    )
    return out
