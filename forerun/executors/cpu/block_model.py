"""A block drafter on the compiled core, beside its target. executors/torch/drafts/block.py says
what it computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.block_config import BlockHead, expected_block_tensors
from forerun.drafts.block_folder import BlockFile
from forerun.errors import EngineError, ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.draft_pass import CpuDraftPass, run
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.hidden_state_model import CpuHiddenStateModel
from forerun.executors.cpu.places import Place, RopeTable
from forerun.executors.cpu.weights import (
    BYTES,
    WIDE,
    Stored,
    cache_bytes_per_token,
    set_layer,
    set_matrix,
    set_vector,
)
from forerun.executors.draft_checks import check_block
from forerun.executors.pair_scores import pair_scores
from forerun.interface.draft_model import (
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftExtension,
    DraftLevel,
    DraftModelTraits,
    FeatureNeeds,
    no_candidates,
)
from forerun.interface.features import Features
from forerun.types import Floats, Ints

_MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_VECTORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)
_CONVOLUTIONS = {"attention_conv": 20, "mlp_conv": 21}
_OWN_MATRICES = {"embed_tokens": 0, "lm_head": 1, "fc": 2}
_OWN_VECTORS = {"norm.weight": 0, "hidden_norm.weight": 1, "mask_embedding": 2}
"""Numbers of csrc/draft.h, BlockHead."""


def _matrices(head: BlockHead) -> Iterator[Place]:
    """Yield the places of the matrices in its file, names without `.weight`."""
    for layer in range(head.layers):
        for which, name in enumerate(_MATRICES):
            yield Place(f"layers.{layer}.{name}", layer, which)
        for part, which in _CONVOLUTIONS.items() if head.convolved else ():
            yield Place(f"layers.{layer}.{part}.kernel_projection", layer, which)
    expected = expected_block_tensors(head)
    for name, which in _OWN_MATRICES.items():
        if f"{name}.weight" in expected:
            yield Place(name, -1, which)


def _vectors(head: BlockHead) -> Iterator[Place]:
    expected = expected_block_tensors(head)
    named = dict(zip(_VECTORS, range(len(_VECTORS)), strict=True))
    named |= {f"{part}.base_kernel": which for part, which in _CONVOLUTIONS.items()}
    layers = [
        Place(f"layers.{layer}.{name}", layer, which)
        for layer in range(head.layers)
        for name, which in named.items()
    ]
    own = [Place(name, -1, which) for name, which in _OWN_VECTORS.items()]
    yield from (place for place in layers + own if place.name in expected)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """How the drafter's numbers are stored: matrices in 8 bits in groups of 32 and a cache of
    halves, or all in float32.
    """

    format: int
    cache_item: int


_NUMBERS = {"q8_0": _Numbers(BYTES, 2), "float32": _Numbers(WIDE, 4)}


class CpuBlockModel(CpuHiddenStateModel):
    """DraftModel on the compiled core. Position p of its cache holds every layer's keys and values
    of the target's features at p; blocks are never cached.

    dtype  "q8_0": 8 bits in groups of 32; "float32", for measuring what the 8 bits cost

    Raises ModelError for sizes that the core cannot run, MemoryPlanError if it does not fit,
    EngineError if a block is larger than a step.
    """

    def __init__(
        self,
        executor: CpuExecutor,
        checkpoint: Checkpoint,
        draft: BlockFile,
        dtype: str = "q8_0",
    ) -> None:
        head, limits = draft.head, executor.limits
        if head.head_size % 8 or head.heads % head.kv_heads:
            raise ModelError(
                f"{draft.path}: the CPU executor runs heads of a multiple of 8 numbers that share "
                f"key heads evenly, not {head.heads} of {head.head_size} on {head.kv_heads}; use "
                "the torch executor"
            )
        if head.places > limits.max_nodes:
            raise EngineError(
                f"a block of {head.places} does not fit into a step of {limits.max_nodes} nodes; "
                "raise chunked-prefill-size"
            )
        self.traits = DraftModelTraits(
            name=head.algorithm,
            cache=head.cache,
            target_ids=draft.target_ids,
            max_nodes=limits.max_nodes,
            features=FeatureNeeds("aux", head.features),
            block_size=head.depth,
            confident=head.confidence > 0,
        )
        super().__init__(executor)
        self._head, self._numbers, self._pairs = head, _NUMBERS[dtype], pair_scores(draft)
        self._weight_bytes = self._planned_bytes()
        self._model = self._open()
        self._load(checkpoint, draft)

    @property
    def _borrows(self) -> bool:
        """Whether the target's whole output head is the drafter's."""
        return not self._head.own_head and self._head.vocab == self._head.target_vocab

    def _planned_bytes(self) -> int:
        head, expected = self._head, expected_block_tensors(self._head)
        shapes = [expected[f"{place.name}.weight"] for place in _matrices(head)]
        if not (head.own_head or self._borrows):
            shapes.append((head.vocab, head.hidden))
        packed = (
            int(self._library.forerun_packed_bytes(self._numbers.format, *shape)) + 256
            for shape in shapes
        )
        vectors = (4 * prod(expected[place.name]) + 64 for place in _vectors(head))
        return sum(packed) + sum(vectors)

    def _open(self) -> int:
        head, limits = self._head, self._executor.limits
        sizes = native.Sizes(
            layers=head.layers,
            hidden=head.hidden,
            heads=head.heads,
            kv_heads=head.kv_heads,
            head_size=head.head_size,
            ffn=head.ffn,
            vocab=head.vocab,
            page_size=limits.page_size,
            pages=limits.pages,
            max_nodes=limits.max_nodes,
            context=limits.context,
            threads=1,  # It uses the target's.
            cache_item=self._numbers.cache_item,
            cache_bytes=cache_bytes_per_token(head.cache, self._numbers.cache_item),
            norm_eps=head.norm_eps,
        )
        kind = native.BlockKind(
            features=len(head.features),
            width=head.target_hidden,
            slots=limits.slots,
            causal=head.causal,
            own_embedding=head.own_embedding,
            group=head.convolved,
        )
        return self.open_native(
            sizes, kind, head.features, RopeTable(((head.rope, head.head_size),))
        )

    def _layer_kind(self, window: int | None) -> native.LayerKind:
        head = self._head
        return native.LayerKind(
            ffn=head.ffn,
            window=window or 0,
            kv_heads=head.kv_heads,
            head_size=head.head_size,
            score_scale=head.head_size**-0.5,
            residual=1.0,
        )

    def _load(self, checkpoint: Checkpoint, draft: BlockFile) -> None:
        library, model, becomes = self._library, self._model, self._numbers.format
        for layer, window in enumerate(self._head.windows):
            set_layer(library, model, layer, self._layer_kind(window))
        for place in _matrices(self._head):
            stored = Stored("F32", draft.tensor(f"{place.name}.weight"), becomes=becomes)
            set_matrix(library, model, (place.name, place.layer, place.which), stored)
        for place in _vectors(self._head):
            values = draft.tensor(place.name)
            values = np.ascontiguousarray(values).ravel()
            set_vector(library, model, (place.name, place.layer, place.which), values)
        head, arch = self._head, checkpoint.architecture
        scale = 1.0 if head.embedding_scale is None else head.embedding_scale
        library.forerun_set_scales(model, scale, head.logit_scale, head.logit_cap)
        if self._borrows:
            library.forerun_share_head(model, self._executor.native_model())
        elif not self._head.own_head:
            name = "model.embed_tokens" if arch.tied_head else "lm_head"
            rows = np.ascontiguousarray(checkpoint.tensor(f"{name}.weight")[draft.target_ids])
            where = (name, -1, _OWN_MATRICES["lm_head"])
            set_matrix(library, model, where, Stored("F32", rows, becomes=becomes))

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Write keys and values of the features of what became permanent to its pages.

        features  one row per token, of this executor's last step or from a host ring

        Returns no candidates. Raises EngineError, and changes nothing, for bad input.
        """
        no_candidates(len(extension.scored))
        super().extend(extension, features)
        return no_candidates(0)

    def expand(self, level: DraftLevel) -> Candidates:
        """Raise EngineError: a block drafter proposes a whole block at once."""
        raise EngineError("a block drafter proposes a block, not level by level")

    def block(self, block: DraftBlock) -> BlockCandidates:
        """Propose, as many rows in a pass as there are nodes in a step. Raises EngineError if
        `block` is not sound or a log-probability is not finite.
        """
        check_block(block, self._head.depth, self._executor.limits)
        at_once = self._executor.limits.max_nodes // self._head.places
        if self._pairs is not None:
            block = replace(block, candidates=self._pairs.count(block))
        parts = [
            self._propose(block.part(begin, begin + at_once))
            for begin in range(0, len(block.roots), at_once)
        ]
        ids, log_probs, hidden = (
            np.concatenate(each).reshape(len(block.roots), block.depth, each[0].shape[-1])
            for each in zip(*parts, strict=True)
        )
        if not np.isfinite(log_probs).all():
            raise EngineError("a block drafter's logits are not finite")
        pairs = None
        if self._pairs is not None:
            pairs = self._pairs.of(block.roots, ids, log_probs, hidden)
        return BlockCandidates(ids, log_probs, pairs)

    def _propose(self, block: DraftBlock) -> tuple[Ints, Floats, Floats]:
        """Return candidates of the draft tokens of all rows, row after row: ids, log-probabilities,
        and the output head's input float32[.,H], if pairs read it.
        """
        head, count = self._head, len(block.roots)
        places = head.run(block.depth)
        tokens: Ints = np.full((count, places), max(head.mask, 0), np.int32)
        tokens[:, 0] = block.roots
        nodes = np.arange(count * places, dtype=np.int32).reshape(count, places)
        scored = nodes[:, head.first : head.first + block.depth].ravel()
        hidden = np.empty((len(scored), head.hidden if self._pairs else 0), np.float32)
        work = CpuDraftPass(
            tokens=tokens.ravel(),
            sources=np.zeros(nodes.size, np.int32),
            parents=np.full(nodes.size, -1, np.int32),
            start=np.arange(count + 1, dtype=np.int32) * np.int32(places),
            kv_len=block.kv_len,
            slots=block.slots,
            pages=block.pages,
            first=0,
            scored=scored,
            extend=False,
            outputs=hidden if self._pairs else None,
        )
        logits = self._logits_buffer(len(scored))
        found = run(self._library, self._model, work, logits, block.candidates)
        return found.ids, found.log_probs, hidden

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: algorithm, vocab, features, block_size, causal,
        weight_bytes.
        """
        return {
            "algorithm": self._head.algorithm,
            "vocab": self.traits.vocab,
            "features": list(self._head.features),
            "block_size": self._head.places,
            "causal": self._head.causal,
            "weight_bytes": self._weight_bytes,
        }
