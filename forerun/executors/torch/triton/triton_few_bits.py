"""Matrix products whose weight stays quantised, as one Triton kernel for CUDA
(few_bits.FewBitsProduct).

A few rows read every weight once and have few tiles, so the columns of x are divided among programs
too. The last program of a tile adds the others' results in a fixed order. The division of columns
depends on the weight alone, and a row's sums on no other row: its bits are the same alone and in a
batch, up to FEW rows. More rows, as in prompts, are multiplied by a library with the weight
dequantised to scratch, a part at a time. Bytes are converted to 16-bit floats four at a time by PTX
instructions for pairs, unless the kernel is interpreted. The reference is
few_bits.few_bits_product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.checkpoints.quantised_matrices import PARTS, SCRATCH
from forerun.executors.torch.decoder.few_bits import COLUMNS, FEW, FewBits
from forerun.executors.torch.triton.triton_layers import gate, gated
from forerun.networks.layer_spec import CLAMP, CLAMP_SLOPE

FLOAT8 = tl.constexpr(1)
"""KIND of E4M3; that of integers is their number of bits, 4 or 8."""

# PTX of what `_halves` and `_floats` are, four bytes at a time. lop3's 0xEA is (a & b) | c.
_HALVES = """{{
    .reg .b32 a, b, c, d;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    lop3.b32 $0, a, 0x000F000F, {place}, 0xEA;
    lop3.b32 $1, b, 0x000F000F, {place}, 0xEA;
    lop3.b32 $2, c, 0x000F000F, {place}, 0xEA;
    lop3.b32 $3, d, 0x000F000F, {place}, 0xEA;
}}"""
_HALVES_BF16 = tl.constexpr(_HALVES.format(place="0x43004300"))
_HALVES_FP16 = tl.constexpr(_HALVES.format(place="0x64006400"))
_FLOATS = """{{
    .reg .b32 a, b, c, d, more, none;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 c, a, 0x7F007F00;
    and.b32 d, b, 0x7F007F00;
    shr.u32 c, c, {by};
    shr.u32 d, d, {by};
    {last}
}}"""
_FLOATS_BF16 = tl.constexpr(
    _FLOATS.format(
        by=4,
        last="""lop3.b32 a, a, 0x80008000, c, 0xEA;
    lop3.b32 b, b, 0x80008000, d, 0xEA;
    mov.b32 more, 0x7B807B80;
    mov.b32 none, 0x80008000;
    fma.rn.bf16x2 $0, a, more, none;
    fma.rn.bf16x2 $1, b, more, none;""",
    )
)
_FLOATS_FP16 = tl.constexpr(
    _FLOATS.format(
        by=1,
        last="""lop3.b32 $0, a, 0x80008000, c, 0xEA;
    lop3.b32 $1, b, 0x80008000, d, 0xEA;""",
    )
)


@triton.jit
def _halves(raw, kind: tl.constexpr):
    """Return the low and the high four bits of bytes, as the last bits of 128 in bfloat16 or of
    1024 in float16: greater than the value by that number.
    """
    if kind == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _HALVES_BF16, "=r,=r,=r,=r,r", [raw], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _HALVES_FP16, "=r,=r,=r,=r,r", [raw], (tl.float16, tl.float16), True, 4
        )
    return low, high


@triton.jit
def _floats(raw, kind: tl.constexpr):
    """Return E4M3 numbers, divided by 256 in float16. In bfloat16 their bits are used in place,
    which divides by 2^120; a product reverses that.
    """
    if kind == tl.bfloat16:
        found = tl.inline_asm_elementwise(_FLOATS_BF16, "=r,=r,r", [raw], tl.bfloat16, True, 4)
    else:
        found = tl.inline_asm_elementwise(_FLOATS_FP16, "=r,=r,r", [raw], tl.float16, True, 4)
    return found


@triton.jit
def widened(raw, kind: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr):
    """Return the numbers, exact in 16 bits: for 4 bits those of the low and of the high bits, else
    the same twice; float8 in float16 divided by 256.
    """
    if KIND == 4:
        if PTX:
            low, high = _halves(raw, kind)
        else:
            low, high = (raw & 15).to(kind), (raw >> 4).to(kind)
    else:
        if KIND == 8:
            low = raw.to(kind)
        elif PTX:
            low = _floats(raw, kind)
        else:
            # E4M3's bits in a half's places: its exponent is 8 less there.
            wide = raw.to(tl.uint16)
            bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
            low = bits.to(tl.float16, bitcast=True).to(kind)
        high = low
    return low, high


PROGRAMS, LEAST = PARTS // (4 * FEW * COLUMNS), 512
"""PROGRAMS: number of programs for which columns are divided, 4 on each of 128 multiprocessors: as
fast as any of 512, 768, 1,024 and 2,048 on an H200. LEAST: the least columns of x of each, not
measured.
"""

_KINDS = {"int4": 4, "int8": 8, "float8": 1}


@triton.jit
def _less(
    zeros, real, kind: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, PTX: tl.constexpr
):
    """Return the number to subtract from the result of `widened`: zero points [1,n], or one number
    for all.
    """
    more: tl.constexpr = 0 if KIND != 4 or not PTX else (128 if kind == tl.bfloat16 else 1024)
    if ZEROS:
        found = (tl.load(zeros, mask=real, other=0.0) + more).to(kind)[None, :]
    else:
        found = tl.full((1, 1), 8 + more, kind)
    return found


@triton.jit
def _scale(scales, KIND: tl.constexpr, HALVED: tl.constexpr, mask):
    """Load a block's scales. HALVED: whether float8 numbers are divided by 256."""
    found = tl.load(scales, mask=mask, other=0.0).to(tl.float32)
    if KIND == FLOAT8 and HALVED:
        found = found * 256.0
    return found


