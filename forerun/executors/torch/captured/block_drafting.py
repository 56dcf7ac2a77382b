"""The work of a block drafter at the end of a captured round: it stores the accepted nodes'
features, proposes one block below every row's new end, and builds trees of the most probable paths.

    round      ... -> walk -> move pages -> keys and values -> one pass -> level by level -> record

The trees are those of forerun.speculative.draft_tree.block_draft as far as a full tree has room for
them: no child's value exceeds its path's, so the best `width` squared nodes of each level are
enough unless more draft tokens than that are verified.

If tokens depend on the previous ones, or the drafter has a confidence (DSpark, DFlash2), all places
of the block are scored in one pass, and level by level each node's candidates are chosen depending
on the tokens above it: the computation of executors/pair_scores.py, for all nodes of a level at
once.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.pair_scores import PairScores
from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.attention.geometry import Geometry
from forerun.executors.torch.attention.kv import int32s
from forerun.executors.torch.captured.drafting import Drafting, LevelDrafting, padded
from forerun.executors.torch.captured.entries import CommittedRound
from forerun.executors.torch.drafts.block import TorchBlockModel
from forerun.executors.torch.drafts.level_model import LevelModel, likeliest
from forerun.executors.torch.memory import check_fits
from forerun.executors.torch.sizes import Record, Size, tile_nodes, tiles_of
from forerun.executors.torch.triton.kernels import Kernels
from forerun.executors.torch.triton.round_types import Extended, Levels, TreeStarts
from forerun.interface.draft_model import CANDIDATES
from forerun.interface.executor import ExecutorLimits
from forerun.speculative.tree import full_size
from forerun.types import Floats


class BlockDrafting(Drafting):
    """Drafts with a block drafter at the end of a captured round, in tensors of fixed shapes."""

    _model: TorchBlockModel

    def __init__(
        self, model: TorchBlockModel, kernels: Kernels, max_nodes: int, slots: int
    ) -> None:
        super().__init__(kernels, max_nodes)
        self._model = model
        # Only keys and values are passed from one step to the next.
        self._nothing = torch.zeros(max_nodes + slots + 1, 0, device=model.ids.device)
        self._blocks: dict[Size, _Blocks] = {}

    def fits(self, size: Size) -> bool:
        """Return whether the blocks fit into scratch, and every place has enough candidates."""
        run = size.rows * self._model.about.run(size.levels)
        return run <= self._max_nodes and size.width <= len(self._model.ids)

    # --- asynchronous: no shape and no branch depends on a value ---------------------------

    def work(
        self, size: Size, committed: CommittedRound, features: Tensor | None, record: Record
    ) -> Tensor | None:
        """Implement Drafting.work. Needs features [M,F*H] of the step."""
        assert features is not None, "the traits ask for features"
        if size not in self._blocks:
            self._blocks[size] = _Blocks(size, self._model)
        blocks = self._blocks[size]
        starts, accepted = self._extend(size, committed, features), committed.accepted
        choices = accepted.choices.view(size.rows, -1)
        roots = choices.gather(1, accepted.last[:, None].long()).clamp_min(0)
        read = self._propose(blocks, committed, starts, roots)
        return self._grow(size, starts, roots, read, record)

    def _extend(self, size: Size, committed: CommittedRound, features: Tensor) -> TreeStarts:
        """Compute keys and values of every node's features, and make those of accepted nodes
        permanent; also in rows that the draft model does not follow (Drafting).
        """
        kernels, prepared, accepted = self._kernels, committed.prepared, committed.accepted
        rotary = self._rotary(prepared.position)[0]
        for layer, heads in enumerate(self._model.context(features, rotary)):
            kernels.enter(heads, self._model.cache.layers[layer], prepared.slots)
        if size.nodes > 1:
            self._move(prepared.slots, prepared.pages, accepted.on_path.flatten())
        none = self._nothing[: size.total]
        extended = Extended(none, none, self._nothing, self._max_nodes)
        levels = Levels(size.levels, size.width)
        return kernels.follow(extended, accepted, prepared, committed.inputs, levels)

    def _propose(
        self, blocks: "_Blocks", committed: CommittedRound, starts: TreeStarts, roots: Tensor
    ) -> Tensor:
        """Return [R,levels,H], the output head's input, for blocks below the roots int32[R,1]."""
        model, size = self._model, blocks.size
        position = (starts.kv_len[:, None] + blocks.places).flatten()
        attend = self._attend(blocks.slots, blocks.geometry(committed, starts, position))
        tokens = torch.cat([roots, blocks.masks], 1)
        read = model.forward(tokens, self._rotary(position)[0], attend)
        return model.read_at(read, size.levels)

    def _grow(
        self, size: Size, starts: TreeStarts, roots: Tensor, read: Tensor, record: Record
    ) -> Tensor | None:
        """Write full trees to the record's `grown`. Returns the result of Drafting.work."""
        grown = record.grown.view(3, size.rows, -1)
        rows, levels, width = size.rows, size.levels, size.width
        # The best of each depth, whatever is above them.
        candidates = grown.new_empty(3, rows * levels, width)
        logits = self._model.logits(read.flatten(0, 1))
        noise, places = starts.noise[0], torch.arange(levels, device=grown.device)
        of_depths = NodeNoise(
            noise.seeds.repeat_interleave(levels),
            (noise.positions[:, None] + places).flatten().to(noise.positions.dtype),
            noise.temperatures.repeat_interleave(levels),
        )
        self._kernels.grow(
            logits, self._model.ids, of_depths, Levels(1, width), 0, candidates, None
        )
        tokens, _, worth = candidates.view(3, rows, levels, 1, width)
        values, growing = worth.view(torch.float32), Growing(grown, width, roots)
        for level in range(levels):
            growing.add(level, tokens[:, level], values[:, level])
        return self._candidates(read[:, 0]) if size.masked else None


