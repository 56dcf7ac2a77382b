"""A whole model that drafts, beside its target (level_model.py)."""

from forerun.executors.jax.draft_decoder import DraftDecoder, load_decoder
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.level_model import JaxLevelModel
from forerun.executors.jax.limits import check_runs
from forerun.interface.draft_model import DraftModelTraits
from forerun.models.whole_draft import WholeDraft


class JaxDecoderModel(JaxLevelModel):
    """Raises MemoryPlanError if it does not fit."""

    def __init__(self, executor: JaxExecutor, draft: WholeDraft) -> None:
        check_runs(draft.checkpoint.architecture)
        traits = DraftModelTraits(
            name=draft.algorithm,
            cache=draft.cache,
            target_ids=draft.vocabulary.target_ids,
            max_nodes=executor.limits.max_nodes,
        )
        network = DraftDecoder.of(draft, executor.decoder.sharding)
        super().__init__(
            executor,
            network,
            traits,
            lambda: load_decoder(network, executor.dtype, executor.stacked),
            {
                "algorithm": draft.algorithm,
                "model": draft.name,
                "layers": len(draft.cache),
                "shared_tokens": draft.vocabulary.shared,
            },
        )
