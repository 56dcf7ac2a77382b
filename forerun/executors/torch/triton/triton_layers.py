"""The operations between a decoder's matrix products, one Triton kernel each, for CUDA. The
references are `PLAIN` and `Heads.turned` in forerun.executors.torch.decoder.elementwise and `write`
in forerun.executors.torch.attention.kv. Inputs may be slices: only their last axis must be
contiguous. Outputs are contiguous. Arithmetic in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.attention import kv
from forerun.executors.torch.attention.kv import CacheTensor, Narrow
from forerun.executors.torch.decoder.elementwise import AnyHeads, LatentHeads
from forerun.networks.layer_spec import CLAMP, CLAMP_SLOPE


@triton.jit(do_not_specialize=["eps"])
def _norm(x, weight, out, row_stride, head_stride, width, eps, WIDE: tl.constexpr):
    """Normalise one row, or one head of it."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDE)
    there = at < width
    value = tl.load(x + row * row_stride + head * head_stride + at, mask=there, other=0.0)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    wide = wide * tl.load(weight + at, mask=there, other=0.0)
    place = out + (row * tl.num_programs(1) + head) * width + at
    tl.store(place, wide.to(x.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["eps"])
def _gated_norm(
    x, weight, gate, out, row_stride, head_stride, width, eps, WIDE: tl.constexpr
):  # fmt: skip
    """Normalise one head of a row, and multiply it by its gate."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDE)
    there, place = at < width, (row * tl.num_programs(1) + head) * width + at
    value = tl.load(x + place, mask=there, other=0.0)
    wide = value.to(gate.dtype.element_ty).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    wide = wide * tl.load(weight + at, mask=there, other=0.0)
    wide = wide.to(gate.dtype.element_ty).to(tl.float32)
    opened = tl.load(gate + row * row_stride + head * head_stride + at, mask=there, other=0.0)
    opened = opened.to(tl.float32)
    found = wide * (opened / (1 + tl.exp(-opened)))
    tl.store(out + place, found.to(gate.dtype.element_ty), mask=there)


@triton.jit
def gated(opened, value, GELU: tl.constexpr, CLAMP: tl.constexpr, SLOPE: tl.constexpr):
    """Apply a gate, float32. CLAMP: 0, or layer_spec.CLAMP, with its SLOPE."""
    if CLAMP > 0:
        opened = tl.minimum(opened, CLAMP)
        value = tl.minimum(tl.maximum(value, -CLAMP), CLAMP) + 1
    angle = opened * SLOPE
    if GELU:
        angle = 1.5957691216057308 * (opened + 0.044715 * opened * opened * opened)
    return opened / (1 + tl.exp(-angle)) * value


@triton.jit
def _gate(
    gate, up, out, gate_stride, up_stride, width,
    BLOCK: tl.constexpr, GELU: tl.constexpr, CLAMP: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Apply the gate to a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    opened = tl.load(gate + row * gate_stride + at, mask=there, other=0.0).to(tl.float32)
    value = tl.load(up + row * up_stride + at, mask=there, other=0.0).to(tl.float32)
    found = gated(opened, value, GELU, CLAMP, SLOPE).to(gate.dtype.element_ty)
    tl.store(out + row * width + at, found, mask=there)


@triton.jit
def _rotate(x, cos, sin, out, row_stride, head_stride, HALF: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    WIDE: tl.constexpr = triton.next_power_of_2(HALF)
    at = tl.arange(0, WIDE)
    there = at < HALF
    begin = x + row * row_stride + head * head_stride
    first = tl.load(begin + at, mask=there, other=0.0).to(tl.float32)
    second = tl.load(begin + HALF + at, mask=there, other=0.0).to(tl.float32)
    c = tl.load(cos + row * HALF + at, mask=there, other=0.0)
    s = tl.load(sin + row * HALF + at, mask=there, other=0.0)
    place = out + (row * tl.num_programs(1) + head) * (2 * HALF) + at
    kind = out.dtype.element_ty
    tl.store(place, (first * c - second * s).to(kind), mask=there)
    tl.store(place + HALF, (second * c + first * s).to(kind), mask=there)


@triton.jit(do_not_specialize=["eps"])
def _add_norm(x, more, weight, added, out, x_stride, more_stride, width, eps, WIDE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    there = at < width
    kind = added.dtype.element_ty
    one = tl.load(x + row * x_stride + at, mask=there, other=0.0).to(tl.float32)
    other = tl.load(more + row * more_stride + at, mask=there, other=0.0).to(tl.float32)
    whole = (one + other).to(kind)
    tl.store(added + row * width + at, whole, mask=there)
    wide = whole.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    wide = wide * tl.load(weight + at, mask=there, other=0.0)
    tl.store(out + row * width + at, wide.to(kind), mask=there)


@triton.jit
def _normed(first, second, weight, eps, at, there, kind: tl.constexpr, HALF: tl.constexpr):
    """Return both halves of a head after its norm, float32 but rounded to `kind`."""
    mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF)
    scale = tl.rsqrt(mean + eps)
    low = tl.load(weight + at, mask=there, other=0.0)
    high = tl.load(weight + HALF + at, mask=there, other=0.0)
    first = (first * scale * low).to(kind).to(tl.float32)
    return first, (second * scale * high).to(kind).to(tl.float32)


@triton.jit
def _head(begin, weight, cos, sin, eps, at, there, HALF: tl.constexpr, NORMED: tl.constexpr):
    """Return both halves of a head, float32 but rounded, after its norm and rotation. NORMED: 0 =
    there is no norm, 1 = it is before the rotation, 2 = after it.
    """
    first = tl.load(begin + at, mask=there, other=0.0)
    second = tl.load(begin + HALF + at, mask=there, other=0.0)
    kind = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORMED == 1:
        first, second = _normed(first, second, weight, eps, at, there, kind, HALF)
    c = tl.load(cos + at, mask=there, other=0.0)
    s = tl.load(sin + at, mask=there, other=0.0)
    one = (first * c - second * s).to(kind).to(tl.float32)
    other = (second * c + first * s).to(kind).to(tl.float32)
    if NORMED == 2:
        one, other = _normed(one, other, weight, eps, at, there, kind, HALF)
    return one, other


@triton.jit
def _store(
    cached, scales, where, at, there, first, second, HALF: tl.constexpr, NARROW: tl.constexpr
):
    """Write a head's halves, float32, to the slot `where`, as attention/kv.put does."""
    if NARROW:
        # Maximum or NaN, which a plain maximum would drop.
        bad = tl.sum(first * 0, 0) + tl.sum(second * 0, 0)
        most = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
        scale = tl.maximum(most, 1e-12) * (1 / 448.0) + bad
        tl.store(scales + where, scale)
        by = tl.zeros_like(first) + scale
        first = tl.clamp(tl.div_rn(first, by), -448.0, 448.0)
        second = tl.clamp(tl.div_rn(second, by), -448.0, 448.0)
    kind = cached.dtype.element_ty
    place = cached + where * (2 * HALF) + at
    tl.store(place, first.to(kind), mask=there)
    tl.store(place + HALF, second.to(kind), mask=there)


@triton.jit(do_not_specialize=["heads", "groups", "slot_count", "eps"])
def _enter(
    qkv, q_norm, k_norm, cos, sin, slots, out, to_keys, to_values, key_scales, value_scales,
    node_stride, heads, groups, slot_count, eps,
    HALF: tl.constexpr, NORMED: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Write one query head; or a key head and the corresponding value head."""
    node, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, triton.next_power_of_2(HALF))
    there = at < HALF
    begin = qkv + node * node_stride + head * (2 * HALF)
    cos, sin = cos + node * HALF, sin + node * HALF
    if head < heads:
        first, second = _head(begin, q_norm, cos, sin, eps, at, there, HALF, NORMED)
        place = out + (node * heads + head) * (2 * HALF) + at
        kind = out.dtype.element_ty
        tl.store(place, first.to(kind), mask=there)
        tl.store(place + HALF, second.to(kind), mask=there)
    else:
        first, second = _head(begin, k_norm, cos, sin, eps, at, there, HALF, NORMED)
        value = begin + groups * (2 * HALF)
        low = tl.load(value + at, mask=there, other=0.0).to(tl.float32)
        high = tl.load(value + HALF + at, mask=there, other=0.0).to(tl.float32)
        # Non-finite values are moved to the key, where a mask hides them (kv.write).
        bad = tl.sum(first * 0 + low * 0, 0) + tl.sum(second * 0 + high * 0, 0)
        low, high = tl.where(low * 0 == 0, low, 0.0), tl.where(high * 0 == 0, high, 0.0)
        where = (head - heads).to(tl.int64) * slot_count + tl.load(slots + node)
        first, second = first + bad, second + bad
        _store(to_keys, key_scales, where, at, there, first, second, HALF, NARROW)
        _store(to_values, value_scales, where, at, there, low, high, HALF, NARROW)


def warps_for(wide: int) -> int:
    """Return the warps of a program that processes a whole row of `wide` elements, a power of
    two.
    """
    if wide >= 4096:
        return 8
    return 4 if wide >= 512 else 1


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm over the last axis of x [M,W] or [M,heads,W] by a weight [W]:
    elementwise.rms_norm. Shape and dtype of x; asynchronous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    wide = triton.next_power_of_2(width)
    _norm[len(x), heads](
        *(x, weight, out, x.stride(0), x.stride(1) if x.dim() == 3 else 0, width, eps),
        WIDE=wide,
        num_warps=warps_for(wide),
    )
    return out


def gated_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """Return the RMSNorm of x float32[M,heads,W] by a weight [W], times SiLU of a gate of the same
    shape, in its dtype: elementwise.gated_norm. Asynchronous.
    """
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, heads, width = gate.shape
    wide = triton.next_power_of_2(width)
    _gated_norm[rows, heads](
        *(x.contiguous(), weight, gate, out, gate.stride(0), gate.stride(1), width, eps),
        WIDE=wide,
        num_warps=warps_for(wide),
    )
    return out


def gate(opened: Tensor, up: Tensor, gelu: bool = False, clamped: bool = False) -> Tensor:
    """Return silu(opened) * up of [M,I] and [M,I], in their dtype: elementwise.swiglu; with `gelu`
    geglu, `clamped` clamped_swiglu. Asynchronous.
    """
    out = torch.empty(opened.shape, dtype=opened.dtype, device=opened.device)
    count, width = opened.shape
    _gate[count, triton.cdiv(width, 1024)](
        *(opened, up, out, opened.stride(0), up.stride(0), width),
        BLOCK=1024,
        GELU=gelu,
        CLAMP=CLAMP if clamped else 0.0,
        SLOPE=CLAMP_SLOPE if clamped else 1.0,
        num_warps=4,
    )
    return out


def gelu_gate(opened: Tensor, up: Tensor) -> Tensor:
    """Return gelu(opened) * up of [M,I] and [M,I], by tanh, in their dtype: elementwise.geglu.
    Asynchronous.
    """
    return gate(opened, up, gelu=True)


def clamped_gate(opened: Tensor, up: Tensor) -> Tensor:
    """Return elementwise.clamped_swiglu of opened and up [M,I], in their dtype. Asynchronous."""
    return gate(opened, up, clamped=True)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return elementwise.turned of heads [M,heads,E] by float32 cos and sin [M,E/2]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = x.shape[2] // 2
    _rotate[len(x), x.shape[1]](x, cos, sin, out, x.stride(0), x.stride(1), HALF=half, num_warps=1)
    return out


def add_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum [M,H] of x and more [M,H], and its RMSNorm with a weight [H]:
    elementwise.add_norm. Asynchronous.
    """
    added, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    wide = triton.next_power_of_2(x.shape[1])
    _add_norm[(len(x),)](
        *(x, more, weight, added, normed, x.stride(0), more.stride(0), x.shape[1], eps),
        WIDE=wide,
        num_warps=warps_for(wide),
    )
    return added, normed


def enter(heads: AnyHeads, layer: tuple[CacheTensor, CacheTensor], slots: Tensor) -> Tensor:
    """Return the queries [M,A,E] of `heads`, normalised and rotated (Heads.turned); write their
    keys and values to the slots int[M] of `layer` (kv.write). Latent heads use the reference, which
    is asynchronous, too.
    """
    if isinstance(heads, LatentHeads):
        return kv.enter(heads, layer, slots)
    qkv, groups, normed = heads.qkv, heads.kv_heads, heads.q_norm is not None
    count, parts, size = qkv.shape
    assert qkv.stride(1) == size and normed == (heads.k_norm is not None)
    queries = parts - 2 * groups
    out = torch.empty((count, queries, size), dtype=qkv.dtype, device=qkv.device)
    numbers = [cached.numbers if isinstance(cached, Narrow) else cached for cached in layer]
    scales = [cached.scale if isinstance(cached, Narrow) else cached for cached in layer]
    norms = [out if norm is None else norm for norm in (heads.q_norm, heads.k_norm)]
    _enter[count, queries + groups](
        *(qkv, *norms, *heads.rotary, slots, out, *numbers, *scales),
        *(qkv.stride(0), queries, groups, numbers[0].shape[1], heads.eps),
        HALF=size // 2,
        NORMED=normed + (normed and heads.late),
        NARROW=isinstance(layer[0], Narrow),
        num_warps=1,
    )
    return out