class Growing:
    """Trees in grown int32[3,R,K], while they are built level by level.

    tokens, values  int[R,n] and float32[R,n]: tokens of the newest level's nodes, and values of the
                    paths to them; at first the roots, whose values are 0
    state           [R,n,r] of the nodes above, if the pair scores have any
    """

    def __init__(self, grown: Tensor, width: int, roots: Tensor) -> None:
        self.width, self.tokens = width, roots
        self.values: Tensor | None = None
        self.state: Tensor | None = None
        self._grown, self._whole = grown, grown[2].view(torch.float32)

    def add(self, level: int, tokens: Tensor, values: Tensor, state: Tensor | None = None) -> None:
        """Write the best `width` squared of the children [R,n,width] of the newest level, best
        first for each node, or [R,1,width] for every node; state: [R,n,r].
        """
        width, begin = self.width, full_size(self.width, level)
        if self.values is None:
            self.tokens, self.values, parents, above = tokens[:, 0], values[:, 0], None, -1
        else:
            paths = self.values[..., None] + values
            tokens, paths = tokens.expand_as(paths).flatten(1), paths.flatten(1)
            order = paths.sort(dim=1, descending=True, stable=True).indices[:, : width * width]
            parents, above = order // width, full_size(width, level - 1)
            self.tokens, self.values = tokens.gather(1, order), paths.gather(1, order)
        place = slice(begin, begin + self.tokens.shape[1])
        self._grown[0, :, place] = self.tokens
        self._grown[1, :, place] = above if parents is None else parents + above
        self._whole[:, place] = self.values
        if state is not None and parents is not None:
            state = state.gather(1, parents[..., None].expand(-1, -1, state.shape[-1]))
        elif state is not None:
            state = state.expand(-1, width, -1)
        self.state = state


class _Blocks:
    """The fixed tensors of one size: R blocks of P places.

    places  int32[P]
    masks   int32[R,P-1]
    slots   int32[R*P] scratch
    """

    def __init__(self, size: Size, model: TorchBlockModel) -> None:
        device, about = model.ids.device, model.about
        count = about.run(size.levels)
        self.size, self._cache, self._both_ways = size, model.cache, not about.causal

        there = partial(int32s, device=device)

        start = np.arange(size.rows + 1, dtype=np.int32) * np.int32(count)
        place = np.tile(np.arange(count), size.rows)
        self._start, self._tile = there(start), tile_nodes(count, model.gqa_group)
        self._tiles = there(tiles_of(start, self._tile))
        # A causal place sees those before it, any other all of its block.
        enter = place if about.causal else np.zeros_like(place)
        self._tree_intervals = there([enter, np.full_like(place, count)])
        self.places, self.masks = (
            there(np.arange(count)),
            there(np.full((size.rows, count - 1), max(about.mask, 0))),
        )
        self.slots = there(model.cache.scratch_begin + np.arange(len(place)))

    def geometry(self, committed: CommittedRound, starts: TreeStarts, position: Tensor) -> Geometry:
        """Return the geometry of blocks at positions int32[R*P], after the rows' new ends."""
        return Geometry(
            start=self._start,
            slots=self.slots,
            kv_len=starts.kv_len,
            table=committed.inputs["table"],
            tree_intervals=self._tree_intervals,
            tiles=self._tiles,
            tile=self._tile,
            page_size=self._cache.page_size,
            both_ways=self._both_ways,
            position=position if self._cache.partial else None,
        )


@dataclass(frozen=True, slots=True)
class Below:
    """Scores of the tokens that can follow n nodes of a level in each of R rows.

    scores      float32[R,n,K] of the level's candidates
    others      float32[R] of all other tokens together; -inf: none may follow
    confidence  float32[R,n] in the best candidate; None: the drafter has none
    state       float32[R,n,r] for the nodes below; None: there is none
    """

    scores: Tensor
    others: Tensor
    confidence: Tensor | None
    state: Tensor | None


