"""Numbers of few bits as 16-bit floats within a kernel (triton_few_bits.py): bytes are widened four
at a time by the device's instructions for pairs, where nothing interprets the kernel.
"""

import triton
import triton.language as tl

FLOAT8 = tl.constexpr(1)
"""KIND of E4M3; that of integers is their bits, 4 or 8."""

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
    """Return the low and the high four bits of bytes, in the last places of 128 in bfloat16, of
    1024 in float16: larger by that number.
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
    """Return E4M3's numbers, in float16 256 times less. Their bits in bfloat16's places are 2^120
    times less, which a product takes back.
    """
    if kind == tl.bfloat16:
        found = tl.inline_asm_elementwise(_FLOATS_BF16, "=r,=r,r", [raw], tl.bfloat16, True, 4)
    else:
        found = tl.inline_asm_elementwise(_FLOATS_FP16, "=r,=r,r", [raw], tl.float16, True, 4)
    return found


@triton.jit
def widened(raw, kind: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr):
    """Return numbers, of which 16 bits hold each exactly: of 4 bits those of the low and of the
    high ones, else twice the same; of float8 in float16 256 times less.
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
