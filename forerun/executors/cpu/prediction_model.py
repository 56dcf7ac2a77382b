"""The target's own prediction layer on the compiled core: what it computes is said in
models/prediction_layers.py.
"""

from typing import Any

from forerun.errors import ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.hidden_state_model import CpuHiddenStateModel
from forerun.executors.cpu.limits import check_runs
from forerun.executors.cpu.weights import Packer, Place, matrices, vectors
from forerun.interface.draft_model import DraftModelTraits, FeatureNeeds
from forerun.models.prediction_layers import EMBEDDING_NORM, FUSE, HIDDEN_NORM, PredictionLayers

_HEAD, _FUSE = Place("lm_head", -1, 1), Place(FUSE.removesuffix(".weight"), -1, 2)
_NORMS = [Place(HIDDEN_NORM, -1, 1), Place(EMBEDDING_NORM, -1, 2)]
_EMBEDDING_FIRST, _HIDDEN_FIRST = 2, 3


class CpuPredictionModel(CpuHiddenStateModel):
    """DraftModel on the compiled core, with the target's embedding and, unless it has some rows
    only, its output head.

    Raises ModelError for a layer that the core cannot run, MemoryPlanError where it does not fit.
    """

    def __init__(self, executor: CpuExecutor, draft: PredictionLayers) -> None:
        arch = draft.architecture
        check_runs(arch, executor.limits.context)
        if "model.embed_tokens.weight" in draft.files or arch.hidden % 32:
            raise ModelError(
                f"{draft.path}: the CPU executor runs prediction layers that share the target's "
                "embedding, of a width that is a multiple of 32; use the torch executor"
            )
        self.traits = DraftModelTraits(
            name="nextn",
            cache=draft.cache,
            target_ids=draft.target_ids,
            max_nodes=executor.limits.max_nodes,
            features=FeatureNeeds("last"),
        )
        super().__init__(executor)
        self._draft = draft
        shared = draft.vocab == arch.vocab and "lm_head.weight" not in draft.files
        tied = arch.tied_head and "lm_head.weight" not in draft.files
        head = Place("model.embed_tokens", _HEAD.layer, _HEAD.which) if tied else _HEAD
        layer = [place for place in matrices(arch) if place.layer == 0]
        some = ([*layer, _FUSE, *([] if shared else [head])], [*vectors(arch), *_NORMS])
        rows = None if shared else draft.target_ids
        packer = Packer(self._library, draft, rows, some)
        self._weight_bytes = packer.planned_bytes()
        self._model = self._open()
        packer.load(self._model)
        if shared:
            self._library.forerun_share_head(self._model, executor.native_model())

    def _open(self) -> int:
        arch, limits = self._draft.architecture, self._executor.limits
        sizes = native.Sizes(
            layers=1,
            hidden=arch.hidden,
            heads=arch.heads,
            kv_heads=arch.kv_heads,
            head_size=arch.head_size,
            ffn=arch.ffn,
            vocab=self._draft.vocab,
            page_size=limits.page_size,
            pages=limits.pages,
            max_nodes=limits.max_nodes,
            context=limits.context,
            threads=1,  # It works with the target's.
            norm_eps=arch.norm_eps,
            rope_factor=arch.rope.attention_factor,
        )
        kind = native.HeadKind(
            features=1,
            width=arch.hidden,
            slots=limits.slots,
            fusion=_HIDDEN_FIRST if self._draft.hidden_first else _EMBEDDING_FIRST,
            normed_feedback=1,
        )
        last = (self._draft.target.architecture.layers,)
        return self.opened(sizes, kind, last, arch.rope.frequencies(arch.head_size))

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": "nextn",
            "layers": self._draft.count,
            "vocab": self.traits.vocab,
            "weight_bytes": self._weight_bytes,
        }
