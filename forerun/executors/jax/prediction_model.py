"""The target's own prediction layer beside it (level_model.py)."""

from forerun.errors import ModelError
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.level_model import JaxLevelModel
from forerun.executors.jax.prediction import PredictionHead, load_prediction
from forerun.interface.draft_model import DraftModelTraits, FeatureNeeds
from forerun.models.prediction_layers import PredictionLayers


class JaxPredictionModel(JaxLevelModel):
    """Raises ModelError if there are layers for several depths; MemoryPlanError where they do
    not fit.
    """

    def __init__(self, executor: JaxExecutor, draft: PredictionLayers) -> None:
        if draft.count > 1:
            raise ModelError(
                f"{draft.path} has {draft.count} prediction layers, one for each depth, and the "
                "jax executor drafts with one: use --speculative-num-steps 1, which reads the "
                "first alone, or --executor cpu or torch"
            )
        traits = DraftModelTraits(
            name="nextn",
            cache=draft.cache,
            target_ids=draft.target_ids,
            max_nodes=executor.limits.max_nodes,
            features=FeatureNeeds("last"),
        )
        head = PredictionHead(draft, executor.decoder)
        super().__init__(
            executor,
            head,
            traits,
            lambda: load_prediction(head, executor.dtype),
            {"algorithm": "nextn", "layers": draft.count},
        )
