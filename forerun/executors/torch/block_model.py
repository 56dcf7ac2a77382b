"""A block drafter in torch, beside its target: the class that was trained, over pages.

Position p of the cache holds every layer's keys and values of the target's features at p, rotated
by p; nothing of a block is ever kept. Root and masks stand behind what is cached, at the positions
that their tokens would have.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.torch.block import BlockDrafter, Rotary
from forerun.executors.torch.draft_cache import DraftCache, check_block, check_extension
from forerun.executors.torch.executor import check_fits
from forerun.executors.torch.features import on_device
from forerun.executors.torch.layers import rotation
from forerun.executors.torch.target import TorchTarget
from forerun.executors.torch.weights import some_rows
from forerun.interface.draft_model import (
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftLevel,
    DraftModelTraits,
    Extension,
    FeatureNeeds,
    no_candidates,
)
from forerun.interface.features import Features
from forerun.models.block_folder import BlockFile
from forerun.models.checkpoint import Checkpoint
from forerun.types import AnyArray


class TorchBlockModel:
    """DraftModel in torch, on the device and in the dtype of its target.

    Raises MemoryPlanError where it does not fit, EngineError where a block is larger than a step.
    """

    def __init__(self, executor: TorchTarget, checkpoint: Checkpoint, draft: BlockFile) -> None:
        head, limits = draft.head, executor.limits
        self.traits = DraftModelTraits(
            name=head.algorithm,
            cache=head.cache,
            target_ids=draft.target_ids,
            max_nodes=limits.max_nodes,
            features=FeatureNeeds("aux", head.features),
            block_size=head.depth,
        )
        if head.places > limits.max_nodes:
            raise EngineError(
                f"a block of {head.places} does not fit into a step of {limits.max_nodes} nodes; "
                "raise max-step-nodes"
            )
        self._executor, self._about, self._limits = executor, head, limits
        device, dtype = executor.device, executor.dtype
        self._bytes = {
            "draft_weight": head.parameters * dtype.itemsize,
            "draft_cache": DraftCache.bytes(head.cache, limits, dtype),
        }
        check_fits(self._bytes, device)
        self._drafter = _loaded(executor, draft)
        self._rows = _borrowed_rows(executor, checkpoint, draft)
        self._cache = DraftCache(head.cache, limits, device, dtype)
        frequencies = head.rope.frequencies(head.head_size)
        self._frequencies = torch.from_numpy(frequencies).to(device)
        executor.request_aux_hidden_states(head.features)

    @torch.inference_mode()
    def extend(self, extension: Extension, features: Features | None) -> Candidates:
        """Keep keys and values of the features of what became permanent."""
        if features is None:
            raise EngineError("a block drafter was extended without the target's features")
        check_extension(extension, self.traits, self._about.target_vocab, self._limits)
        streams = on_device(features, self._executor.device, self._executor.dtype)
        if len(streams) != len(extension.tokens):
            raise EngineError("an extension whose features are not one row per token")
        context, rotary = self._drafter.context(streams), self._rotary(extension.position)
        for layer in range(self._about.layers):
            self._cache.write(layer, *self._drafter.keys_values(layer, context, rotary))
        self._cache.commit(extension)
        return no_candidates(len(extension.scored))

    def expand(self, level: DraftLevel) -> Candidates:
        """A block drafter proposes at once. Raises EngineError."""
        raise EngineError("a block drafter proposes a block, not level by level")

    @torch.inference_mode()
    def block(self, block: DraftBlock) -> BlockCandidates:
        """Propose, as many rows in a pass as there are nodes in a step."""
        check_block(block, self.traits, self._about.target_vocab, self._limits)
        at_once = self._limits.max_nodes // self._about.places
        parts = [
            self._propose(block.part(begin, begin + at_once))
            for begin in range(0, len(block.roots), at_once)
        ]
        return BlockCandidates(
            np.concatenate([ids for ids, _ in parts]), np.concatenate([found for _, found in parts])
        )

    def _propose(self, block: DraftBlock) -> tuple[AnyArray, AnyArray]:
        """Draft ids and log-probabilities, each [R,depth,k]."""
        about, first = self._about, 0 if self._about.anchored else 1
        # Without a mask between places, fewer masks would be another distribution.
        places = first + block.depth if about.causal else about.places
        work = self._cache.block(replace(block, depth=places), max(about.mask, 0), about.causal)
        embedded = self._embed(self._index(work.tokens)).unflatten(0, (-1, places))
        x = self._drafter.with_masks(embedded).flatten(0, 1)
        read = self._drafter(x, self._rotary(work.position), work.attend)
        read = read.unflatten(0, (-1, places))[:, first : first + block.depth]
        logits = self._logits(read.flatten(0, 1)).float()
        best, ids = logits.topk(min(block.candidates, self.traits.vocab), -1)
        log_probs = best - logits.logsumexp(-1, keepdim=True)
        if not log_probs.isfinite().all():
            raise EngineError(
                "a block drafter's logits are not finite; float16 overflows where bfloat16 does not"
            )
        split = (-1, block.depth)
        return (
            ids.int().unflatten(0, split).cpu().numpy(),
            log_probs.unflatten(0, split).cpu().numpy(),
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._about.own_embedding:
            embedded: Tensor = self._drafter.embed_tokens(tokens)
            return embedded
        return self._executor.decoder.embed(tokens)

    def _logits(self, read: Tensor) -> Tensor:
        if self._about.own_head:
            logits: Tensor = self._drafter.lm_head(read)
            return logits
        if self._rows is not None:
            return F.linear(read, self._rows)
        return self._executor.decoder.read(read, len(read))

    def _rotary(self, position: AnyArray) -> Rotary:
        factor = self._about.rope.attention_factor
        return rotation(self._index(position), self._frequencies, factor)

    def _index(self, values: AnyArray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._executor.device)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": self._about.algorithm,
            "vocab": self.traits.vocab,
            "features": list(self._about.features),
            "block_size": self._about.places,
            "causal": self._about.causal,
            **{f"{part}_bytes": count for part, count in self._bytes.items()},
        }


def _loaded(executor: TorchTarget, draft: BlockFile) -> BlockDrafter:
    """The trained class with the file's weights."""
    with torch.device("meta"):
        drafter = BlockDrafter(draft.head)
    weights = {
        name: torch.from_numpy(np.array(draft.tensor(name))).to(executor.device, executor.dtype)
        for name, _ in drafter.named_parameters()
    }
    drafter.load_state_dict(weights, assign=True)
    return drafter.requires_grad_(False)


def _borrowed_rows(
    executor: TorchTarget, checkpoint: Checkpoint, draft: BlockFile
) -> Tensor | None:
    """[Vd,H] the target's output rows of a draft vocabulary; None where all or none are used."""
    if draft.head.own_head or draft.head.vocab == draft.head.target_vocab:
        return None
    tied = checkpoint.architecture.tied_head
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return some_rows(checkpoint, name, draft.target_ids, executor.device, executor.dtype)