class TorchPairs:
    """A drafter's tables, in `dtype`, and its matrices.

    before, after  rows [V,r] of previous tokens, and [Vd,r] of candidates
    rank   r
    top_k  candidates of each place, the best; 0 = the whole draft vocabulary
    """

    def __init__(self, scores: PairScores, device: torch.device, dtype: torch.dtype) -> None:
        head = self.head = scores.head
        self.rank, self.top_k = head.rank, head.top_k
        self.confident = head.confidence > 0

        def there(values: Floats) -> Tensor:
            return torch.from_numpy(np.array(values)).to(device)

        self.before, self.after = (there(part).to(dtype) for part in scores.tables())
        self._joint, self._sure = (
            None if each is None else (there(each.weight), there(each.bias))
            for each in (scores.joint, scores.confidence)
        )

    def joint(self, hidden: Tensor) -> Tensor | None:
        """Return the part of the joint product that depends on hidden float32[.,H]; None without
        one.
        """
        if self._joint is None:
            return None
        weight, bias = self._joint
        begin = 2 * self.rank if self.head.pair == "rnn" else 0
        return F.linear(hidden, weight[:, begin : begin + self.head.hidden], bias)

    def sure(self, hidden: Tensor, above: Tensor) -> Tensor | None:
        """Return float32[R,n], the confidence at places with hidden state float32[R,1,H], below
        tokens with rows `above` float32[R,n,r].
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
        """Return v float32[R,n,r] (pair_scores.py), and the state for the nodes below.

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
    """Pair scores of the blocks of one pass.

    which      int64[R,levels,K] candidates, draft ids, best first
    log_probs  float32[R,levels,K] before the bias of the previous token
    hidden     float32[R,levels,H] after the final norm
    """

    def __init__(self, pairs: TorchPairs, which: Tensor, log_probs: Tensor, hidden: Tensor) -> None:
        self._pairs, self._log_probs, self._hidden = pairs, log_probs, hidden
        self._which, self._joint = which, pairs.joint(hidden)
        outside = (1.0 - log_probs.exp().sum(-1)).clamp_min(0.0) * (not pairs.top_k)
        self._others = outside.log().T.contiguous()

    def below(self, level: int, tokens: Tensor, state: Tensor | None) -> Below:
        """Return the scores of the tokens that can follow tokens int[R,n], at places of that level.

        state  of the nodes above the tokens, [R,n,r]; None at level 0
        """
        pairs, place = self._pairs, slice(level, level + 1)
        hidden, above = self._hidden[:, place], F.embedding(tokens, pairs.before).float()
        joint = None if self._joint is None else self._joint[:, place]
        v, state = pairs.bias_rows(joint, above, state)
        rows = F.embedding(self._which[:, level], pairs.after)
        bias = torch.bmm(v.to(rows.dtype), rows.mT).float()
        scores = self._log_probs[:, place] + bias
        return Below(scores, self._others[level], pairs.sure(hidden, above), state)


TENTHS = 10


class PairDrafting(BlockDrafting):
    """The work in a round of a block drafter with pair scores.

    scores  its tables and matrices, loaded by the constructor
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
        start[1] = 1.0  # Identity until outcomes are counted.
        self._chances = start

    def fits(self, size: Size) -> bool:
        """Return whether the blocks fit into scratch, and every place has enough candidates."""
        return super().fits(size) and size.width <= (self._pairs.top_k or size.width)

    def calibrate(self, chances: Floats) -> None:
        """Use OnDeviceDraftSpec.chances from the next round on."""
        there = torch.from_numpy(chances)
        self._chances[:, :, : there.shape[2]].copy_(there)

    # --- asynchronous: no shape and no branch depends on a value ---------------------------

    def _grow(
        self, size: Size, starts: TreeStarts, roots: Tensor, read: Tensor, record: Record
    ) -> Tensor | None:
        rows, width = size.rows, size.width
        model, grown = self._model, record.grown.view(3, rows, -1)
        most = self._pairs.top_k or max(CANDIDATES, width)
        which, log_probs = likeliest(model.logits(read.flatten(0, 1)), most)
        places = (rows, size.levels, -1)
        which, log_probs = which.view(places), log_probs.view(places)
        pairs = LevelPairs(self._pairs, which, log_probs, read.float())
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
        """Write one level of the trees, the best `width` squared of all children; ids int32[R,K]:
        its candidates.
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
        """Return values float32[R,n,width], of which the best is the acceptance probability for its
        confidence float32[R,n], and the others keep their ratios to it; sampled: bool[R].
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
    """Return the Drafting for this model. limits: the target's, whose scratch bounds the nodes that
    run at once.
    """
    if not isinstance(model, TorchBlockModel):
        return LevelDrafting(model, kernels, limits.max_nodes)
    if model.pairs is not None:
        return PairDrafting(model, model.pairs, kernels, limits)
    return BlockDrafting(model, kernels, limits.max_nodes, limits.slots)
