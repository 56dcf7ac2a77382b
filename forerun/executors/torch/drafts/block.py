"""A block drafter in torch (DFlash): the network for training and serving, and the draft model that
runs it next to its target.

c = hidden_norm(fc(features)) is computed once for each of the target's positions, and every layer's
keys and values of that position are computed from this same c. The block itself is an ordinary
pre-norm decoder over root and masks, whose keys and values follow the context's. Position p of the
cache has every layer's keys and values of the features at p, rotated by p; a block is never cached.
Root and masks have the positions of their tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.block_config import KERNEL_SIZE, BlockHead
from forerun.drafts.block_folder import BlockFile
from forerun.executors.draft_checks import check_extension, own_features
from forerun.executors.draft_model import BlockModelBase
from forerun.executors.torch.attention.kv import KvShape, indices
from forerun.executors.torch.decoder.elementwise import (
    Elementwise,
    Heads,
    Rotary,
    rotation,
    softcapped,
)
from forerun.executors.torch.drafts.draft_layer import (
    TRAINED,
    Attend,
    DraftLayer,
    LayerShape,
    Norm,
    TrainedHeads,
)
from forerun.executors.torch.drafts.level_model import likeliest, rotations
from forerun.executors.torch.drafts.loading import allocated, for_serving, head_rows, read_tensor
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.features import TorchFeatures
from forerun.executors.torch.triton.kernels import parts_of
from forerun.interface.draft_model import (
    Candidates,
    DraftBlock,
    DraftExtension,
    no_candidates,
)
from forerun.interface.features import Features
from forerun.networks.layer_spec import AttentionSpec
from forerun.types import AnyArray

_Work = Callable[[Tensor], Tensor]


class BlockConvolution(nn.Module):
    """A convolution around one sublayer of a block: out[t] = sum over o of (base[o] + dynamic[t,o])
    * x[t - o], with zeros before the block. One kernel applies to the sublayer's input, one to its
    output; the dynamic part of both is computed from the sublayer's input before the convolution,
    the same for `group` adjacent channels. Parameter names are the published ones.
    """

    def __init__(self, hidden: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, KERNEL_SIZE, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * KERNEL_SIZE * hidden // group, bias=False)
        self._group = group

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sublayer's input [R,P,H] for blocks x [R,P,H], and the kernel for `leave`."""
        dynamic = self.kernel_projection(x).unflatten(-1, (2, KERNEL_SIZE, -1))
        kernels = self.base_kernel + dynamic.repeat_interleave(self._group, -1)
        return convolved(x, kernels[..., 0, :, :]), kernels[..., 1, :, :]

    def leave(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return the term [R,P,H] that is added to the residual stream, for the sublayer's output x
        [R,P,H].
        """
        return convolved(x, kernel)


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """Return [R,P,H], the convolution of x [R,P,H] with kernels [R,P,KERNEL_SIZE,H]."""
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return kernel[..., 0, :] * x + kernel[..., 1, :] * before


class ConvolvedLayer(DraftLayer):
    """A DraftLayer with convolutions around its sublayers; group: as of BlockConvolution."""

    def __init__(self, shape: LayerShape, parts: Elementwise, group: int) -> None:
        super().__init__(shape, parts)
        self.attention_conv = BlockConvolution(shape.hidden, group)
        self.mlp_conv = BlockConvolution(shape.hidden, group)

    def run_block(
        self, x: Tensor, rotary: Rotary, attend: Attend, number: int, places: int
    ) -> Tensor:
        """Return the residual stream [R*places,H] after this layer, from the stream before it."""
        entry, after = self.entry_norm(), self.post_attention_layernorm

        def around(
            convolution: BlockConvolution, normed: Tensor, work: Callable[[Tensor], Tensor]
        ) -> Tensor:
            entered, kernel = convolution.enter(normed.unflatten(0, (-1, places)))
            left = work(entered.flatten(0, 1)).unflatten(0, (-1, places))
            return convolution.leave(left, kernel).flatten(0, 1)

        def mixed(entered: Tensor) -> Tensor:
            found: Tensor = attend(number, self.heads(entered, rotary)).flatten(-2)
            return cast(Tensor, self.self_attn.o_proj(found))

        x = x + around(self.attention_conv, self.parts.norm(x, entry, after.eps), mixed)
        normed = self.parts.norm(x, after.weight, after.eps)
        return x + around(self.mlp_conv, normed, self.feed)


class BlockDrafter(nn.Module):
    """A block drafter. Parameter names are the canonical names of forerun.drafts.block_config.
    Embedding and output head are parameters only if the drafter has its own.
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
        self.layers = nn.ModuleList(
            ConvolvedLayer(shape, parts, head.convolved)
            if head.convolved
            else DraftLayer(shape, parts)
            for _ in range(head.layers)
        )
        self.norm = Norm(head.hidden, head.norm_eps)
        if head.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(head.hidden))
        if head.own_embedding:
            self.embed_tokens = nn.Embedding(head.target_vocab, head.hidden)
        if head.own_head:
            self.lm_head = nn.Linear(head.hidden, head.vocab, bias=False)

    def layer(self, number: int) -> DraftLayer:
        """Return the decoder layer of that number, from 0."""
        return cast(DraftLayer, self.layers[number])

    def read_features(self, features: Tensor) -> Tensor:
        """Return c [..., H], the input of keys and values, from concatenated features [...,
        F*H].
        """
        norm = self.hidden_norm
        return self.parts.norm(self.fc(features), norm.weight, norm.eps)

    def context(self, features: Tensor, rotary: Rotary) -> list[Heads | TrainedHeads]:
        """Return every layer's keys and values, without queries, for features [..., F*H]."""
        made = self.read_features(features)
        layers = range(self.head.layers)
        return [self.layer(number).heads(made, rotary, context=True) for number in layers]

    def embedded(self, tokens: Tensor, embedding: Tensor) -> Tensor:
        """Return [..., places, H] for blocks int[..., places], by the drafter's own embedding and
        mask if it has them, else by `embedding` [V,H].
        """
        own = self.embed_tokens.weight if self.head.own_embedding else None
        rows = F.embedding(tokens, embedding if own is None else own)
        if self.head.embedding_scale is not None:
            rows = rows * self.head.embedding_scale
        if not self.head.own_mask:
            return rows
        masks = self.mask_embedding.expand_as(rows[..., 1:, :])
        return torch.cat([rows[..., :1, :], masks.to(rows.dtype)], -2)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend, places: int = 0) -> Tensor:
        """Return the output head's input, [..., H], for the block's embeddings [..., H].

        places  of a block, with x [R*places, H]; needed for convolutions only
        """
        parts, eps, layers = self.parts, self.head.norm_eps, range(self.head.layers)
        if self.head.convolved:
            for number in layers:
                convolved = cast(ConvolvedLayer, self.layers[number])
                x = convolved.run_block(x, rotary, attend, number, places)
            return parts.norm(x, self.norm.weight, eps)
        entering = [self.layer(number).entry_norm() for number in layers]
        normed = parts.norm(x, entering[0], eps)
        for number, after in zip(layers, [*entering[1:], self.norm.weight], strict=True):
            residual, fed = self.layer(number).run(normed, x, rotary, attend, number)
            x, normed = parts.add_norm(residual, fed, after, eps)
        return normed


