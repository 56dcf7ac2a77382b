"""A block drafter in torch (DFlash): the one class that is trained and that serves.

c = hidden_norm(fc(features)) is made once for each of the target's positions, and every layer's
keys and values of that position are made of this same c. The block itself is an ordinary pre-norm
decoder over root and masks, whose keys and values stand behind the context's. How rows see each
other is the caller's affair: `attend` gets a layer's queries, keys and values of the block.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from forerun.executors.torch.eagle import Norm
from forerun.executors.torch.layers import rotate
from forerun.models.block_config import BlockHead

Rotary = tuple[Tensor, Tensor]
"""Cos and sin, each float32[..., E/2], by the rows' positions."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [..., A, E], keys [..., G, E], values [..., G, E]) -> context [..., A, E]."""


class _Attention(nn.Module):
    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        query, key = head.heads * head.head_size, head.kv_heads * head.head_size
        self.head_size = head.head_size
        self.q_proj = nn.Linear(head.hidden, query, bias=False)
        self.k_proj = nn.Linear(head.hidden, key, bias=False)
        self.v_proj = nn.Linear(head.hidden, key, bias=False)
        self.o_proj = nn.Linear(query, head.hidden, bias=False)
        self.q_norm = Norm(head.head_size, head.norm_eps) if head.qk_norm else nn.Identity()
        self.k_norm = Norm(head.head_size, head.norm_eps) if head.qk_norm else nn.Identity()

    def _heads(self, x: Tensor, matrix: nn.Linear) -> Tensor:
        """[..., heads, E]."""
        split: Tensor = matrix(x).unflatten(-1, (-1, self.head_size))
        return split

    def queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """[..., A, E], rotated."""
        return rotate(self.q_norm(self._heads(x, self.q_proj)), *rotary)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Each [..., G, E], keys rotated; of features or of the block's states, alike."""
        keys = rotate(self.k_norm(self._heads(x, self.k_proj)), *rotary)
        return keys, self._heads(x, self.v_proj)


class _Mlp(nn.Module):
    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(head.hidden, head.ffn, bias=False)
        self.up_proj = nn.Linear(head.hidden, head.ffn, bias=False)
        self.down_proj = nn.Linear(head.ffn, head.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class BlockLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        self.input_layernorm = Norm(head.hidden, head.norm_eps)
        self.self_attn = _Attention(head)
        self.post_attention_layernorm = Norm(head.hidden, head.norm_eps)
        self.mlp = _Mlp(head)


class BlockDrafter(nn.Module):
    """A block drafter. Parameter names are the canonical names of forerun.models.block_config.

    Embedding and output head are parameters only where the drafter has its own.
    """

    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        self.head = head
        self.fc = nn.Linear(len(head.features) * head.target_hidden, head.hidden, bias=False)
        self.hidden_norm = Norm(head.hidden, head.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(head) for _ in range(head.layers))
        self.norm = Norm(head.hidden, head.norm_eps)
        if head.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(head.hidden))
        if head.own_embedding:
            self.embed_tokens = nn.Embedding(head.target_vocab, head.hidden)
        if head.own_head:
            self.lm_head = nn.Linear(head.hidden, head.vocab, bias=False)

    def context(self, features: Tensor) -> Tensor:
        """What is read of features [..., F*H], side by side: c [..., H]."""
        made: Tensor = self.hidden_norm(self.fc(features))
        return made

    def keys_values(self, layer: int, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, each [..., G, E], of what `context` returned."""
        return cast(BlockLayer, self.layers[layer]).self_attn.keys_values(x, rotary)

    def with_masks(self, embedded: Tensor) -> Tensor:
        """[..., places, H] embeddings of blocks with the drafter's own mask, if it has one."""
        if not self.head.own_mask:
            return embedded
        masks = self.mask_embedding.expand_as(embedded[..., 1:, :])
        return torch.cat([embedded[..., :1, :], masks.to(embedded.dtype)], -2)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """What the output head reads, [..., H], from the block's embeddings [..., H]."""
        for number, layer in enumerate(self.layers):
            layer = cast(BlockLayer, layer)
            normed = layer.input_layernorm(x)
            queries = layer.self_attn.queries(normed, rotary)
            keys, values = layer.self_attn.keys_values(normed, rotary)
            mixed = attend(number, queries, keys, values)
            x = x + layer.self_attn.o_proj(mixed.to(x.dtype).flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        read: Tensor = self.norm(x)
        return read
