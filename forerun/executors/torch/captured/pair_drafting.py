"""A block drafter at the end of a captured round whose tokens depend on those above, or that says
how sure it is of them (DSpark, DFlash2): the block's places are scored in one pass, and level by
level each node's candidates are chosen by what stands above it: what executors/pair_scores.py
computes on the host, for all nodes of a level at once.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.pair_scores import PairScores
from forerun.executors.torch.captured.block_drafting import BlockDrafting, Growing
from forerun.executors.torch.captured.drafting import Drafting, LevelDrafting, padded
from forerun.executors.torch.drafts.block import TorchBlockModel
from forerun.executors.torch.drafts.level_model import LevelModel, likeliest
from forerun.executors.torch.memory import check_fits
from forerun.executors.torch.sizes import Record, Size
from forerun.executors.torch.triton.kernels import Kernels
from forerun.executors.torch.triton.round_types import TreeStarts
from forerun.interface.draft_model import CANDIDATES
from forerun.interface.executor import ExecutorLimits
from forerun.speculative.tree import full_size
from forerun.types import Floats


@dataclass(frozen=True, slots=True)
class Below:
    """What may follow n nodes of a level in each of R rows.

    scores      float32[R,n,K] of the level's candidates
    others      float32[R] of all other tokens together; -inf: none may follow
    confidence  float32[R,n] in the best of them; None: it is not said
    state       float32[R,n,r] for the nodes below; None: there is none
    """

    scores: Tensor
    others: Tensor
    confidence: Tensor | None
    state: Tensor | None


class TorchPairs:
    """A drafter's tables, in `dtype`, and its matrices.

    rank   r
    top_k  candidates of each place, the best; 0 = the whole map
    """

    def __init__(self, scores: PairScores, device: torch.device, dtype: torch.dtype) -> None:
        head = self.head = scores.head
        self.rank, self.top_k = head.rank, head.top_k
        self.confident = head.confidence > 0

        def there(values: Floats) -> Tensor:
            return torch.from_numpy(np.array(values)).to(device)

        self._before, self._after = (there(part).to(dtype) for part in scores.tables())
        self._joint, self._sure = (
            None if each is None else (there(each.weight), there(each.bias))
            for each in (scores.joint, scores.confidence)
        )

    def of(self, which: Tensor, log_probs: Tensor, hidden: Tensor) -> "LevelPairs":
        """Return what is known of R blocks.

        which      int64[R,levels,K] candidates, draft ids, best first
        log_probs  float32[R,levels,K] without what stands above
        hidden     [R,levels,H] after the final norm
        """
        return LevelPairs(self, which, log_probs, hidden.float())

    def rows_above(self, tokens: Tensor) -> Tensor:
        """Return float32[R,n,r], the rows of tokens int[R,n] that stand above."""
        return F.embedding(tokens, self._before).float()

    def rows_of(self, which: Tensor) -> Tensor:
        """Return [R,K,r], the rows of candidates int64[R,K]."""
        return F.embedding(which, self._after)

    def joint(self, hidden: Tensor) -> Tensor | None:
        """Return what hidden float32[.,H] adds to the joint product; None without one."""
        if self._joint is None:
            return None
        weight, bias = self._joint
        begin = 2 * self.rank if self.head.pair == "rnn" else 0
        return F.linear(hidden, weight[:, begin : begin + self.head.hidden], bias)

    def sure(self, hidden: Tensor, above: Tensor) -> Tensor | None:
        """Return float32[R,n], the confidence at places hidden float32[R,1,H] below tokens whose
        rows are above float32[R,n,r].
        """
        if self._sure is None:
            return None
        (weight, bias), wide = self._sure, self.head.hidden
        logit = F.linear(hidden, weight[:, :wide], bias)
        if weight.shape[1] > wide:
            logit = logit + F.linear(above, weight[:, wide:])
        return logit.expand(*above.shape[:2], 1)[..., 0].sigmoid()

    def bias_rows(
        self, joint: Tensor | None, above: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return v float32[R,n,r] (pair_scores.py), and the state below.

        joint  float32[R,1,.] of the place; above, state  float32[R,n,r]
        """
        if joint is None or self._joint is None:
            return above, None
        weight = self._joint[0]
        match self.head.pair:
            case "selector":
                return joint * above, None
            case "gated":
                gate = joint + F.linear(above, weight[:, self.head.hidden :])
                return gate.sigmoid() * above, None
        state = torch.zeros_like(above) if state is None else state
        whole = joint + F.linear(torch.cat([state, above], -1), weight[:, : 2 * self.rank])
        forget, candidate, output = whole.split(self.rank, -1)
        forget = forget.sigmoid()
        return output.tanh(), forget * state + (1 - forget) * candidate.tanh()


class LevelPairs:
    """Pairs of the blocks of one pass. Arguments as of TorchPairs.of."""

    def __init__(self, pairs: TorchPairs, which: Tensor, log_probs: Tensor, hidden: Tensor) -> None:
        self._pairs, self._log_probs, self._hidden = pairs, log_probs, hidden
        self._which, self._joint = which, pairs.joint(hidden)
        outside = (1.0 - log_probs.exp().sum(-1)).clamp_min(0.0) * (not pairs.top_k)
        self._others = outside.log().T.contiguous()

    def below(self, level: int, tokens: Tensor, state: Tensor | None) -> Below:
        """Return what may follow tokens int[R,n] above places of that level.

        state  of the nodes above the tokens, [R,n,r]; None at level 0
        """
        pairs, place = self._pairs, slice(level, level + 1)
        hidden, above = self._hidden[:, place], pairs.rows_above(tokens)
        joint = None if self._joint is None else self._joint[:, place]
        v, state = pairs.bias_rows(joint, above, state)
        rows = pairs.rows_of(self._which[:, level])
        bias = torch.bmm(v.to(rows.dtype), rows.mT).float()
        scores = self._log_probs[:, place] + bias
        return Below(scores, self._others[level], pairs.sure(hidden, above), state)


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
        most = self._pairs.top_k or max(CANDIDATES, width)
        which, log_probs = likeliest(model.logits(read.flatten(0, 1)), most)
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
