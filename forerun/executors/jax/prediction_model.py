"""The target's own prediction layer beside it (level_model.py)."""

from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.level_model import JaxLevelModel
from forerun.executors.jax.prediction import PredictionHead, load_prediction
from forerun.interface.draft_model import DraftModelTraits, FeatureNeeds
from forerun.models.prediction_layers import PredictionLayers


class JaxPredictionModel(JaxLevelModel):
    """Raises MemoryPlanError where it does not fit."""

    def __init__(self, executor: JaxExecutor, draft: PredictionLayers) -> None:
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
