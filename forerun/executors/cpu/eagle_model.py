"""An EAGLE draft head on the compiled core."""

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.eagle_config import expected_draft_tensors
from forerun.drafts.eagle_folder import DraftFile
from forerun.errors import ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.draft_model import CpuDraftModel
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.places import LAYER_MATRICES, Place, RopeTable, sizes_for
from forerun.executors.cpu.weights import BYTES, DraftTensors, cache_bytes_per_token
from forerun.executors.draft_model import declared_head

_FEATURE_NORMS = {"none": 0, "joint": 1, "each": 2}
_VECTORS = {
    "layers.0.post_attention_layernorm.weight": (0, 1),
    "layers.0.input_layernorm.weight": (0, 0),
    "norm.weight": (-1, 0),
    "layers.0.hidden_norm.weight": (-1, 1),
    "input_norm.weight": (-1, 2),
}
"""(layer, number within it) of each vector (csrc/draft.h); fc_norm.i follow."""


class CpuEagleModel(CpuDraftModel):
    """DraftModel on the compiled core: weights in 8 bits in groups of 32; rows of the target's
    embedding and head as stored.

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
        super().__init__(executor, declared_head(draft, limits.max_nodes))
        tensors = _tensors(draft)
        sizes = sizes_for(
            head,
            limits,
            layers=1,
            cache_item=2,
            cache_bytes=cache_bytes_per_token(head.cache, 2),
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
        ropes = RopeTable(((head.rope, head.head_size),))
        self._model = self.opened_head(sizes, kind, head.features, ropes, tensors.planned_bytes())
        tensors.load(self._model, checkpoint)


def _tensors(draft: DraftFile) -> DraftTensors:
    head, shapes = draft.head, expected_draft_tensors(draft.head)
    matrices = [Place(f"layers.0.{name}", 0, which) for which, name in enumerate(LAYER_MATRICES)]
    matrices.append(Place("fc", -1, 2))
    if head.trained_head:
        matrices.append(Place("lm_head", -1, 1))
    each = {f"fc_norm.{number}.weight": (-1, 3 + number) for number in range(len(head.features))}
    where = _VECTORS | each
    vectors = [Place(name, *at) for name, at in where.items() if name in shapes]
    rows = None if head.trained_head else draft.target_ids
    return DraftTensors(draft, shapes, matrices, vectors, rows, BYTES)
