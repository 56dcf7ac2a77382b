"""A block drafter on the compiled core. executors/torch/drafts/block.py describes the network."""

from collections.abc import Iterator, Sequence

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.block_config import BlockHead, expected_block_tensors
from forerun.drafts.block_folder import BlockFile
from forerun.errors import ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.draft_model import CpuDraftModel, CpuDraftPass
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.places import LAYER_MATRICES, Place, RopeTable, sizes_for
from forerun.executors.cpu.weights import (
    BYTES,
    WIDE,
    DraftTensors,
    cache_bytes_per_token,
    set_layer,
)
from forerun.executors.draft_model import BlockModelBase
from forerun.interface.draft_model import Candidates, DraftBlock, DraftExtension, no_candidates
from forerun.interface.features import Features
from forerun.types import AnyArray, Ints

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
    """Yield the places of the matrices in its file; names without `.weight`."""
    for layer in range(head.layers):
        for which, name in enumerate(LAYER_MATRICES):
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


_NUMBERS = {"q8_0": (BYTES, 2), "float32": (WIDE, 4)}
"""A `Format` of csrc/quant.h for matrices, and the bytes of a number of the cache."""


class CpuBlockModel(BlockModelBase, CpuDraftModel):
    """DraftModel on the compiled core. Position p of its cache holds every layer's keys and values
    of the target's features at p; blocks are never cached.

    dtype  "q8_0": 8 bits in groups of 32; "float32", to measure the effect of the 8 bits

    Raises ModelError for sizes that the core cannot run or a block larger than a step,
    MemoryPlanError if it does not fit.
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
        super().__init__(draft, limits)
        CpuDraftModel.__init__(self, executor, (self.traits, self.facts))
        form, item = _NUMBERS[dtype]
        borrows = not head.own_head and head.vocab == head.target_vocab
        rows = None if head.own_head or borrows else draft.target_ids
        shapes = expected_block_tensors(head)
        places = list(_matrices(head)), list(_vectors(head))
        tensors = DraftTensors(draft, shapes, *places, rows, form)
        sizes = sizes_for(
            head,
            limits,
            layers=head.layers,
            cache_item=item,
            cache_bytes=cache_bytes_per_token(head.cache, item),
        )
        kind = native.BlockKind(
            features=len(head.features),
            width=head.target_hidden,
            slots=limits.slots,
            causal=head.causal,
            own_embedding=head.own_embedding,
            group=head.convolved,
        )
        ropes = RopeTable(((head.rope, head.head_size),))
        model = self.opened_head(sizes, kind, head.features, ropes, tensors.planned_bytes())
        self._model = model
        for layer, window in enumerate(head.windows):
            set_layer(model, layer, _layer_kind(head, window))
        tensors.load(model, checkpoint)
        scale = 1.0 if head.embedding_scale is None else head.embedding_scale
        self._library.forerun_set_scales(model, scale, head.logit_scale, head.logit_cap)
        if borrows:
            self._library.forerun_share_head(model, executor.native_model())

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Write the keys and values of permanent tokens, computed from their features, to pages.

        features  one row per token, of this executor's last step or from a host ring

        Returns no candidates. Raises EngineError, and changes nothing, for an invalid extension.
        """
        no_candidates(len(extension.scored))
        super().extend(extension, features)
        return no_candidates(0)

    def propose(self, block: DraftBlock) -> Sequence[AnyArray]:
        """Implement BlockModelBase.propose."""
        head, count = self.about, len(block.roots)
        places = head.run(block.depth)
        tokens: Ints = np.full((count, places), max(head.mask, 0), np.int32)
        tokens[:, 0] = block.roots
        nodes = np.arange(count * places, dtype=np.int32).reshape(count, places)
        scored = nodes[:, head.first : head.first + block.depth].ravel()
        hidden = np.empty((len(scored), head.hidden if self.pairs else 0), np.float32)
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
            outputs=hidden if self.pairs else None,
        )
        found = self.run(work, block.candidates)
        return [
            each.reshape(count, block.depth, each.shape[-1])
            for each in (found.ids, found.log_probs, hidden)
        ]


def _layer_kind(head: BlockHead, window: int | None) -> native.LayerKind:
    return native.LayerKind(
        ffn=head.ffn,
        window=window or 0,
        kv_heads=head.kv_heads,
        head_size=head.head_size,
        score_scale=head.head_size**-0.5,
        residual=1.0,
    )
