"""A block drafter in torch (DFlash): the one class that is trained and that serves.

c = hidden_norm(fc(features)) is made once for each of the target's positions, and every layer's
keys and values of that position are made of this same c. The block itself is an ordinary pre-norm
decoder over root and masks, whose keys and values stand behind the context's. How rows see each
other is the caller's affair (draft_layer.py).
"""

from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from forerun.executors.torch.draft_layer import (
    TRAINED,
    Attend,
    DraftLayer,
    LayerShape,
    Norm,
    TrainedHeads,
)
from forerun.executors.torch.layers import Elementwise, Heads, Rotary
from forerun.models.block_config import BlockHead


class BlockDrafter(nn.Module):
    """A block drafter. Parameter names are the canonical names of forerun.models.block_config.

    Embedding and output head are parameters only where the drafter has its own.
    """

    def __init__(self, head: BlockHead, parts: Elementwise = TRAINED) -> None:
        super().__init__()
        self.head, self.parts = head, parts
        self.fc = nn.Linear(len(head.features) * head.target_hidden, head.hidden, bias=False)
        self.hidden_norm = Norm(head.hidden, head.norm_eps)
        shape = LayerShape(
            *(head.hidden, head.heads, head.kv_heads, head.head_size, head.ffn, head.norm_eps),
            qk_norm=head.qk_norm,
        )
        self.layers = nn.ModuleList(DraftLayer(shape, parts) for _ in range(head.layers))
        self.norm = Norm(head.hidden, head.norm_eps)
        if head.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(head.hidden))
        if head.own_embedding:
            self.embed_tokens = nn.Embedding(head.target_vocab, head.hidden)
        if head.own_head:
            self.lm_head = nn.Linear(head.hidden, head.vocab, bias=False)

    def layer(self, number: int) -> DraftLayer:
        """One of its layers."""
        return cast(DraftLayer, self.layers[number])

    def read_features(self, features: Tensor) -> Tensor:
        """What keys and values are made of, c [..., H], of features [..., F*H], side by side."""
        norm = self.hidden_norm
        return self.parts.norm(self.fc(features), norm.weight, norm.eps)

    def context(self, features: Tensor, rotary: Rotary) -> list[Heads | TrainedHeads]:
        """Of every layer keys and values, and no queries, of features [..., F*H]."""
        made = self.read_features(features)
        layers = range(self.head.layers)
        return [self.layer(number).heads(made, rotary, context=True) for number in layers]

    def embedded(self, tokens: Tensor, embedding: Tensor) -> Tensor:
        """[..., places, H] of blocks int[..., places], by the drafter's own embedding and mask
        where it has them, else by `embedding` [V,H].
        """
        own = self.embed_tokens.weight if self.head.own_embedding else None
        rows = F.embedding(tokens, embedding if own is None else own)
        if not self.head.own_mask:
            return rows
        masks = self.mask_embedding.expand_as(rows[..., 1:, :])
        return torch.cat([rows[..., :1, :], masks.to(rows.dtype)], -2)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """What the output head reads, [..., H], from the block's embeddings [..., H]."""
        parts, eps, layers = self.parts, self.head.norm_eps, range(self.head.layers)
        entering = [self.layer(number).entry_norm() for number in layers]
        normed = parts.norm(x, entering[0], eps)
        for number, after in zip(layers, [*entering[1:], self.norm.weight], strict=True):
            residual, fed = self.layer(number).run(normed, x, rotary, attend, number)
            x, normed = parts.add_norm(residual, fed, after, eps)
        return normed
