"""An EAGLE draft head in torch: the one class that is trained and that serves.

EAGLE-3 (arXiv 2503.01840, section 3): features from inside the target are fused to one hidden
state; one decoder layer reads it beside the embedding of the next token; its output is fed back
as the next hidden state. EAGLE-1/2 heads (arXiv 2401.15077) fuse embedding and hidden state
first. How rows see each other is the caller's affair: `attend` gets queries, keys and values
and returns the context, so unrolled training and step-by-step serving run the same lines.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from forerun.executors.torch.layers import rotate
from forerun.models.draft_config import DraftHead

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries [..., A, E], keys [..., G, E], values [..., G, E]) -> context [..., A, E]."""


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) over the last axis, in float32 or better."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def _chosen(x: Tensor, only: Tensor | None) -> Tensor:
    return x if only is None else x.index_select(0, only)


class _Attention(nn.Module):
    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        query, key = head.heads * head.head_size, head.kv_heads * head.head_size
        self.head_size = head.head_size
        self.q_proj = nn.Linear(head.input_width, query, bias=False)
        self.k_proj = nn.Linear(head.input_width, key, bias=False)
        self.v_proj = nn.Linear(head.input_width, key, bias=False)
        self.o_proj = nn.Linear(query, head.hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, only: Tensor | None
    ) -> Tensor:
        split = (*x.shape[:-1], -1, self.head_size)
        keys = rotate(self.k_proj(x).view(split), cos, sin)
        values = self.v_proj(x).view(split)
        asking, *rotary = (_chosen(rows, only) for rows in (x, cos, sin))
        queries = rotate(self.q_proj(asking).unflatten(-1, split[-2:]), *rotary)
        mixed: Tensor = self.o_proj(attend(queries, keys, values).flatten(-2))
        return mixed


class _Mlp(nn.Module):
    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(head.hidden, head.ffn, bias=False)
        self.up_proj = nn.Linear(head.hidden, head.ffn, bias=False)
        self.down_proj = nn.Linear(head.ffn, head.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One decoder layer. Norms that EAGLE-1 does not have are absent."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        if head.algorithm == "eagle3":
            self.input_layernorm = Norm(head.hidden, head.norm_eps)
            self.hidden_norm = Norm(head.hidden, head.norm_eps)
        self.self_attn = _Attention(head)
        self.post_attention_layernorm = Norm(head.hidden, head.norm_eps)
        self.mlp = _Mlp(head)


class EagleHead(nn.Module):
    """A draft head. Parameter names are the canonical tensor names of forerun.models.draft_config.

    `lm_head` is a parameter also where it was copied from the target; the trainer freezes it.
    """

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.head = head
        parts = 2 * head.hidden
        if head.algorithm == "eagle3":
            parts = head.target_hidden * len(head.features)
            self.norm = Norm(head.hidden, head.norm_eps)
        self.fc = nn.Linear(parts, head.hidden, bias=head.fc_bias)
        if head.feature_norm == "joint":
            self.input_norm = Norm(parts, head.norm_eps)
        if head.feature_norm == "each":
            self.fc_norm = nn.ModuleList(
                Norm(head.target_hidden, head.norm_eps) for _ in head.features
            )
        self.layers = nn.ModuleList([DraftLayer(head)])
        self.lm_head = nn.Linear(head.hidden, head.vocab, bias=False)

    @property
    def layer(self) -> DraftLayer:
        """The one decoder layer."""
        (layer,) = self.layers
        assert isinstance(layer, DraftLayer)
        return layer

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden state [..., H] from the target's features [..., F*H], F features side by side.

        EAGLE-1's single feature is the hidden state already.
        """
        if self.head.algorithm == "eagle1":
            return features
        if self.head.feature_norm == "joint":
            features = self.input_norm(features)
        if self.head.feature_norm == "each":
            chunks = features.split(self.head.target_hidden, -1)
            features = torch.cat([n(c) for n, c in zip(self.fc_norm, chunks, strict=True)], -1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One draft step: embedded [..., H] of the next token beside hidden [..., H].

        cos, sin [..., E/2] rotary by the row's position. Returns what the head reads and what the
        next step receives, both [..., H]; they differ unless `normed_feedback`.

        only int64[R]: of N rows [N,H] these run; all N give keys and values. Then queries and
        results are [R, ...].
        """
        layer = self.layer
        if self.head.algorithm == "eagle1":
            residual = x = self.fc(torch.cat([embedded, hidden], -1))
        else:
            normed = layer.hidden_norm(hidden)
            x = torch.cat([layer.input_layernorm(embedded), normed], -1)
            residual = normed if self.head.normed_residual else hidden
        mixed = layer.self_attn(x, cos, sin, attend, only)
        residual = _chosen(residual, only) + mixed
        output = residual + layer.mlp(layer.post_attention_layernorm(residual))
        if self.head.algorithm == "eagle1":
            return output, output
        read = self.norm(output)
        return read, read if self.head.normed_feedback else output

    def logits(self, read: Tensor) -> Tensor:
        """Draft logits [..., Vd] from what `forward` says the head reads."""
        logits: Tensor = self.lm_head(read)
        return logits
