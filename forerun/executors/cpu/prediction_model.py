"""The target's own prediction layers on the compiled core. drafts/prediction_layers.py describes
them, executors/layer_states.py the states that they read.
"""

from dataclasses import replace

import numpy as np

from forerun.checkpoints.prediction_naming import (
    EMBEDDING_NORM,
    FINAL_NORM,
    FUSE,
    HIDDEN_NORM,
)
from forerun.drafts.prediction_layers import PredictionLayers
from forerun.errors import ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.draft_model import (
    CpuDraftModel,
    CpuDraftPass,
    pass_of_extension,
    pass_of_level,
)
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
from forerun.executors.cpu.weights import Packer, cache_bytes_per_token, set_layer
from forerun.executors.draft_model import declared_layers
from forerun.executors.layer_states import LayerStates, layer_read, layers_at
from forerun.interface.draft_model import Candidates, DraftExtension, DraftLevel
from forerun.interface.features import Features
from forerun.types import Floats, Ints

_HEAD = Place("lm_head", -1, 1)
_FUSE = -1, 2
_NORMS = {FINAL_NORM: (-1, 0), HIDDEN_NORM: (-1, 1), EMBEDDING_NORM: (-1, 2)}
_EMBEDDING_FIRST, _HIDDEN_FIRST = 2, 3
_UNSCORED: Ints = np.zeros(0, np.int32)


class CpuPredictionModel(CpuDraftModel):
    """DraftModel on the compiled core, with the target's embedding and, if it has the whole
    vocabulary, the target's output head. Each layer is a native model with its own keys and values;
    a single layer stores its own feedback.

    Raises ModelError for layers that the core cannot run, MemoryPlanError if they do not fit.
    """

    def __init__(self, executor: CpuExecutor, draft: PredictionLayers) -> None:
        arch, limits = draft.architecture, executor.limits
        check_runs(arch)
        if "model.embed_tokens.weight" in draft.files or arch.hidden % 32:
            raise ModelError(
                f"{draft.path}: the CPU executor runs prediction layers that share the target's "
                "embedding, of a width that is a multiple of 32; use the torch executor"
            )
        super().__init__(executor, declared_layers(draft, limits.max_nodes))
        self._draft = draft
        self._models = [self._layer(number) for number in range(draft.count)]
        self._model = self._models[0]
        self._rows = LayerStates(limits)
        rows = self._rows.rows if draft.count > 1 else 0
        self._states = np.zeros((draft.count, rows, arch.hidden), np.float32)
        self.facts["weight_bytes"] += self._states.nbytes
        if rows:
            of_pages = self._states[:, self._rows.pages : self._rows.pages + limits.pages]
            executor.model.by_page.append(of_pages)

    def _layer(self, number: int) -> int:
        """Return a native model with one layer's tensors."""
        draft = self._draft
        arch = draft.architecture
        own_head = "lm_head.weight" in draft.files
        shared = draft.vocab == arch.vocab and not own_head
        tied = arch.tied_head and not own_head
        head = Place("model.embed_tokens", _HEAD.layer, _HEAD.which) if tied else _HEAD
        fuse = Place(draft.own(number, FUSE).removesuffix(".weight"), *_FUSE)
        norms = [Place(draft.own(number, part), *where) for part, where in _NORMS.items()]
        layer = [replace(p, layer=0) for p in matrices(arch) if p.layer == number]
        vector = [replace(p, layer=0) for p in vectors(arch) if p.layer == number]
        tensors = ([*layer, fuse, *([] if shared else [head])], [*vector, *norms])
        rows = None if shared else draft.target_ids
        packer = Packer(draft, rows, tensors, dtype="q8_0")
        model = self._open(number, packer.planned_bytes())
        set_layer(model, 0, layer_kind(arch, number))
        packer.load(model)
        if shared:
            self._library.forerun_share_head(model, self._executor.native_model())
        return model

    def _open(self, number: int, weight_bytes: int) -> int:
        arch, limits = self._draft.architecture, self._executor.limits
        sizes = sizes_for(
            arch,
            limits,
            layers=1,
            vocab=self._draft.vocab,
            cache_item=2,
            cache_bytes=cache_bytes_per_token((arch.cache_layer,), 2),
        )
        kind = native.HeadKind(
            features=1,
            width=arch.hidden,
            slots=limits.slots,
            fusion=_HIDDEN_FIRST if self._draft.hidden_first else _EMBEDDING_FIRST,
            normed_feedback=1,
            begin=number,
            zeroed=self._draft.zeroed and number == 0,
        )
        last = (self._draft.target.architecture.layers,)
        return self.opened_head(sizes, kind, last, RopeTable(arch.ropes), weight_bytes)

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Run the token after each permanent one through all layers, the first layer together with
        the features of the permanent one, and write their pages.

        Returns the first layer's Candidates [s,k]. Raises EngineError for an invalid extension.
        """
        if self._draft.count == 1:
            return super().extend(extension, features)
        work = pass_of_extension(extension, features)
        places = self.page_slots(extension)
        before, count = self._rows.before(extension), len(extension.tokens)
        candidates = self._run_layer(0, work, self._states[0, :count], extension.candidates)
        work = replace(work, scored=_UNSCORED)
        for number in range(1, self._draft.count):
            work = replace(work, hidden=self._states[number - 1, before])
            self._run_layer(number, work, self._states[number, :count], 1)
        for model in self._models:
            self.commit(model, places)
        states = self._rows.stored(extension)
        self._states[:, states.targets] = self._states[:, states.nodes]
        return candidates

    def expand(self, level: DraftLevel) -> Candidates:
        """Run one level of n draft tokens through the layer of their depth, which ranks the next
        tokens, and through those of greater depths, whose states deeper levels need. Returns
        Candidates [n,k]. Raises EngineError if the tokens differ in depth or the level is invalid.
        """
        if self._draft.count == 1:
            return super().expand(level)
        depth, count = self._rows.depth(level), self._draft.count
        above = self._rows.above(level)
        rows = slice(level.first, level.first + len(level.tokens))
        works = [pass_of_level(level)]
        works.append(replace(works[0], scored=_UNSCORED))
        candidates: list[Candidates] = []
        for number in layers_at(depth, count):
            work = works[bool(candidates)]
            work = replace(work, hidden=self._states[layer_read(number, depth, count), above])
            candidates.append(
                self._run_layer(number, work, self._states[number, rows], level.candidates)
            )
        return candidates[0]

    def _run_layer(
        self, number: int, work: CpuDraftPass, outputs: Floats, candidates: int
    ) -> Candidates:
        """Run one layer, and fill its outputs float32[n,H]."""
        return self.run(replace(work, outputs=outputs), candidates, self._models[number])
