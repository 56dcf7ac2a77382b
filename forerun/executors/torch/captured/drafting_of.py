"""Which part of a captured round drafts with a model."""

from forerun.executors.torch.captured.block_drafting import BlockDrafting
from forerun.executors.torch.captured.drafting import Drafting, LevelDrafting
from forerun.executors.torch.captured.pair_drafting import PairDrafting
from forerun.executors.torch.drafts.block import TorchBlockModel
from forerun.executors.torch.drafts.level_model import LevelModel
from forerun.executors.torch.triton.kernels import Kernels
from forerun.interface.executor import ExecutorLimits


def drafting_of(
    model: LevelModel | TorchBlockModel, kernels: Kernels, limits: ExecutorLimits
) -> Drafting:
    """Return what drafts with this model at the end of rounds. limits: the target's, whose scratch
    bounds the nodes that run at once.
    """
    if not isinstance(model, TorchBlockModel):
        return LevelDrafting(model, kernels, limits.max_nodes)
    if model.pairs is not None:
        return PairDrafting(model, model.pairs, kernels, limits)
    return BlockDrafting(model, kernels, limits.max_nodes, limits.slots)