@triton.jit
def _scales(scales, width, real, KIND: tl.constexpr, HALVED: tl.constexpr, GATED: tl.constexpr):
    """Return the scales of a group, and of its columns."""
    scale = _scale(scales, KIND, HALVED, real)
    above = scale
    if GATED:
        above = _scale(scales + width, KIND, HALVED, real)
    return scale, above


@triton.jit
def _rows(place, x, order, at, there, inputs, ORDERED: tl.constexpr, EVEN: tl.constexpr):
    """Return [ROWS,n] of x, whose rows begin at `x`: the columns `at` in the weight's order;
    `place`: in x's own order.
    """
    if EVEN and not ORDERED:
        found = tl.load(place, mask=there, other=0.0)
    else:
        inside = at < inputs
        if ORDERED:
            place = x + tl.load(order + at, mask=inside, other=0)[None, :]
        found = tl.load(place, mask=there & inside[None, :], other=0.0)
    return found


@triton.jit
def _times(
    total, left, right, place, scale, zeros, real,
    kind: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, PTX: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Return `total` plus a block's product with the numbers at `place`."""
    raw = tl.load(place) if EVEN else tl.load(place, mask=real[None, :], other=0)
    # The interpreter has no bfloat16 arithmetic.
    wide: tl.constexpr = kind if PTX else tl.float32
    low, high = widened(raw, wide, KIND, PTX)
    if KIND == 4 or ZEROS:
        less = _less(zeros, real, wide, KIND, ZEROS, PTX)
        low, high = low - less, high - less
    low, high = low.to(kind), high.to(kind)
    found = tl.dot(left, low, input_precision="tf32x3")
    if KIND == 4:
        found = tl.dot(right, high, found, input_precision="tf32x3")
    return total + found * scale[None, :]


@triton.jit
def _biased(total, bias, column, real, kind: tl.constexpr, BIASED: tl.constexpr):
    """Add the bias, and round to the activations' dtype."""
    if BIASED:
        total = total + tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    return total.to(kind)


@triton.jit
def _finish(
    total, other, bias, out, line, column, there, real, half, width,
    BIASED: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, CLAMP: tl.constexpr,
    SLOPE: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = out.dtype.element_ty
    found = _biased(total, bias, column, real, kind, BIASED)
    if GATED:
        value = _biased(other, bias, half + column, real, kind, BIASED).to(tl.float32)
        found = gated(found.to(tl.float32), value, GELU, CLAMP, SLOPE).to(kind)
    place = out + line[:, None].to(tl.int64) * width + column[None, :]
    tl.store(place, found, mask=there[:, None] & real[None, :])


@triton.jit(do_not_specialize=["count"])
def _product(
    x, numbers, scales, zeros, order, bias, parts, through, out,
    count, line_stride, outputs, inputs, blocks, each, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    KIND: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, BIASED: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, CLAMP: tl.constexpr,
    SLOPE: tl.constexpr, PTX: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows by COLUMNS outputs over `each` blocks of the columns.

    SPAN     blocks of a group; 0: all
    GATED    the first half of the weight's rows opens the other, `width` of them each, and out is
             what comes through: GELU, CLAMP and SLOPE as in triton_layers.gated
    parts    float32[SPLITS,count,outputs] what programs found, where there are several
    through  int32[tiles] how many of a tile's are through: 0 before and after
    PTX      whether to convert by PTX instructions: x is in 16 bits, and not interpreted
    EVEN     blocks and tiles end where the weight does
    """
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, real = line < count, column < width
    kind: tl.constexpr = x.dtype.element_ty
    HALVED: tl.constexpr = not PTX or kind == tl.float16
    BYTES: tl.constexpr = BLOCK // 2 if KIND == 4 else BLOCK
    byte = tl.arange(0, BYTES)
    first = tl.program_id(2) * each
    last = tl.minimum(first + each, blocks)
    place = numbers + first.to(tl.int64) * outputs * BYTES
    place = place + column[None, :] * BYTES + byte[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    begins = x + line[:, None] * line_stride
    beside = begins + (first * BLOCK + byte)[None, :]
    # Scales of the next block are read before this one is multiplied, to hide latency.
    group = column
    if SPAN > 0:
        group += first // SPAN * outputs
    scale, above = _scales(scales + group, width, real, KIND, HALVED, GATED)
    for block in range(first, last):
        own, of, of_above = zeros + group, scale, above
        if SPAN > 0:
            group = (block + 1) // SPAN * outputs + column
            more = real & (block + 1 < last)
            scale, above = _scales(scales + group, width, more, KIND, HALVED, GATED)
        at, rows = block * BLOCK + byte, there[:, None]
        left = _rows(beside, begins, order, at, rows, inputs, ORDERED, EVEN)
        right = left
        if KIND == 4:
            beyond = beside + BYTES
            right = _rows(beyond, begins, order, at + BYTES, rows, inputs, ORDERED, EVEN)
        beside += BLOCK
        total = _times(total, left, right, place, of, own, real, kind, KIND, ZEROS, PTX, EVEN)
        if GATED:
            other = _times(
                other, left, right, place + width * BYTES, of_above, own + width, real,
                kind, KIND, ZEROS, PTX, EVEN,
            )  # fmt: skip
        place += outputs.to(tl.int64) * BYTES
    if SPLITS == 1:
        _finish(
            total, other, bias, out, line, column, there, real, width, width, BIASED, GATED, GELU,
            CLAMP, SLOPE,
        )  # fmt: skip
    else:
        mask = there[:, None] & real[None, :]
        whole = count.to(tl.int64) * outputs
        own = parts + line[:, None].to(tl.int64) * outputs + column[None, :]
        mine = own + tl.program_id(2) * whole
        tl.store(mine, total, mask=mask)
        if GATED:
            tl.store(mine + width, other, mask=mask)
        # All threads' numbers are written before this program counts, and the count orders them.
        tl.debug_barrier()
        tile = through + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(tile, 1) == SPLITS - 1:
            # Written by others: bypass this multiprocessor's cache.
            total = tl.load(own, mask=mask, other=0.0, cache_modifier=".cg")
            if GATED:
                other = tl.load(own + width, mask=mask, other=0.0, cache_modifier=".cg")
            for part in range(1, SPLITS):
                found = own + part * whole
                total += tl.load(found, mask=mask, other=0.0, cache_modifier=".cg")
                if GATED:
                    other += tl.load(found + width, mask=mask, other=0.0, cache_modifier=".cg")
            _finish(
                total, other, bias, out, line, column, there, real, width, width, BIASED, GATED,
                GELU, CLAMP, SLOPE,
            )  # fmt: skip
            tl.store(tile, 0)


@triton.jit
def _widen(
    numbers, scales, zeros, out, first, rows, outputs, inputs,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """Dequantise a block of COLUMNS of the weight's rows, from `first` on, to out [rows,inputs]."""
    block = tl.program_id(0)
    own = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, column = own < rows, first + own
    kind: tl.constexpr = out.dtype.element_ty
    BYTES: tl.constexpr = BLOCK // 2 if KIND == 4 else BLOCK
    byte = tl.arange(0, BYTES)
    place = numbers + (block.to(tl.int64) * outputs + column[:, None]) * BYTES + byte[None, :]
    raw = tl.load(place, mask=real[:, None], other=0)
    group = 0
    if SPAN > 0:
        group = block // SPAN
    scale = _scale(scales + group * outputs + column, KIND, True, real)[:, None]
    low, high = widened(raw, tl.float32, KIND, False)
    if ZEROS:
        zero = tl.load(zeros + group * outputs + column, mask=real, other=0).to(tl.float32)[:, None]
        low, high = low - zero, high - zero
    elif KIND == 4:
        low, high = low - 8.0, high - 8.0
    at = block * BLOCK + byte
    to = out + own[:, None].to(tl.int64) * inputs + at[None, :]
    tl.store(to, (low * scale).to(kind), mask=real[:, None] & (at < inputs)[None, :])
    if KIND == 4:
        mask = real[:, None] & (at + BYTES < inputs)[None, :]
        tl.store(to + BYTES, (high * scale).to(kind), mask=mask)


def rows_for(count: int) -> int:
    """Return the rows of a program's tile, one of two sizes. A row's sums are the same in both."""
    return 16 if count <= 16 else 32


def splits_of(weight: FewBits) -> tuple[int, int]:
    """Return the number of programs among which the columns are divided, and the blocks of each;
    depends on the weight alone.
    """
    blocks, tiles = len(weight.numbers), triton.cdiv(weight.shape[0], COLUMNS)
    wanted = max(1, min(PROGRAMS // tiles, blocks * weight.block // LEAST))
    each = triton.cdiv(blocks, wanted)
    return triton.cdiv(blocks, each), each


def product(x: Tensor, weight: FewBits, bias: Tensor | None) -> Tensor:
    """Return the product x W^T + b of x [M,K] and a quantised weight: see few_bits.FewBitsProduct;
    on one stream at a time. Asynchronous.
    """
    if len(x) > FEW:
        return _by_library(x, weight, bias)
    return _launched(x, weight, bias, None)


def gated_product(x: Tensor, weight: FewBits, bias: Tensor | None, activation: str) -> Tensor:
    """Compute few_bits.FewBitsGate: up to 16 rows in one launch, with the same bits as the product
    followed by the gate, which is used for more rows, since tiles of 32 by two halves take twice
    the registers.
    """
    gelu, clamped = activation == "gelu_tanh", activation == "clamped_silu"
    if rows_for(len(x)) > 16:
        first, second = product(x, weight, bias).chunk(2, -1)
        return gate(first, second, gelu, clamped)
    return _launched(x, weight, bias, (gelu, clamped))


def _launched(
    x: Tensor, weight: FewBits, bias: Tensor | None, opened: tuple[bool, bool] | None
) -> Tensor:
    """Launch `_product`. opened: whether the activation is GELU, and whether it is clamped; None:
    there is no gate.
    """
    (outputs, inputs), count, rows = weight.shape, len(x), rows_for(len(x))
    splits, each = splits_of(weight)
    gelu, clamped = opened or (False, False)
    width, columns = (outputs, COLUMNS) if opened is None else (outputs // 2, COLUMNS // 2)
    out = x.new_empty(count, width)
    parts = out
    if splits > 1:
        parts = x.new_empty(splits, count, outputs, dtype=torch.float32)
    _product[triton.cdiv(count, rows), triton.cdiv(width, columns), splits](
        *(x, *_stored(weight), out if weight.order is None else weight.order),
        *(out if bias is None else bias, parts, weight.through, out),
        *(count, x.stride(0), outputs, inputs, len(weight.numbers), each, width),
        ROWS=rows,
        COLUMNS=columns,
        ORDERED=weight.order is not None,
        BIASED=bias is not None,
        SPLITS=splits,
        GATED=opened is not None,
        GELU=gelu,
        CLAMP=CLAMP if clamped else 0.0,
        SLOPE=CLAMP_SLOPE if clamped else 1.0,
        PTX=x.itemsize == 2 and isinstance(_product, triton.JITFunction),
        EVEN=inputs % weight.block == 0 and width % columns == 0,
        **_constants(weight),
        num_warps=4,
        num_stages=3,
    )
    return out


def _stored(weight: FewBits) -> tuple[Tensor, Tensor, Tensor]:
    scales, zeros = weight.scales, weight.zeros
    return weight.numbers, scales, scales if zeros is None else zeros


def _constants(weight: FewBits) -> dict[str, int]:
    whole = weight.group >= weight.shape[1]
    return {
        "BLOCK": weight.block,
        "SPAN": 0 if whole else weight.group // weight.block,
        "KIND": _KINDS[weight.kind],
        "ZEROS": weight.zeros is not None,
    }


def _by_library(x: Tensor, weight: FewBits, bias: Tensor | None) -> Tensor:
    """Multiply many rows: dequantise the weight a part at a time, in the order of its elements."""
    outputs, inputs = weight.shape
    x = x if weight.order is None else x.index_select(1, weight.order)
    found = x.new_empty(len(x), outputs)
    step = min(outputs, max(1, SCRATCH // (inputs * x.itemsize)))
    for first in range(0, outputs, step):
        rows = min(step, outputs - first)
        wide = x.new_empty(rows, inputs)
        _widen[len(weight.numbers), triton.cdiv(rows, COLUMNS)](
            *(*_stored(weight), wide, first, rows, outputs, inputs),
            COLUMNS=COLUMNS,
            **_constants(weight),
            num_warps=4,
        )
        torch.mm(x, wide.t(), out=found[:, first : first + rows])
    return found if bias is None else found.add_(bias)
