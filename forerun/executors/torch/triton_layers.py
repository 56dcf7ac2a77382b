"""What stands between a decoder's products, one Triton kernel each, for CUDA.

The slow twins are `PLAIN` in forerun.executors.torch.layers and `PagedCache.write`. Inputs may be
slices: only their last axis must be contiguous. Outputs are whole. Arithmetic in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.executors.torch.kv import CacheTensor, Narrow


@triton.jit(do_not_specialize=["eps"])
def _norm(x, weight, out, row_stride, head_stride, width, eps, WIDE: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDE)
    there = at < width
    value = tl.load(x + row * row_stride + head * head_stride + at, mask=there, other=0.0)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    wide = wide * tl.load(weight + at, mask=there, other=0.0)
    place = (row * tl.num_programs(1) + head) * width + at
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=there)


@triton.jit
def _gate(gate, up, out, gate_stride, up_stride, width, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    opened = tl.load(gate + row * gate_stride + at, mask=there, other=0.0).to(tl.float32)
    value = tl.load(up + row * up_stride + at, mask=there, other=0.0).to(tl.float32)
    angle = opened
    if GELU:
        angle = 1.5957691216057308 * (opened + 0.044715 * opened * opened * opened)
    found = opened / (1 + tl.exp(-angle)) * value
    tl.store(out + row * width + at, found.to(out.dtype.element_ty), mask=there)


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


@triton.jit
def _store(cached, scales, where, at, there, wide, E: tl.constexpr, NARROW: tl.constexpr):
    """One head's numbers `wide` into the slot `where`; as forerun.executors.torch.kv.put."""
    if NARROW:
        # Greatest or NaN: a maximum alone would drop that.
        bad = tl.sum(wide * 0, 0)
        scale = tl.maximum(tl.max(tl.abs(wide), 0), 1e-12) / 448.0 + bad
        tl.store(scales + where, scale)
        wide = tl.clamp(tl.div_rn(wide, tl.zeros_like(wide) + scale), -448.0, 448.0)
    tl.store(cached + where * E + at, wide.to(cached.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["begin"])
def _write(
    keys,
    values,
    to_keys,
    to_values,
    key_scales,
    value_scales,
    key_stride,
    value_stride,
    slots,
    begin,
    E: tl.constexpr,
    NARROW: tl.constexpr,
):
    row, group = tl.program_id(0), tl.program_id(1)
    WIDE: tl.constexpr = triton.next_power_of_2(E)
    at = tl.arange(0, WIDE)
    there = at < E
    key = tl.load(keys + row.to(tl.int64) * key_stride + group * E + at, mask=there, other=0.0)
    place = row.to(tl.int64) * value_stride + group * E + at
    value = tl.load(values + place, mask=there, other=0.0)
    nothing = value.to(tl.float32) * 0
    bad = tl.sum(key.to(tl.float32) * 0 + nothing, 0)
    value = tl.where(nothing == 0, value.to(tl.float32), 0.0)
    where = group.to(tl.int64) * slots + begin + row
    _store(to_keys, key_scales, where, at, there, key.to(tl.float32) + bad, E, NARROW)
    _store(to_values, value_scales, where, at, there, value, E, NARROW)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """layers.rms_norm over x [M,W] or [M,heads,W]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    wide = triton.next_power_of_2(width)
    _norm[len(x), heads](
        x,
        weight,
        out,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        width,
        eps,
        WIDE=wide,
        num_warps=8 if wide >= 4096 else 4 if wide >= 512 else 1,
    )
    return out


def gate(opened: Tensor, up: Tensor, gelu: bool = False) -> Tensor:
    """layers.swiglu of [M,I] and [M,I]; with `gelu` layers.geglu."""
    out = torch.empty(opened.shape, dtype=opened.dtype, device=opened.device)
    count, width = opened.shape
    _gate[count, triton.cdiv(width, 1024)](
        opened,
        up,
        out,
        opened.stride(0),
        up.stride(0),
        width,
        BLOCK=1024,
        GELU=gelu,
        num_warps=4,
    )
    return out


def gelu_gate(opened: Tensor, up: Tensor) -> Tensor:
    """layers.geglu of [M,I] and [M,I]."""
    return gate(opened, up, gelu=True)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """layers.turned of heads [M,heads,E] by float32 cos and sin [M,E/2]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = x.shape[2] // 2
    _rotate[len(x), x.shape[1]](x, cos, sin, out, x.stride(0), x.stride(1), HALF=half, num_warps=1)
    return out


def write(keys: Tensor, values: Tensor, layer: tuple[CacheTensor, CacheTensor], begin: int) -> None:
    """PagedCache.write: keys and values [M,G,E] into the slots begin, begin+1, ... of `layer`."""
    count, groups, size = keys.shape
    assert keys.stride(1) == values.stride(1) == size, "heads of a node stand side by side"
    narrow = isinstance(layer[0], Narrow)
    numbers = [cached.numbers if isinstance(cached, Narrow) else cached for cached in layer]
    scales = [cached.scale if isinstance(cached, Narrow) else cached for cached in layer]
    _write[count, groups](
        keys,
        values,
        *numbers,
        *scales,
        keys.stride(0),
        values.stride(0),
        numbers[0].shape[1],
        begin,
        E=size,
        NARROW=narrow,
        num_warps=1,
    )
