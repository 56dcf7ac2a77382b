"""A draft head on the compiled core, beside its target."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.errors import EngineError, MemoryPlanError, ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.weights import set_matrix, set_vector
from forerun.interface.draft_model import Children, DraftForward, DraftRequest, GrownDrafts
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


class CpuDraftModel:
    """DraftModel on the compiled core: 8 bits in groups of 32, the target's rows as stored.

    Raises ModelError for a head this executor cannot run, MemoryPlanError where it does not fit.
    """

    def __init__(self, executor: CpuExecutor, checkpoint: Checkpoint, draft: DraftFile) -> None:
        head, limits = draft.head, executor.limits
        if head.hidden % 32 or head.target_hidden % 32 or head.hidden != head.target_hidden:
            raise ModelError(
                f"{draft.path}: the CPU executor runs drafts of the target's width, a multiple of "
                f"32, not {head.hidden}; use the torch executor"
            )
        if head.fc_bias and head.algorithm == "eagle3":
            raise ModelError(f"{draft.path}: fc.bias in an EAGLE-3 head; use the torch executor")
        self.max_nodes, self.vocab = limits.max_nodes, head.vocab
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
            max_nodes=self.max_nodes,
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
        self._executor.adopt(model)
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

    def features(self, nodes: Ints) -> Floats:
        """Copies of the target's features of `nodes`."""
        count = int(nodes.max()) + 1
        aux_hidden_states = np.empty(
            (count, len(self._head.features) * self._head.target_hidden), np.float32
        )
        model = self._executor.native_model()
        self._raise_for(
            self._library.forerun_aux_hidden_states(model, count, aux_hidden_states.ctypes.data)
        )
        found: Floats = aux_hidden_states[nodes]
        return found

    def extend(self, work: DraftForward) -> Children:
        """Run an extension and make its keys and values permanent."""
        children = self._run(work, extend=True)
        size = self._executor.limits.page_size
        rows = np.repeat(np.arange(len(work.kv_len)), np.diff(work.start))
        position = work.kv_len[rows] + np.arange(len(rows)) - work.start[rows]
        page = work.pages[rows, position // size]
        if np.any((page < 0) | (page >= self._executor.limits.pages)):
            raise EngineError("a draft was extended to a page that does not exist")
        slots = (page * size + position % size).astype(np.int32)
        nodes = np.arange(len(rows), dtype=np.int32)
        code = self._library.forerun_commit(
            self._model, nodes.ctypes.data, slots.ctypes.data, len(nodes)
        )
        self._raise_for(code)
        return children

    def expand(self, work: DraftForward) -> Children:
        """Run own draft tokens."""
        return self._run(work, extend=False)

    def draft_request(self, draft_request: DraftRequest) -> None:
        """Unheard: every pass is asked for here."""

    def grown(self) -> GrownDrafts | None:
        """None."""
        return None

    def following(self) -> Ints:
        """Nobody."""
        return np.zeros(0, np.int32)

    def _run(self, work: DraftForward, extend: bool) -> Children:
        if len(work.scored) > len(self._logits):
            self._logits = np.empty((len(work.scored), self.vocab), np.float32)
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
        given = None
        if work.features is not None:
            given = np.ascontiguousarray(work.features, np.float32)
        step = native.DraftStep(
            features=None if given is None else given.ctypes.data,
            rows=len(work.kv_len),
            nodes=len(work.tokens),
            first=work.first,
            extend=extend,
            page_width=held["pages"].shape[1],
            scored=len(work.scored),
            logits=self._logits.ctypes.data,
            **{name: array.ctypes.data for name, array in held.items()},
        )
        self._raise_for(self._library.forerun_draft(self._model, ctypes.byref(step)))
        return _likeliest(self._logits[: len(work.scored)], work.children)

    def _raise_for(self, code: int) -> None:
        if code:
            raise EngineError(f"a draft step was refused: {self._library.forerun_error().decode()}")

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": self._head.algorithm,
            "vocab": self.vocab,
            "features": list(self._head.features),
            "weight_bytes": self._weight_bytes,
        }


def _likeliest(logits: Floats, count: int) -> Children:
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
    return Children(ids.astype(np.int32), values)