class TorchBlockModel(BlockModelBase):
    """DraftModel in torch, on the device and in the dtype of its target. Its passes (`context`,
    `forward`, `logits`) do not synchronise with the device; captured rounds run the same ones
    (captured/block_drafting.py).

    cache, ids, ropes, gqa_group  as of LevelModel
    dtype  of its weights

    Raises MemoryPlanError if it does not fit, ModelError if a block is larger than a step.
    """

    def __init__(self, executor: TorchTarget, checkpoint: Checkpoint, draft: BlockFile) -> None:
        head = draft.head
        super().__init__(draft, executor.limits)
        self._executor = executor
        device, dtype = executor.device, executor.dtype
        self.dtype = dtype
        scale, shape = head.head_size**-0.5, KvShape(head.cache)
        windows = tuple(AttentionSpec(scale, window) for window in head.windows)
        self.cache, taken = allocated(executor, head.parameters, shape, attention=windows)
        self.facts |= taken
        parts = parts_of(executor.kernels)
        weights = partial(read_tensor, executor, draft)
        self._module = for_serving(lambda: BlockDrafter(head, parts), weights)
        self._rows: Tensor | None = None
        if not head.own_head and head.vocab != head.target_vocab:  # Some rows of the target's.
            self._rows = head_rows(executor, checkpoint, draft.target_ids)
        self.ids = torch.from_numpy(draft.target_ids.astype(np.int32)).to(device)
        self.ropes = rotations([(head.rope, head.head_size)], device)
        self.gqa_group = head.heads // head.kv_heads
        executor.request_aux_hidden_states(head.features)

    # --- asynchronous -----------------------------------------------------------------------

    def context(self, features: Tensor, rotary: Rotary) -> list[Heads]:
        """Return every layer's keys and values, without queries, for features [n,F*H]."""
        return cast(list[Heads], self._module.context(features, rotary))

    def forward(self, tokens: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Return the input of `logits` [R*P,H] for blocks of root and masks int[R,P]."""
        embedded = self._module.embedded(tokens, self._executor.decoder.embedding)
        return self._module.forward(embedded.flatten(0, 1), rotary, attend, tokens.shape[1])

    def logits(self, read: Tensor) -> Tensor:
        """Return draft logits [n,Vd], of any dtype, for rows [n,H] of the result of `forward`."""
        if self.about.own_head:
            logits = F.linear(read, self._module.lm_head.weight)
        elif self._rows is not None:
            logits = F.linear(read, self._rows)
        else:
            logits = self._executor.decoder.head(read)
        scale, cap = self.about.logit_scale, self.about.logit_cap
        if scale != 1.0:
            logits = logits.float() * scale
        return softcapped(logits.float(), cap) if cap else logits

    def read_at(self, read: Tensor, depth: int) -> Tensor:
        """Return [R,depth,H], the rows of `forward`'s result [R*places,H] that predict draft
        tokens.
        """
        first = self.about.first
        blocks: Tensor = read.unflatten(0, (-1, self.about.run(depth)))
        return blocks[:, first : first + depth]

    # --- the contract, pass by pass ----------------------------------------------------------

    @torch.inference_mode()
    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Write the keys and values of the features of tokens that became permanent."""
        check_extension(extension, self._limits)
        about = len(extension.tokens), self.traits.name, TorchFeatures
        streams = own_features(features, *about).tensor()
        for layer, heads in enumerate(self.context(streams, self._rotary(extension.position))):
            self.cache.write(layer, heads)
        self.cache.commit(extension)
        return no_candidates(len(extension.scored))

    @torch.inference_mode()
    def propose(self, block: DraftBlock) -> Sequence[AnyArray]:
        """Implement BlockModelBase.propose."""
        about, places = self.about, self.about.run(block.depth)
        work = self.cache.block(replace(block, depth=places), max(about.mask, 0), about.causal)
        device = self._executor.device
        tokens, rotary = indices(work.tokens, device), self._rotary(work.position)
        read = self.forward(tokens.view(-1, places), rotary, work.attend)
        read = self.read_at(read, block.depth)
        ids, log_probs = likeliest(self.logits(read.flatten(0, 1)), block.candidates)
        split = (-1, block.depth)
        return (
            ids.int().unflatten(0, split).cpu().numpy(),
            log_probs.unflatten(0, split).cpu().numpy(),
            read[..., : 0 if self.pairs is None else None].float().cpu().numpy(),
        )

    def _rotary(self, position: AnyArray) -> Rotary:
        return rotation(indices(position, self._executor.device), *self.ropes[0])
