"""An EAGLE draft head on the compiled core, beside its target."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.errors import EngineError, MemoryPlanError, ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.executor import CpuExecutor, CpuFeatures
from forerun.executors.cpu.weights import set_matrix, set_vector
from forerun.interface.draft_model import (
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftLevel,
    DraftModelTraits,
    Extension,
    FeatureNeeds,
)
from forerun.interface.features import Features, KeptFeatures
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_config import DraftHead
from forerun.models.draft_folder import DraftFile
from forerun.types import Floats, Ints

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


@dataclass(frozen=True, slots=True)
class _Pass:
    """What an extension and a level have in common, as the core reads it (csrc/draft.h).

    sources   int32[n] see there
    features  float32[n,F*H], where an extension does not read the core's own last step
    """

    tokens: Ints
    sources: Ints
    parents: Ints
    start: Ints
    kv_len: Ints
    slots: Ints
    pages: Ints
    first: int
    scored: Ints
    extend: bool
    features: Floats | None = None


class CpuEagleModel:
    """DraftModel on the compiled core: 8 bits in groups of 32, the target's rows as stored.

    Raises ModelError for a head this executor cannot run, MemoryPlanError where it does not fit.
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
        self._executor, self._library, self._head = executor, native.load(), head
        self._weight_bytes = self._planned_bytes(checkpoint, draft)
        self._model = self._open()
        self._load(checkpoint, draft)
        self._logits = np.empty((0, head.vocab), np.float32)

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
        # 3 = float32 in the file, which is packed to the largest form there is.
        total = sum(packed(3, rows, columns) + 256 for rows, columns in shapes)
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
            threads=1,  # It works with the target's.
            norm_eps=head.norm_eps,
            rope_factor=head.rope.attention_factor,
        )
        kind = native.HeadKind(
            features=len(head.features),
            width=head.target_hidden,
            slots=limits.slots,
            first_kind=head.algorithm == "eagle1",
            feature_norm=_FEATURE_NORMS[head.feature_norm],
            normed_residual=head.normed_residual,
            normed_feedback=head.normed_feedback,
        )
        aux_layers = np.array(head.features, np.int32)
        frequencies = np.ascontiguousarray(head.rope.frequencies(head.head_size), np.float32)
        model: int | None = self._library.forerun_open_draft(
            self._executor.native_model(),
            ctypes.byref(sizes),
            ctypes.byref(kind),
            aux_layers.ctypes.data,
            frequencies.ctypes.data,
            self._weight_bytes,
        )
        if model is None:
            raise MemoryPlanError(
                f"the draft head ({self._weight_bytes:,} bytes and its cache) does not fit: "
                f"{self._library.forerun_error().decode()}; lower the number of cached tokens"
            )
        self._executor.adopt(model, len(head.features) * head.target_hidden)
        return model

    def _load(self, checkpoint: Checkpoint, draft: DraftFile) -> None:
        for which, name in enumerate(_LAYER_MATRICES):
            weights = draft.tensor(f"layers.0.{name}.weight")
            set_matrix(self._library, self._model, (name, 0, which), "F32", weights)
        bias = draft.tensor("fc.bias") if self._head.fc_bias else None
        fuse = draft.tensor("fc.weight")
        set_matrix(self._library, self._model, ("fc", -1, _FUSE), "F32", fuse, bias)
        place = ("lm_head", -1, _HEAD)
        if self._head.trained_head:
            weights = draft.tensor("lm_head.weight")
            set_matrix(self._library, self._model, place, "F32", weights)
        else:
            tied = checkpoint.architecture.tied_head
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            rows = checkpoint.tensor(name)[draft.target_ids]
            set_matrix(self._library, self._model, place, "F32", np.ascontiguousarray(rows))
        for vector in _vectors(self._head):
            values = draft.tensor(vector.name)
            set_vector(
                self._library, self._model, (vector.name, vector.layer, vector.which), values
            )

    def extend(self, extension: Extension, features: Features | None) -> Candidates:
        """Run the tokens after those that became permanent, beside these' features."""
        count = len(extension.tokens)
        sources, given = np.zeros(count, np.int32), None
        if isinstance(features, KeptFeatures):
            given = np.ascontiguousarray(features.values, np.float32)
        elif isinstance(features, CpuFeatures):
            sources = features.nodes.astype(np.int32)
        else:
            raise EngineError("an EAGLE head was extended without features of the compiled core")
        if len(sources if given is None else given) != count:
            raise EngineError("an extension whose features are not one row per token")
        places = self._places(extension)
        candidates = self._run(
            _Pass(
                tokens=extension.next_tokens,
                sources=sources,
                parents=np.full(count, -1, np.int32),
                start=extension.start,
                kv_len=extension.kv_len,
                slots=extension.slots,
                pages=extension.pages,
                first=0,
                scored=extension.scored,
                extend=True,
                features=given,
            ),
            extension.candidates,
        )
        self._commit(places)
        return candidates

    def _places(self, extension: Extension) -> Ints:
        """int32[n] page slots of the tokens. Raises EngineError where there is no page."""
        size, start = self._executor.limits.page_size, extension.start
        rows = np.repeat(np.arange(len(extension.kv_len)), np.diff(start))
        position = extension.kv_len[rows] + np.arange(len(rows)) - start[rows]
        column, width = position // size, extension.pages.shape[1]
        page = np.where(column < width, extension.pages[rows, np.minimum(column, width - 1)], -1)
        if np.any((page < 0) | (page >= self._executor.limits.pages)):
            raise EngineError("a draft step was refused: a token's page does not exist")
        places: Ints = (page * size + position % size).astype(np.int32)
        return places

    def _commit(self, places: Ints) -> None:
        """Make the keys and values of the nodes of an extension permanent."""
        nodes = np.arange(len(places), dtype=np.int32)
        code = self._library.forerun_commit(
            self._model, nodes.ctypes.data, places.ctypes.data, len(nodes)
        )
        self._raise_for(code)

    def expand(self, level: DraftLevel) -> Candidates:
        """Run draft tokens."""
        kept = -1 - np.repeat(level.slots, np.diff(level.start))
        return self._run(
            _Pass(
                tokens=level.tokens,
                sources=np.where(level.parents < 0, kept, level.parents),
                parents=level.parents,
                start=level.start,
                kv_len=level.kv_len,
                slots=level.slots,
                pages=level.pages,
                first=level.first,
                scored=np.arange(len(level.tokens), dtype=np.int32),
                extend=False,
            ),
            level.candidates,
        )

    def block(self, block: DraftBlock) -> BlockCandidates:
        """An EAGLE head proposes level by level. Raises EngineError."""
        raise EngineError("an EAGLE head proposes level by level, not a block")

    def _run(self, work: _Pass, candidates: int) -> Candidates:
        if len(work.scored) > len(self._logits):
            self._logits = np.empty((len(work.scored), self.traits.vocab), np.float32)
        arrays = {
            "tokens": work.tokens,
            "sources": work.sources,
            "parents": work.parents,
            "start": work.start,
            "kv_len": work.kv_len,
            "pages": work.pages,
            "slots": work.slots,
            "scored_nodes": work.scored,
        }
        held = {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}
        step = native.DraftStep(
            features=None if work.features is None else work.features.ctypes.data,
            rows=len(work.kv_len),
            nodes=len(work.tokens),
            first=work.first,
            extend=work.extend,
            page_width=held["pages"].shape[1],
            scored=len(work.scored),
            logits=self._logits.ctypes.data,
            **{name: array.ctypes.data for name, array in held.items()},
        )
        self._raise_for(self._library.forerun_draft(self._model, ctypes.byref(step)))
        return _likeliest(self._logits[: len(work.scored)], candidates)

    def _raise_for(self, code: int) -> None:
        if code:
            raise EngineError(f"a draft step was refused: {self._library.forerun_error().decode()}")

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": self._head.algorithm,
            "vocab": self.traits.vocab,
            "features": list(self._head.features),
            "weight_bytes": self._weight_bytes,
        }


def _likeliest(logits: Floats, count: int) -> Candidates:
    """The best `count` of each row of logits [s,Vd]."""
    count = min(count, logits.shape[1])
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    if count == 1:
        ids = logits.argmax(-1)[:, None]
    else:
        ids = np.argpartition(-logits, count - 1)[:, :count]
        order = np.argsort(-np.take_along_axis(logits, ids, -1), kind="stable")
        ids = np.take_along_axis(ids, order, -1)
    values = np.take_along_axis(logits, ids, -1) - top
    values -= np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return Candidates(ids.astype(np.int32), values)
