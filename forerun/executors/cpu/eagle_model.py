"""An EAGLE draft head on the compiled core, beside its target."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.eagle_config import DraftHead
from forerun.drafts.eagle_folder import DraftFile
from forerun.errors import ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.hidden_state_model import CpuHiddenStateModel
from forerun.executors.cpu.places import RopeTable
from forerun.executors.cpu.weights import (
    BYTES,
    Stored,
    cache_bytes_per_token,
    set_matrix,
    set_vector,
)
from forerun.interface.draft_model import (
    DraftModelTraits,
    FeatureNeeds,
)

_LAYER_MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_HEAD, _FUSE = 1, 2
_FEATURE_NORMS = {"none": 0, "joint": 1, "each": 2}


@dataclass(frozen=True, slots=True)
class _Place:
    """A vector's layer and number within it (csrc/draft.h)."""

    name: str
    layer: int
    which: int


def _vectors(head: DraftHead) -> list[_Place]:
    places = [_Place("layers.0.post_attention_layernorm.weight", 0, 1)]
    if head.algorithm == "eagle3":
        places += [
            _Place("layers.0.input_layernorm.weight", 0, 0),
            _Place("norm.weight", -1, 0),
            _Place("layers.0.hidden_norm.weight", -1, 1),
        ]
    if head.feature_norm == "joint":
        places.append(_Place("input_norm.weight", -1, 2))
    if head.feature_norm == "each":
        places += [_Place(f"fc_norm.{i}.weight", -1, 3 + i) for i in range(len(head.features))]
    return places


class CpuEagleModel(CpuHiddenStateModel):
    """DraftModel on the compiled core: 8 bits in groups of 32, the target's rows as stored.

    Raises ModelError for a head this executor cannot run, MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: CpuExecutor, checkpoint: Checkpoint, draft: DraftFile) -> None:
        head, limits = draft.head, executor.limits
        if len(head.cache) != 1:
            raise ModelError(
                f"{draft.path}: the CPU executor runs drafts of one EAGLE layer, not of "
                f"{len(head.cache)}; use the torch executor"
            )
        if head.hidden % 32 or head.target_hidden % 32 or head.hidden != head.target_hidden:
            raise ModelError(
                f"{draft.path}: the CPU executor runs drafts of the target's width, a multiple of "
                f"32, not {head.hidden}; use the torch executor"
            )
        if head.fc_bias and head.algorithm == "eagle3":
            raise ModelError(f"{draft.path}: fc.bias in an EAGLE-3 head; use the torch executor")
        last = head.algorithm == "eagle1"
        self.traits = DraftModelTraits(
            name=head.algorithm,
            cache=head.cache,
            target_ids=draft.target_ids,
            max_nodes=limits.max_nodes,
            features=FeatureNeeds("last") if last else FeatureNeeds("aux", head.features),
        )
        super().__init__(executor)
        self._head = head
        self._weight_bytes = self._planned_bytes(checkpoint, draft)
        self._model = self._open()
        self._load(checkpoint, draft)

    def _planned_bytes(self, checkpoint: Checkpoint, draft: DraftFile) -> int:
        head = self._head
        packed = self._library.forerun_packed_bytes
        shapes = [
            (
                head.hidden,
                2 * head.hidden
                if head.algorithm == "eagle1"
                else head.target_hidden * len(head.features),
            ),
            (head.vocab, head.hidden),
        ]
        query, key = head.heads * head.head_size, head.kv_heads * head.head_size
        shapes += [(query, head.input_width), (key, head.input_width), (key, head.input_width)]
        shapes += [(head.hidden, query), (head.ffn, head.hidden), (head.ffn, head.hidden)]
        shapes += [(head.hidden, head.ffn)]
        total = sum(packed(BYTES, rows, columns) + 256 for rows, columns in shapes)
        vectors = 4 * (8 + 3 * len(head.features)) * head.hidden + 64 * 16
        return int(total + vectors)

    def _open(self) -> int:
        head, limits = self._head, self._executor.limits
        sizes = native.Sizes(
            layers=1,
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
            cache_item=2,
            cache_bytes=cache_bytes_per_token(head.cache, 2),
            norm_eps=head.norm_eps,
        )
        kind = native.HeadKind(
            features=len(head.features),
            width=head.target_hidden,
            slots=limits.slots,
            fusion=int(head.algorithm == "eagle1"),
            feature_norm=_FEATURE_NORMS[head.feature_norm],
            normed_residual=head.normed_residual,
            normed_feedback=head.normed_feedback,
        )
        return self.open_native(
            sizes, kind, head.features, RopeTable(((head.rope, head.head_size),))
        )

    def _load(self, checkpoint: Checkpoint, draft: DraftFile) -> None:
        for which, name in enumerate(_LAYER_MATRICES):
            weights = draft.tensor(f"layers.0.{name}.weight")
            set_matrix(self._library, self._model, (name, 0, which), Stored("F32", weights))
        bias = draft.tensor("fc.bias") if self._head.fc_bias else None
        fuse = draft.tensor("fc.weight")
        set_matrix(self._library, self._model, ("fc", -1, _FUSE), Stored("F32", fuse), bias)
        place = ("lm_head", -1, _HEAD)
        if self._head.trained_head:
            weights = draft.tensor("lm_head.weight")
            set_matrix(self._library, self._model, place, Stored("F32", weights))
        else:
            tied = checkpoint.architecture.tied_head
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            rows = checkpoint.tensor(name)[draft.target_ids]
            set_matrix(self._library, self._model, place, Stored("F32", np.ascontiguousarray(rows)))
        for vector in _vectors(self._head):
            values = draft.tensor(vector.name)
            set_vector(
                self._library, self._model, (vector.name, vector.layer, vector.which), values
            )

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: algorithm, vocab, features, weight_bytes."""
        return {
            "algorithm": self._head.algorithm,
            "vocab": self.traits.vocab,
            "features": list(self._head.features),
            "weight_bytes": self._weight_bytes,
        }
