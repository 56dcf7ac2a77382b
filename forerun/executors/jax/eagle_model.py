"""An EAGLE draft head beside its target (level_model.py)."""

from forerun.executors.jax.eagle import JaxEagleHead, load_head
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.level_model import JaxLevelModel
from forerun.interface.draft_model import DraftModelTraits, FeatureNeeds
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_folder import DraftFile


class JaxEagleModel(JaxLevelModel):
    """Raises ModelError for a head without an embedding of its width, MemoryPlanError if it does
    not fit.
    """

    def __init__(self, executor: JaxExecutor, checkpoint: Checkpoint, draft: DraftFile) -> None:
        about = draft.head
        last = about.algorithm == "eagle1"
        traits = DraftModelTraits(
            name=about.algorithm,
            cache=about.cache,
            target_ids=draft.target_ids,
            max_nodes=executor.limits.max_nodes,
            features=FeatureNeeds("last") if last else FeatureNeeds("aux", about.features),
        )
        head = JaxEagleHead(about, executor.decoder)
        super().__init__(
            executor,
            head,
            traits,
            lambda: load_head(head, checkpoint, draft, executor.dtype),
            {"algorithm": about.algorithm, "features": list(about.features)},
        )
