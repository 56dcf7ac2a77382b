"""The operations between a decoder's matrix products, row by row, in torch: used on the CPU, and as
the reference for triton_layers.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.decoder.few_bits import IN_TORCH, FewBitsProducts
from forerun.executors.torch.decoder.grouped import GroupedProduct
from forerun.networks.layer_spec import CLAMP, CLAMP_SLOPE

Gate = Callable[[Tensor, Tensor], Tensor]
"""(gate [M,I], up [M,I]) -> [M,I]: Elementwise.gate or another activation."""


class DraftInputs(Protocol):
    """`draft_inputs`, or a function with the same result."""

    def __call__(
        self,
        tokens: Tensor,
        embedding: Tensor,
        hidden: Tensor,
        norms: tuple[Tensor, Tensor],
        eps: float,
        hidden_first: bool = False,
    ) -> Tensor:
        """Return [n,2H]."""
        ...


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The operations between a decoder's matrix products: `rms_norm`, `add_norm`, `swiglu`,
    `turned`, `geglu`, `clamped_swiglu`; `draft_inputs` before a draft model's first product, and
    `gated_norm` before a gated delta net's last one.

    grouped   the grouped product of experts, which does not synchronise with the device; None: one
              product per expert, whose rows the host selects
    few_bits  matrix products with quantised weights
    """

    norm: Callable[[Tensor, Tensor, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    gate: Callable[[Tensor, Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    gelu_gate: Callable[[Tensor, Tensor], Tensor]
    draft_inputs: DraftInputs
    clamped_gate: Callable[[Tensor, Tensor], Tensor]
    gated_norm: Callable[[Tensor, Tensor, float, Tensor], Tensor]
    grouped: GroupedProduct | None = None
    few_bits: FewBitsProducts = IN_TORCH

    def gate_for(self, activation: str) -> Gate:
        """Return the gate of an activation, by its name in layer_spec.py: silu, gelu, clamped_silu;
        any other is GELU by tanh.
        """
        named = {"silu": self.gate, "gelu": erf_geglu, "clamped_silu": self.clamped_gate}
        return named.get(activation, self.gelu_gate)


Rotary = tuple[Tensor, Tensor]
"""Cos and sin, each float32[M,E/2]."""


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The inputs of absorbed latent attention (layer_spec.Latent), before rotation.

    queries  [M,A,rank] in the latent space, and the part [M,A,rope] to be rotated
    latent   [M,rank] normalised, and [M,rope] to be rotated
    rotary   of the positions of the M nodes
    """

    queries: tuple[Tensor, Tensor]
    latent: tuple[Tensor, Tensor]
    rotary: Rotary
    parts: Elementwise
    sinks: Tensor | None = None
    gate: None = None

    def turned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [M,A,E], keys [M,1,E] and values [M,1,rank], E = rank + rope."""
        rotate, (latent, key) = self.parts.rotate, self.latent
        queries = torch.cat([self.queries[0], rotate(self.queries[1], *self.rotary)], -1)
        latent = latent.unsqueeze(1)
        return queries, torch.cat([latent, rotate(key.unsqueeze(1), *self.rotary)], -1), latent


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries, keys and values of a layer as its product returned them, before norm and rotation.

    qkv             [M,A+2G,E]: queries, then keys, then values
    kv_heads        G
    q_norm, k_norm  float32[E] of every query or key head; None = not normalised
    eps             of those norms
    rotary          of the positions of the M nodes
    parts           computes the norms and the rotation
    sinks           float32[A] a score of each query head that has no value; None = none
    gate            [M,A*E] whose sigmoid multiplies the attention output; None = not gated
    late            whether the norms follow the rotation
    """

    qkv: Tensor
    kv_heads: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    rotary: Rotary
    parts: Elementwise
    sinks: Tensor | None = None
    gate: Tensor | None = None
    late: bool = False

    def turned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [M,A,E], keys and values [M,G,E], normalised and rotated: the reference
        for Kernels.enter, which also writes them.
        """
        groups = self.kv_heads
        q, k, v = self.qkv.split([self.qkv.shape[1] - 2 * groups, groups, groups], 1)
        return self._turned(q, self.q_norm), self._turned(k, self.k_norm), v

    def _turned(self, heads: Tensor, norm: Tensor | None) -> Tensor:
        if norm is None:
            return self.parts.rotate(heads, *self.rotary)
        if self.late:
            return self.parts.norm(self.parts.rotate(heads, *self.rotary), norm, self.eps)
        return self.parts.rotate(self.parts.norm(heads, norm, self.eps), *self.rotary)


AnyHeads = Heads | LatentHeads
"""The heads of a layer, for every kind of attention."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm (arXiv 1910.07467) of x [...,W] by a weight [W] over the last axis, in
    float32 or better; shape and dtype of `x`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


def add_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum x + more, rounded to the dtype of `x`, and `rms_norm` of that; all [M,H]."""
    added = x + more
    return added, rms_norm(added, weight, eps)


def draft_inputs(
    tokens: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    norms: tuple[Tensor, Tensor],
    eps: float,
    hidden_first: bool = False,
) -> Tensor:
    """Return [n,2H]: `rms_norm` of the embeddings of tokens int[n], concatenated with that of
    hidden states [n,H].

    embedding  [V,H]
    norms      weights of both, embedding first, whichever comes first in the result
    """
    normed = (
        rms_norm(F.embedding(tokens, embedding).to(hidden.dtype), norms[0], eps),
        rms_norm(hidden, norms[1], eps),
    )
    return torch.cat(normed[::-1] if hidden_first else normed, -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, in float32; dtype of `gate`. Does not use F.silu, whose bits on the
    CPU depend on the index in the tensor.
    """
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide)) * up).to(gate.dtype)


_GELU = 2 * (2 / torch.pi) ** 0.5
"""Twice the square root of 2/pi."""


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up with GELU's tanh approximation (arXiv 1606.08415), in float32; dtype
    of `gate`. Uses 0.5 g (1 + tanh(a)) = g / (1 + exp(-2a)), not F.gelu, whose bits on the CPU
    depend on the index in the tensor.
    """
    wide = gate.float()
    angle = _GELU * (wide + 0.044715 * wide * wide * wide)
    return (wide / (1 + torch.exp(-angle)) * up).to(gate.dtype)


def erf_geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up with the error function, in float32; dtype of `gate`. Used on every
    device: there is no kernel of ours for it.
    """
    wide = gate.float()
    return (wide * (0.5 * torch.erfc(wide * -(0.5**0.5))) * up).to(gate.dtype)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gpt-oss's gate (layer_spec.Activation) of gate and up [...,I], in float32; dtype of
    `gate`.
    """
    wide = gate.float().clamp(max=CLAMP)
    opened = wide / (1 + torch.exp(-CLAMP_SLOPE * wide))
    return (opened * (up.float().clamp(-CLAMP, CLAMP) + 1)).to(gate.dtype)


def softcapped(x: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x / cap) elementwise, between -cap and cap (arXiv 2408.00118, section 2);
    `x` without a cap.
    """
    return x if cap is None else torch.tanh(x / cap) * cap


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to heads x [..., heads, E], half-split layout, by cos and sin [..., E/2]."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def opened(x: Tensor, gate: Tensor) -> Tensor:
    """Return sigmoid(gate) * x, in float32; shape and dtype of `x`."""
    return (x / (1 + torch.exp(-gate.float()))).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `rotate`, computed in float32; shape and dtype of `x`."""
    return rotate(x.float(), cos, sin).to(x.dtype)


def rotation(
    positions: Tensor, frequencies: Tensor, factor: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [..., E/2], of positions [...] (tokens) at frequencies [E/2];
    `factor` applies to rotated pairs only, whose frequency is not 0.
    """
    angles = positions.float().unsqueeze(-1) * frequencies
    return torch.where(frequencies == 0, 1.0, angles.cos() * factor), angles.sin() * factor


def gated_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """Return [M,heads,W] in the dtype of `gate` [M,heads,W]: RMSNorm of x float32[M,heads,W] by a
    weight [W], times SiLU of the gate.
    """
    normed, wide = rms_norm(x.to(gate.dtype), weight, eps), gate.float()
    return (normed.float() * (wide / (1 + torch.exp(-wide)))).to(gate.dtype)


PLAIN = Elementwise(
    *(rms_norm, add_norm, swiglu, turned, geglu, draft_inputs, clamped_swiglu, gated_norm)
)


def compiled(parts: Elementwise) -> Elementwise:
    """Return the operations compiled with torch.compile, for any number of rows: one kernel each,
    generated at its first run.
    """
    made: dict[str, Any] = {
        field.name: torch.compile(getattr(parts, field.name), dynamic=True)
        for field in fields(parts)
        if field.name not in ("grouped", "few_bits")
    }
    return replace(parts, **made)
