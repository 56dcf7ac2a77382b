"""The operations of a decoder as pure functions, with the results of torch/decoder's."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.networks.layer_spec import CLAMP, CLAMP_SLOPE


def product(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Return [...,N] in the dtype of x: x [...,K] by weight [K,N], plus bias [N]; sums in float32.

    A TPU multiplies float32 in bfloat16 by default.
    """
    y = lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return (y if bias is None else y + bias).astype(x.dtype)


def products(what: str, x: Array, weights: Array, bias: Array | None = None) -> Array:
    """Return the einsum `what` of x and one matrix per head or expert, in the dtype of x; as
    `product`.
    """
    made = jnp.einsum(
        what,
        x,
        weights,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return (made if bias is None else made + bias).astype(x.dtype)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return the RMSNorm (arXiv 1910.07467) of x [...,H]: x / rms(x) * weight [H] in float32, in
    the dtype of `x`.
    """
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (wide * weight).astype(x.dtype)


def swiglu(gate: Array, up: Array) -> Array:
    """Return silu(gate) * up (SwiGLU, arXiv 2002.05202) of gate and up [...,I], computed in
    float32, in the dtype of `gate`.
    """
    wide = gate.astype(jnp.float32)
    return (wide / (1 + jnp.exp(-wide)) * up).astype(gate.dtype)


_GELU = 2 * (2 / np.pi) ** 0.5


def geglu(gate: Array, up: Array) -> Array:
    """Return gelu(gate) * up of gate and up [...,I], with GELU's tanh approximation (arXiv
    1606.08415), computed in float32, in the dtype of `gate`.
    """
    wide = gate.astype(jnp.float32)
    angle = _GELU * (wide + 0.044715 * wide * wide * wide)
    return (wide / (1 + jnp.exp(-angle)) * up).astype(gate.dtype)


def erf_geglu(gate: Array, up: Array) -> Array:
    """Return gelu(gate) * up with the error function, of [...,I] each, computed in float32, in the
    dtype of `gate`.
    """
    wide = gate.astype(jnp.float32)
    return (wide * (0.5 * lax.erfc(wide * -(0.5**0.5))) * up).astype(gate.dtype)


def clamped_swiglu(gate: Array, up: Array) -> Array:
    """Return gpt-oss's gate (layer_spec.Activation) of gate and up [...,I], computed in float32, in
    the dtype of `gate`.
    """
    wide = jnp.minimum(gate.astype(jnp.float32), CLAMP)
    opened = wide / (1 + jnp.exp(-CLAMP_SLOPE * wide))
    return (opened * (jnp.clip(up.astype(jnp.float32), -CLAMP, CLAMP) + 1)).astype(gate.dtype)


GATES = {
    "silu": swiglu,
    "gelu_tanh": geglu,
    "gelu": erf_geglu,
    "clamped_silu": clamped_swiglu,
}
"""The gates by LayerSpec.activation."""


def softcapped(x: Array, cap: float | None) -> Array:
    """Return cap * tanh(x / cap) elementwise, between -cap and cap (arXiv 2408.00118, section 2);
    `x` [...] unchanged if cap is None.
    """
    return x if cap is None else jnp.tanh(x / cap) * cap


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Apply RoPE to heads x [..., heads, E], half-split layout, by cos and sin [..., E/2]; in
    float32, dtype of `x`.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, -1).astype(x.dtype)


def rotation(positions: Array, frequencies: Array, factor: float) -> tuple[Array, Array]:
    """Return cos and sin for RoPE (arXiv 2104.09864), float32[...,E/2] each.

    positions    int32[...] tokens
    frequencies  float32[E/2]
    factor       attention factor that scales both for rotated pairs, whose frequency is not 0
                 (YaRN, LongRoPE); 1 without
    """
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    cos = jnp.where(frequencies == 0, 1.0, jnp.cos(angles) * factor)
    return cos, jnp.sin(angles) * factor
