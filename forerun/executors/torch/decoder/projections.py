"""What makes queries, keys and values of a layer's input, and what reads their context: one class
for each kind of attention (layer_spec.AttentionSpec).
"""

import torch
from torch import Tensor

from forerun.executors.torch.decoder.delta import DeltaProjections
from forerun.executors.torch.decoder.float8 import Float8Linear, Float8Rows, Rows
from forerun.executors.torch.decoder.layers import (
    Elementwise,
    Heads,
    LatentHeads,
    Linear,
    Product,
    Rotary,
    opened,
    plain,
)
from forerun.executors.torch.decoder.weights import Weights
from forerun.models.arch import Architecture
from forerun.models.layer_spec import Latent, LayerSpec


class HeadsProjections:
    """q_proj, k_proj, v_proj and o_proj, and gate_proj where attention is gated."""

    def __init__(
        self, weights: Weights, prefix: str, spec: LayerSpec, arch: Architecture, parts: Elementwise
    ) -> None:
        self._arch, self._parts, self._wide = arch, parts, spec.wide_qk_norm
        normed = spec.qk_norm or spec.wide_qk_norm
        self._q_norm = weights.norm(f"{prefix}.q_norm.weight") if normed else None
        self._k_norm = weights.norm(f"{prefix}.k_norm.weight") if normed else None
        self._qkv = weights.block_linear(*(f"{prefix}.{part}_proj" for part in "qkv"))
        self._out = weights.block_linear(f"{prefix}.o_proj")
        self._gate: Product | None = None
        if spec.attention.gated:
            self._gate = weights.block_linear(f"{prefix}.gate_proj")
        self._sinks = weights.vector(f"{prefix}.sinks") if spec.attention.sinks else None
        self.float8 = isinstance(self._out, Float8Linear)

    @property
    def linears(self) -> tuple[Product, ...]:
        """Its matrix products."""
        return self._qkv, self._out, *([] if self._gate is None else [self._gate])

    def heads(self, x: Rows, rotary: Rotary) -> Heads:
        """Of rows [M,H] at the positions of `rotary`."""
        arch, qkv = self._arch, self._qkv(x)
        q_norm, k_norm = self._q_norm, self._k_norm
        if q_norm is not None and k_norm is not None and self._wide:
            qkv, q_norm, k_norm = self._normed(qkv, q_norm, k_norm), None, None
        each = qkv.view(len(qkv), -1, arch.head_size)
        return Heads(
            *(each, arch.kv_heads, q_norm, k_norm, arch.norm_eps, rotary, self._parts),
            *(self.float8 and self._gate is None, self._sinks),
            None if self._gate is None else self._gate(x),
        )

    def _normed(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        """[M,(A+2G)*E], all query heads normed as one row, and all key heads."""
        arch, norm = self._arch, self._parts.norm
        keys = arch.kv_heads * arch.head_size
        q, k, v = qkv.split([arch.heads * arch.head_size, keys, keys], -1)
        return torch.cat([norm(q, q_norm, arch.norm_eps), norm(k, k_norm, arch.norm_eps), v], -1)

    def out(self, context: Rows, gate: Tensor | None) -> Tensor:
        """[M,H] of context [M,A,E]; gate: of the same heads."""
        if isinstance(context, Float8Rows):
            return self._out(context)
        rows = context.flatten(1)
        return self._out(rows if gate is None else opened(rows, gate))


class LatentProjections:
    """Latent attention's, absorbed: kv_b_proj is cut into what brings queries into the latent's
    space and what brings the context out of it; neither keys nor values are ever made.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        spec: LayerSpec,
        latent: Latent,
        arch: Architecture,
        parts: Elementwise,
    ) -> None:
        self._arch, self._parts, self._latent = arch, parts, latent
        self._q_norm: Tensor | None = None
        down = f"{prefix}.kv_a_proj_with_mqa"
        if latent.query_rank is None:
            self._down = weights.block_linear(down)
            self._queries = weights.block_linear(f"{prefix}.q_proj")
        else:
            self._down = weights.block_linear(f"{prefix}.q_a_proj", down)
            self._q_norm = weights.norm(f"{prefix}.q_a_layernorm.weight")
            self._queries = weights.linear(f"{prefix}.q_b_proj")
        self._norm = weights.norm(f"{prefix}.kv_a_layernorm.weight")
        each = weights.matrix(f"{prefix}.kv_b_proj.weight").unflatten(0, (arch.heads, -1))
        into, out_of = each.split([latent.nope, latent.value], 1)
        self._into = EachHead(into.transpose(1, 2))
        self._out_of = EachHead(out_of)
        self._out = weights.block_linear(f"{prefix}.o_proj")
        self._sinks = weights.vector(f"{prefix}.sinks") if spec.attention.sinks else None
        self.float8 = isinstance(self._out, Float8Linear)

    @property
    def linears(self) -> tuple[Product, ...]:
        """Its matrix products."""
        products = self._down, self._queries, self._out
        return *products, *self._into.linears, *self._out_of.linears

    def heads(self, x: Rows, rotary: Rotary) -> LatentHeads:
        """Of rows [M,H] at the positions of `rotary`."""
        arch, about, norm = self._arch, self._latent, self._parts.norm
        down = self._down(x)
        kept = down[:, -about.rank - about.rope :]
        entering: Rows = x
        if self._q_norm is not None:
            entering = norm(down[:, : about.query_rank], self._q_norm, about.norm_eps)
        queries = self._queries(entering).unflatten(1, (arch.heads, -1))
        unrotated, rotated = queries.split([about.nope, about.rope], -1)
        latent, key = kept.split([about.rank, about.rope], -1)
        latent = norm(latent, self._norm, about.norm_eps)
        pair = self._into(unrotated), rotated
        return LatentHeads(pair, (latent, key), rotary, self._parts, sinks=self._sinks)

    def out(self, context: Rows, gate: Tensor | None) -> Tensor:
        """[M,H] of context [M,A,rank]; there is no gate."""
        return self._out(self._out_of(plain(context)).flatten(1))


Projections = HeadsProjections | LatentProjections | DeltaProjections


class EachHead:
    """A product with a weight of its own for each head [A,out,in]: [M,A,in] -> [M,A,out].

    On the CPU one head after the other, so that a row's bits do not depend on how many there are.
    """

    def __init__(self, weight: Tensor) -> None:
        self.linears: tuple[Linear, ...] = ()
        if weight.device.type == "cpu":
            self.linears = tuple(Linear(each.contiguous()) for each in weight)
        else:
            self._weight = weight.transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[M,A,out]."""
        if not self.linears:
            return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)
        return torch.stack([linear(x[:, head]) for head, linear in enumerate(self.linears)], 1)


def projections(
    weights: Weights, prefix: str, spec: LayerSpec, arch: Architecture, parts: Elementwise
) -> Projections:
    """Of the layer that `spec` describes; its tensors begin with `prefix`."""
    if spec.delta is not None:
        return DeltaProjections(weights, f"{prefix}.linear_attn", spec.delta, arch, parts)
    latent, prefix = spec.attention.latent, f"{prefix}.self_attn"
    if latent is None:
        return HeadsProjections(weights, prefix, spec, arch, parts)
    return LatentProjections(weights, prefix, spec, latent, arch, parts)
