"""A block drafter in torch, beside its target: the class that was trained, over pages.

Position p of the cache holds every layer's keys and values of the target's features at p, rotated
by p; nothing of a block is ever kept. Root and masks stand behind what is cached, at the positions
that their tokens would have.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.torch.block import BlockDrafter, BlockLayer
from forerun.executors.torch.decoder import Attend, apart
from forerun.executors.torch.draft_cache import DraftCache, check_block, check_extension
from forerun.executors.torch.features import on_device
from forerun.executors.torch.layers import PLAIN, Heads, Rotary, plain, rotation
from forerun.executors.torch.memory import check_fits
from forerun.executors.torch.target import TorchTarget
from forerun.executors.torch.weights import some_rows, stacked
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
from forerun.models.block_config import BlockHead
from forerun.models.block_folder import BlockFile
from forerun.models.checkpoint import Checkpoint
from forerun.types import AnyArray


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a layer multiplies by; products of several matrices have them one above the other."""

    before: Tensor
    after: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor

    @staticmethod
    def of(layer: BlockLayer, head: BlockHead) -> "_Layer":
        """A layer's weights, which become views of these."""
        attention, mlp = layer.self_attn, layer.mlp
        norms = (attention.q_norm, attention.k_norm) if head.qk_norm else ()
        q_norm, k_norm = [norm.get_parameter("weight") for norm in norms] or (None, None)
        return _Layer(
            before=layer.input_layernorm.weight,
            after=layer.post_attention_layernorm.weight,
            q_norm=q_norm,
            k_norm=k_norm,
            qkv=stacked(attention.q_proj, attention.k_proj, attention.v_proj),
            out=attention.o_proj.weight,
            gate_up=stacked(mlp.gate_proj, mlp.up_proj),
            down=mlp.down_proj.weight,
        )


