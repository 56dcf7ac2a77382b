"""A block drafter at the end of a captured round whose tokens depend on those above, or that says
how sure it is of them (DSpark, DFlash2): the block's places are scored in one pass, and level by
level each node's candidates are chosen by what stands above it.
"""

import torch
from torch import Tensor

from forerun.executors.pair_scores import PairScores
from forerun.executors.torch.captured.block_drafting import BlockDrafting, Growing
from forerun.executors.torch.captured.drafting import Drafting, LevelDrafting, padded
from forerun.executors.torch.drafts.block import TorchBlockModel
from forerun.executors.torch.drafts.level_model import LevelModel
from forerun.executors.torch.drafts.pairs import LevelPairs, TorchPairs
from forerun.executors.torch.memory import check_fits
from forerun.executors.torch.triton.kernels import Kernels
from forerun.executors.torch.triton.record import Record, Size
from forerun.executors.torch.triton.round_types import TreeStarts
from forerun.interface.draft_model import CANDIDATES
from forerun.interface.executor import ExecutorLimits
from forerun.speculative.tree import full_size
from forerun.types import Floats

TENTHS = 10


class PairDrafting(BlockDrafting):
    """The part of such a drafter in a round.

    scores  its tables and matrices, which are loaded here
    """

    def __init__(
        self,
        model: TorchBlockModel,
        scores: PairScores,
        kernels: Kernels,
        limits: ExecutorLimits,
    ) -> None:
        super().__init__(model, kernels, limits.max_nodes, limits.slots)
        device, dtype = model.cache.paged.device, model.dtype
        check_fits({"draft_tables": model.about.tables * dtype.itemsize}, device)
        self._pairs = TorchPairs(scores, device, dtype)
        self.confident = self._pairs.confident
        start = torch.zeros(2, 2, model.about.depth, TENTHS, device=device)
        start[1] = 1.0  # A confidence is a chance until outcomes are counted.
        self._chances = start

    def fits(self, size: Size) -> bool:
        """Return whether there is scratch for the blocks, and a child for every place."""
        return super().fits(size) and size.width <= (self._pairs.top_k or size.width)

    def calibrate(self, chances: Floats) -> None:
        """Use OnDeviceDraftSpec.chances from the next round on."""
        there = torch.from_numpy(chances)
        self._chances[:, :, : there.shape[2]].copy_(there)

    # --- launches only: no shape and no branch depends on a value ---------------------------

    def _grow(
        self, size: Size, starts: TreeStarts, roots: Tensor, read: Tensor, record: Record
    ) -> Tensor | None:
        rows, width = size.rows, size.width
        model, grown = self._model, record.grown.view(3, rows, -1)
        logits = model.logits(read.flatten(0, 1)).float()
        most = self._pairs.top_k or max(CANDIDATES, width)
        best, which = logits.topk(min(most, len(model.ids)), -1)
        log_probs = best - logits.logsumexp(-1, keepdim=True)
        places = (rows, size.levels, -1)
        which, log_probs = which.view(places), log_probs.view(places)
        pairs = self._pairs.of(which, log_probs, read)
        ids = model.ids[which]
        growing = Growing(grown, width, roots)
        for level in range(size.levels):
            self._hang(growing, pairs, starts, ids[:, level].contiguous(), level, record)
        if not size.masked:
            return None
        first = pairs.below(0, roots, None)
        scores = torch.cat([first.scores[:, 0], first.others[:, None]], 1)
        values = scores.log_softmax(1)[:, :-1].sort(descending=True)
        return padded(ids[:, 0].gather(1, values.indices), values.values)

    def _hang(
        self,
        growing: Growing,
        pairs: LevelPairs,
        starts: TreeStarts,
        ids: Tensor,
        level: int,
        record: Record,
    ) -> None:
        """Write one level of the trees, the best `width` squared of all children; ids int32[R,K]
        of its candidates.
        """
        width, count = growing.width, growing.tokens.shape[1]
        below = pairs.below(level, growing.tokens, growing.state)
        noise = starts.row_noise(level, width)
        tokens, values = self._kernels.children(
            below.scores.flatten(0, 1), ids, below.others, noise, width
        )
        tokens, values = (part.view(len(ids), count, width) for part in (tokens, values))
        if below.confidence is not None:
            values = self._calibrated(below.confidence, values, level, noise.temperatures > 0)
            into = record.confident.view(torch.float32).view(len(ids), -1)
            begin = 1 + full_size(width, level - 1) if level else 0
            into[:, begin : begin + count] = below.confidence
        growing.add(level, tokens, values, below.state)

    def _calibrated(
        self, confidence: Tensor, values: Tensor, level: int, sampled: Tensor
    ) -> Tensor:
        """Return values float32[R,n,width] of which the best is worth the chance that its
        confidence float32[R,n] stands for, and the others keep their ratios to it; sampled bool[R].
        """
        tenth = (confidence * TENTHS).long().clamp_max(TENTHS - 1)
        start, slope = self._chances[:, :, level][:, sampled.long()[:, None], tenth]
        chance = (start + slope * confidence)[..., None]
        ratios = values - values[..., :1]
        share = torch.minimum(chance, ratios.exp().sum(-1, keepdim=True).reciprocal())
        return share.log() + ratios


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
