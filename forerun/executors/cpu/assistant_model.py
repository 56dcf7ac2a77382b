"""Gemma 4's assistant as a draft model on the compiled core. drafts/assistant.py describes the
network.
"""

import ctypes
from dataclasses import replace

import numpy as np

from forerun.drafts.assistant import BEFORE, BEHIND, CENTROIDS, Assistant
from forerun.errors import ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.draft_model import CpuDraftModel, CpuDraftPass, pass_of_extension
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.limits import check_runs
from forerun.executors.cpu.places import (
    Place,
    RopeTable,
    layer_kind,
    matrices,
    sizes_for,
    vectors,
)
from forerun.executors.cpu.weights import Packer, set_layer
from forerun.executors.cpu.windowed import WindowedCpuExecutor
from forerun.executors.draft_checks import check_borrows, roots_of
from forerun.executors.draft_model import declared_layers
from forerun.interface.draft_model import Candidates, DraftExtension
from forerun.interface.features import Features
from forerun.types import Ints

_HEAD, _BEFORE, _BEHIND, _CENTROIDS = ((-1, number) for number in (1, 2, 3, 4))
_BLOCK = 16
"""Rows of a matrix that a product computes together (csrc/quant.h, kBlock)."""


class CpuAssistantModel(CpuDraftModel):
    """DraftModel on the compiled core, which attends to the target's own keys and values. Float
    weights stay floats with a target that computes in floats; else they become 8 bits.

    Raises ModelError for an assistant that the core cannot run, MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: CpuExecutor, draft: Assistant) -> None:
        check_runs(draft.architecture)
        super().__init__(executor, declared_layers(draft, executor.limits.max_nodes))
        self._draft = draft
        clusters = draft.clusters
        if clusters is not None and clusters.tokens.shape[1] % _BLOCK:
            raise ModelError(
                f"{draft.path}: the CPU executor needs clusters of a multiple of {_BLOCK} tokens, "
                f"not of {clusters.tokens.shape[1]}; use the torch executor"
            )
        item = executor.model.cache_item
        packer = self._packer("file" if item == 4 else "q8_0")
        self._model = self._open(item, packer.planned_bytes())
        for layer, spec in enumerate(draft.architecture.layer_specs):
            kind = layer_kind(draft.architecture, layer)
            kind.window = 0 if spec.attention.window is None else spec.attention.window + 1
            set_layer(self._model, layer, kind)
        packer.load(self._model)

    def _packer(self, dtype: str) -> Packer:
        draft, arch = self._draft, self._draft.architecture
        head = arch.head_tensor.removesuffix(".weight")
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
        return Packer(draft, rows, (own, vectors(arch)), dtype)

    def _open(self, item: int, weight_bytes: int) -> int:
        draft, limits = self._draft, self._executor.limits
        arch, clusters = draft.architecture, draft.clusters
        sizes = sizes_for(arch, limits, arch.layers, vocab=draft.vocab, cache_item=item)
        kind = native.AssistantKind(limits.slots)
        if clusters is not None:
            kind.clusters, kind.top_k = len(clusters.tokens), clusters.top_k
        model = self._library.forerun_open_assistant(
            self._executor.native_model(),
            ctypes.byref(sizes),
            ctypes.byref(kind),
            ctypes.byref(RopeTable(arch.ropes)),
            weight_bytes,
        )
        return self.adopted(model, draft.target_hidden, weight_bytes)

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Run each row's root together with the features of the token before it. Returns Candidates
        [s,k]. Raises EngineError, and changes nothing, for an invalid extension.
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
        return self.run(work, extension.candidates)

    def run(self, work: CpuDraftPass, candidates: int, model: int | None = None) -> Candidates:
        """Run one pass over nodes that follow cached tokens; see CpuDraftModel.run."""
        check_borrows(work.kv_len)
        if isinstance(self._executor, WindowedCpuExecutor):
            rows = zip(work.slots.tolist(), work.pages, work.kv_len.tolist(), strict=True)
            for slot, pages, length in rows:
                self._executor.windows.read(slot, pages, length)
        clusters = self._draft.clusters
        if clusters is None:
            return super().run(work, candidates)
        chosen: Ints = np.empty((len(work.scored), clusters.top_k), np.int32)
        found = super().run(replace(work, clusters=chosen), candidates)
        ids = clusters.tokens[chosen].reshape(len(chosen), self.scored_at_once)
        return Candidates(np.take_along_axis(ids, found.ids, -1), found.log_probs)

    @property
    def scored_at_once(self) -> int:
        """Number of draft ids that are scored per node: with an ordered head, only those of the
        best clusters.
        """
        clusters = self._draft.clusters
        return self._draft.vocab if clusters is None else clusters.top_k * clusters.tokens.shape[1]
