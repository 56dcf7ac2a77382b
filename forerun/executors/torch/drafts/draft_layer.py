"""The decoder layer of draft networks in torch, for training and serving.

Its weights are parameters under their published names. The operations between its products are an
`Elementwise`: TRAINED, which has gradients, or that of the target's device. It is independent of
pages and trees: `attend` gets a layer's heads and returns the attention output. For serving
(loading.py), products that read the same rows are stacked.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from forerun.executors.torch.decoder.elementwise import (
    PLAIN,
    Elementwise,
    Heads,
    Rotary,
    rms_norm,
    rotate,
)

Attend = Callable[[int, Any], Tensor]
"""(layer, its heads, `Heads` or `TrainedHeads`) -> attention output [..., A, E]."""

TRAINED = replace(PLAIN, gate=lambda gate, up: F.silu(gate) * up, rotate=rotate)
"""Operations in the rows' own dtype, which may be float64, with any leading axes."""


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) over the last axis, in float32 or better."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x [...,width], in its dtype."""
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of a draft network's layer. Letters as in forerun/types.py.

    input_width  of the input of queries, keys and values; None = hidden
    entry_norms  its norms before attention, by their published names
    qk_norm      RMSNorm over E on each query and key head, before the rotation
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    norm_eps: float
    input_width: int | None = None
    entry_norms: tuple[str, ...] = ("input_layernorm",)
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False


@dataclass(frozen=True, slots=True)
class TrainedHeads:
    """Queries [..., A, E], of some rows only, keys and values [..., G, E]; rotated."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    def turned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values unchanged: they are rotated already."""
        return self.queries, self.keys, self.values


class _Attention(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        wide = shape.input_width or shape.hidden
        query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q_proj = nn.Linear(wide, query, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(wide, key, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(wide, key, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(query, shape.hidden, bias=shape.o_bias)
        self.q_norm = Norm(shape.head_size, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = Norm(shape.head_size, shape.norm_eps) if shape.qk_norm else None


class _Mlp(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)


class DraftLayer(nn.Module):
    """One decoder layer, whose attention reads the network's combined inputs.

    stacked  for serving: the weights of queries, keys and values, and of gate and up, stacked
    """

    def __init__(self, shape: LayerShape, parts: Elementwise = TRAINED) -> None:
        super().__init__()
        self.build(shape, parts)

    def build(self, shape: LayerShape, parts: Elementwise) -> None:
        """Add the modules for `shape` to the existing ones."""
        self.shape, self.parts = shape, parts
        for name in shape.entry_norms:
            self.add_module(name, Norm(shape.hidden, shape.norm_eps))
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = _Mlp(shape)
        self.stacked: tuple[Tensor, Tensor] | None = None

    def entry_norm(self, name: str = "input_layernorm") -> Tensor:
        """Return the weight [H] of a norm before the attention."""
        return self.get_parameter(f"{name}.weight")

    def heads(
        self, x: Tensor, rotary: Rotary, only: Tensor | None = None, context: bool = False
    ) -> Heads | TrainedHeads:
        """Return the heads of rows [..., input_width] at the positions of `rotary`; context: only
        keys and values.

        only  int64[R]: the rows of [N, ...] that have queries; for training
        """
        shape, layer, eps = self.shape, self.self_attn, self.shape.norm_eps
        norms = [None if each is None else each.weight for each in (layer.q_norm, layer.k_norm)]
        if self.stacked is not None:
            weight = self.stacked[0][shape.heads * shape.head_size if context else 0 :]
            qkv = F.linear(x, weight).unflatten(-1, (-1, shape.head_size))
            return Heads(qkv, shape.kv_heads, norms[0], norms[1], eps, rotary, self.parts)

        def rotated(x: Tensor, product: nn.Linear, norm: Tensor | None, *rotary: Tensor) -> Tensor:
            each = product(x).unflatten(-1, (-1, shape.head_size))
            each = each if norm is None else self.parts.norm(each, norm, eps)
            return self.parts.rotate(each, *rotary)

        keys = rotated(x, layer.k_proj, norms[1], *rotary)
        values = layer.v_proj(x).unflatten(-1, (-1, shape.head_size))
        if context:
            return TrainedHeads(keys[..., :0, :], keys, values)
        asking, *angles = (chosen(rows, only) for rows in (x, *rotary))
        return TrainedHeads(rotated(asking, layer.q_proj, norms[0], *angles), keys, values)

    def run(
        self,
        x: Tensor,
        residual: Tensor,
        rotary: Rotary,
        attend: Attend,
        number: int = 0,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return two parts [..., H] of the residual stream after this layer, to be added.

        x         [..., input_width] input of queries, keys and values
        residual  [..., H] the stream to which the attention's result is added
        number    the layer's number for `attend`
        only      int64[R]: these of N rows [N, ...] are computed to the end; all N have keys and
                  values
        """
        mixed = attend(number, self.heads(x, rotary, only)).flatten(-2)
        residual, mixed = chosen(residual, only), self.self_attn.o_proj(mixed)
        after = self.post_attention_layernorm
        residual, normed = self.parts.add_norm(residual, mixed, after.weight, after.eps)
        return residual, self.feed(normed)

    def feed(self, normed: Tensor) -> Tensor:
        """Return the feed-forward [..., H] of normalised rows [..., H]."""
        mlp = self.mlp
        if self.stacked is None:
            opened, up = mlp.gate_proj(normed), mlp.up_proj(normed)
        else:
            opened, up = F.linear(normed, self.stacked[1]).chunk(2, -1)
        return cast(Tensor, mlp.down_proj(self.parts.gate(opened, up)))


def chosen(x: Tensor, only: Tensor | None) -> Tensor:
    """Return the rows `only` of x [N, ...]; None: all."""
    return x if only is None else x.index_select(0, only)