class TorchBlockModel:
    """DraftModel in torch, on the device and in the dtype of its target. Its passes only launch
    (`context`, `forward`, `logits`); captured rounds run the same ones
    (captured/block_drafting.py). `BlockDrafter` is their slow twin.

    cache, ids, ropes, gqa_group  as of LevelModel

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
                "raise chunked-prefill-size"
            )
        self._executor, self.about, self._limits = executor, head, limits
        device, dtype = executor.device, executor.dtype
        self._bytes = {
            "draft_weight": head.parameters * dtype.itemsize,
            "draft_cache": DraftCache.bytes(head.cache, limits, dtype),
        }
        check_fits(self._bytes, device)
        self._parts = PLAIN if executor.kernels is None else executor.kernels.parts
        module = self._module = _loaded(executor, draft)
        self._layers = [_Layer.of(cast(BlockLayer, layer), head) for layer in module.layers]
        self._rows = _borrowed_rows(executor, checkpoint, draft)
        self.cache = DraftCache(head.cache, limits, device, dtype)
        self.ids = torch.from_numpy(draft.target_ids.astype(np.int32)).to(device)
        frequencies = torch.from_numpy(head.rope.frequencies(head.head_size)).to(device)
        self.ropes = [(frequencies, head.rope.attention_factor)]
        self.gqa_group = head.heads // head.kv_heads
        self._queries = head.heads * head.head_size
        executor.request_aux_hidden_states(head.features)

    # --- launches only -----------------------------------------------------------------------

    def context(self, features: Tensor, rotary: Rotary) -> list[Heads]:
        """Of every layer keys and values, and no queries, of features [n,F*H]."""
        fused = F.linear(features, self._module.fc.weight)
        normed = self._parts.norm(fused, self._module.hidden_norm.weight, self.about.norm_eps)
        return [
            self._heads(F.linear(normed, layer.qkv[self._queries :]), layer, rotary)
            for layer in self._layers
        ]

    def forward(self, tokens: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """What `logits` reads [R*P,H], of blocks: roots and masks int[R,P]."""
        parts, eps, module = self._parts, self.about.norm_eps, self._module
        x = self._embedded(tokens).flatten(0, 1)
        normed = parts.norm(x, self._layers[0].before, eps)
        for number, layer in enumerate(self._layers):
            heads = self._heads(F.linear(normed, layer.qkv), layer, rotary)
            mixed = F.linear(plain(attend(number, heads)).flatten(1), layer.out)
            x, normed = parts.add_norm(x, mixed, layer.after, eps)
            opened, up = F.linear(normed, layer.gate_up).chunk(2, -1)
            fed = F.linear(parts.gate(opened, up), layer.down)
            more = self._layers[number + 1 :]
            x, normed = parts.add_norm(x, fed, more[0].before if more else module.norm.weight, eps)
        return normed

    def _heads(self, product: Tensor, layer: "_Layer", rotary: Rotary) -> Heads:
        about, heads = self.about, product.view(len(product), -1, self.about.head_size)
        norms = layer.q_norm, layer.k_norm
        return Heads(heads, about.kv_heads, *norms, about.norm_eps, rotary, self._parts)

    def logits(self, read: Tensor) -> Tensor:
        """[n,Vd] of any dtype."""
        if self.about.own_head:
            return F.linear(read, self._module.lm_head.weight)
        if self._rows is not None:
            return F.linear(read, self._rows)
        return self._executor.decoder.narrow(read)

    def places(self, depth: int) -> int:
        """Nodes of a block whose first `depth` draft tokens are wanted. Where places see each other
        both ways, fewer masks would be another distribution.
        """
        about = self.about
        return int(not about.anchored) + depth if about.causal else about.places

    def read_at(self, read: Tensor, depth: int) -> Tensor:
        """[R,depth,H] what draft tokens are read from, of `forward`'s [R*places,H]."""
        first = int(not self.about.anchored)
        blocks: Tensor = read.unflatten(0, (-1, self.places(depth)))
        return blocks[:, first : first + depth]

    # --- the contract, pass by pass ----------------------------------------------------------

    @torch.inference_mode()
    def extend(self, extension: Extension, features: Features | None) -> Candidates:
        """Keep keys and values of the features of what became permanent."""
        if features is None:
            raise EngineError("a block drafter was extended without the target's features")
        check_extension(extension, self.traits, self.about.target_vocab, self._limits)
        streams = on_device(features, self._executor.device, self._executor.dtype)
        if len(streams) != len(extension.tokens):
            raise EngineError("an extension whose features are not one row per token")
        for layer, heads in enumerate(self.context(streams, self._rotary(extension.position))):
            _, keys, values = heads.turned()
            self.cache.write(layer, keys, values)
        self.cache.commit(extension)
        return no_candidates(len(extension.scored))

    def expand(self, level: DraftLevel) -> Candidates:
        """A block drafter proposes at once. Raises EngineError."""
        raise EngineError("a block drafter proposes a block, not level by level")

    @torch.inference_mode()
    def block(self, block: DraftBlock) -> BlockCandidates:
        """Propose, as many rows in a pass as there are nodes in a step."""
        check_block(block, self.traits, self.about.target_vocab, self._limits)
        at_once = self._limits.max_nodes // self.about.places
        parts = [
            self._propose(block.part(begin, begin + at_once))
            for begin in range(0, len(block.roots), at_once)
        ]
        return BlockCandidates(
            np.concatenate([ids for ids, _ in parts]), np.concatenate([found for _, found in parts])
        )

    def _propose(self, block: DraftBlock) -> tuple[AnyArray, AnyArray]:
        """Draft ids and log-probabilities, each [R,depth,k]."""
        about, places = self.about, self.places(block.depth)
        work = self.cache.block(replace(block, depth=places), max(about.mask, 0), about.causal)
        tokens, rotary = self._index(work.tokens), self._rotary(work.position)
        read = self.forward(tokens.view(-1, places), rotary, apart(work.attend))
        logits = self.logits(self.read_at(read, block.depth).flatten(0, 1)).float()
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

    def _embedded(self, tokens: Tensor) -> Tensor:
        """[R,P,H]; a mask of the drafter's own stands for no token."""
        module = self._module
        own = module.embed_tokens.weight if self.about.own_embedding else None
        embedding = self._executor.decoder.embedding if own is None else own
        x: Tensor = module.with_masks(F.embedding(tokens, embedding))
        return x

    def _rotary(self, position: AnyArray) -> Rotary:
        return rotation(self._index(position), *self.ropes[0])

    def _index(self, values: AnyArray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._executor.device)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": self.about.algorithm,
            "vocab": self.traits.vocab,
            "features": list(self.about.features),
            "block_size": self.about.places,
            "causal": self.about.causal,
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
