"""Gemma 4's assistant on the compiled core. drafts/assistant.py says what it computes."""

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np

from forerun.drafts.assistant import BEFORE, BEHIND, CENTROIDS, Assistant
from forerun.errors import MemoryPlanError, ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.draft_pass import CpuDraftPass, launch, likeliest
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.hidden_state_model import CpuHiddenStateModel, pass_of_extension
from forerun.executors.cpu.limits import check_runs
from forerun.executors.cpu.places import Place, RopeTable, layer_kind, matrices, vectors
from forerun.executors.cpu.weights import Packer, set_layer
from forerun.executors.cpu.windowed import WindowedCpuExecutor
from forerun.executors.draft_checks import check_borrows, roots_of
from forerun.interface.draft_model import (
    Candidates,
    DraftExtension,
    DraftModelTraits,
    FeatureNeeds,
)
from forerun.interface.features import Features
from forerun.types import Ints

_HEAD, _BEFORE, _BEHIND, _CENTROIDS = ((-1, number) for number in (1, 2, 3, 4))
_BLOCK = 16
"""Rows of a matrix that a product computes together (csrc/quant.h, kBlock)."""


class CpuAssistantModel(CpuHiddenStateModel):
    """DraftModel on the compiled core: it reads the target's keys and values where they are. Float
    weights stay floats beside a target that computes in floats; else they become 8 bits.

    Raises ModelError for an assistant that the core cannot run, MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: CpuExecutor, draft: Assistant) -> None:
        check_runs(draft.architecture)
        super().__init__(executor)
        self._draft = draft
        clusters = draft.clusters
        if clusters is not None and clusters.tokens.shape[1] % _BLOCK:
            raise ModelError(
                f"{draft.path}: the CPU executor needs clusters of a multiple of {_BLOCK} tokens, "
                f"not of {clusters.tokens.shape[1]}; use the torch executor"
            )
        self.traits = DraftModelTraits(
            name="frozen_kv_mtp",
            cache=draft.cache,
            target_ids=draft.target_ids,
            max_nodes=executor.limits.max_nodes,
            features=FeatureNeeds("last"),
        )
        item = executor.model.cache_item
        packer = self._packer("file" if item == 4 else "q8_0")
        self._weight_bytes = packer.planned_bytes()
        self._model = self._open(item)
        for layer, spec in enumerate(draft.architecture.layer_specs):
            kind = layer_kind(draft.architecture, layer)
            kind.window = 0 if spec.attention.window is None else spec.attention.window + 1
            set_layer(self._library, self._model, layer, kind)
        packer.load(self._model)

    def _packer(self, dtype: str) -> Packer:
        draft, arch = self._draft, self._draft.architecture
        head = "model.embed_tokens" if arch.tied_head else "lm_head"
        own = [
            *(place for place in matrices(arch) if place.layer >= 0),
            Place(head, *_HEAD),
            Place(BEFORE, *_BEFORE),
            Place(BEHIND, *_BEHIND),
        ]
        rows = draft.target_ids if draft.vocab < arch.vocab else None
        if draft.clusters is not None:
            own.append(Place(CENTROIDS, *_CENTROIDS))
            rows = draft.clusters.tokens.ravel()
        return Packer(self._library, draft, rows, (own, vectors(arch)), dtype)

    def _open(self, item: int) -> int:
        draft, limits = self._draft, self._executor.limits
        arch, clusters = draft.architecture, draft.clusters
        sizes = native.Sizes(
            layers=arch.layers,
            hidden=arch.hidden,
            heads=arch.heads,
            kv_heads=arch.kv_heads,
            head_size=arch.head_size,
            ffn=arch.ffn,
            vocab=draft.vocab,
            page_size=limits.page_size,
            pages=limits.pages,
            max_nodes=limits.max_nodes,
            context=limits.context,
            threads=1,  # It uses the target's.
            cache_item=item,
            norm_eps=arch.norm_eps,
        )
        kind = native.AssistantKind(limits.slots)
        if clusters is not None:
            kind.clusters, kind.top_k = len(clusters.tokens), clusters.top_k
        model: int | None = self._library.forerun_open_assistant(
            self._executor.native_model(),
            ctypes.byref(sizes),
            ctypes.byref(kind),
            ctypes.byref(RopeTable(arch.ropes)),
            self._weight_bytes,
        )
        if model is None:
            raise MemoryPlanError(
                f"the assistant ({self._weight_bytes:,} bytes) does not fit: "
                f"{self._library.forerun_error().decode()}; lower the number of cached tokens"
            )
        self._executor.model.adopt(model, draft.target_hidden)
        return model

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Run each row's root, beside the features of the token before it. Returns Candidates
        [s,k]. Raises EngineError, and changes nothing, for bad input.
        """
        roots = roots_of(extension)
        work = pass_of_extension(extension, features)
        some = None if work.features is None else np.ascontiguousarray(work.features[roots.last])
        work = replace(
            work,
            tokens=work.tokens[roots.last],
            sources=work.sources[roots.last],
            parents=work.parents[roots.last],
            start=roots.start,
            kv_len=roots.kv_len,
            scored=roots.scored,
            features=some,
        )
        return self._run(work, extension.candidates)

    def _run(self, work: CpuDraftPass, candidates: int) -> Candidates:
        check_borrows(work.kv_len)
        if isinstance(self._executor, WindowedCpuExecutor):
            rows = zip(work.slots.tolist(), work.pages, work.kv_len.tolist(), strict=True)
            for slot, pages, length in rows:
                self._executor.windows.read(slot, pages, length)
        scored, clusters = len(work.scored), self._draft.clusters
        logits = self._logits_buffer(scored)
        if clusters is None:
            launch(self._library, self._model, work, logits)
            return likeliest(logits[:scored], candidates)
        chosen: Ints = np.empty((scored, clusters.top_k), np.int32)
        launch(self._library, self._model, replace(work, clusters=chosen), logits)
        found = likeliest(logits[:scored], candidates)
        ids = clusters.tokens[chosen].reshape(logits[:scored].shape)
        return Candidates(np.take_along_axis(ids, found.ids, -1), found.log_probs)

    @property
    def _scored_at_once(self) -> int:
        clusters = self._draft.clusters
        return self._draft.vocab if clusters is None else clusters.top_k * clusters.tokens.shape[1]

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: algorithm, layers, vocab, weight_bytes."""
        return {
            "algorithm": self.traits.name,
            "layers": self._draft.architecture.layers,
            "vocab": self.traits.vocab,
            "weight_bytes": self._weight_bytes,
        }
