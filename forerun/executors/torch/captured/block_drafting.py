"""What a block drafter does at the end of a captured round: store the accepted nodes' features,
propose one block below every row's new end, and grow the best paths of its marginals.

    round      ... -> walk -> move pages -> keys and values -> one pass -> level by level -> record

The trees are those of forerun.speculative.draft_tree.block_draft as far as a full tree holds them:
no child is worth more than its path, so the best `width` squared nodes of each
level are enough unless more draft tokens than that are verified.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.attention.geometry import Geometry
from forerun.executors.torch.attention.kv import int32s
from forerun.executors.torch.captured.drafting import Drafting
from forerun.executors.torch.captured.entries import CommittedRound
from forerun.executors.torch.drafts.block import TorchBlockModel
from forerun.executors.torch.sizes import Record, Size, tile_nodes, tiles_of
from forerun.executors.torch.triton.kernels import Kernels
from forerun.executors.torch.triton.round_types import Extended, Levels, TreeStarts
from forerun.speculative.tree import full_size


class BlockDrafting(Drafting):
    """The block drafter's part of a round."""

    _model: TorchBlockModel

    def __init__(
        self, model: TorchBlockModel, kernels: Kernels, max_nodes: int, slots: int
    ) -> None:
        super().__init__(kernels, max_nodes)
        self._model = model
        # Nothing but keys and values goes from one step to the next.
        self._nothing = torch.zeros(max_nodes + slots + 1, 0, device=model.ids.device)
        self._blocks: dict[Size, _Blocks] = {}

    def fits(self, size: Size) -> bool:
        """Return whether there is scratch for the blocks, and a child for every place."""
        run = size.rows * self._model.about.run(size.levels)
        return run <= self._max_nodes and size.width <= len(self._model.ids)

    # --- launches only: no shape and no branch depends on a value ---------------------------

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
        """Make keys and values of every node's features, and the accepted ones permanent; also in
        rows that are not followed (Drafting).
        """
        kernels, prepared, accepted = self._kernels, committed.prepared, committed.accepted
        rotary = self._rotary(prepared.position)[0]
        for layer, heads in enumerate(self._model.context(features, rotary)):
            kernels.enter(heads, self._model.cache.layers[layer], prepared.slots)
        if size.nodes > 1:
            self._move(prepared.slots, prepared.pages, accepted.kept.flatten())
        none = self._nothing[: size.total]
        extended = Extended(none, none, self._nothing, self._max_nodes)
        levels = Levels(size.levels, size.width)
        return kernels.follow(extended, accepted, prepared, committed.inputs, levels)

    def _propose(
        self, blocks: "_Blocks", committed: CommittedRound, starts: TreeStarts, roots: Tensor
    ) -> Tensor:
        """Return [R,levels,H], the output head's input, of blocks below roots int32[R,1]."""
        model, size = self._model, blocks.size
        position = (starts.kv_len[:, None] + blocks.places).flatten()
        attend = self._attend(blocks.slots, blocks.geometry(committed, starts, position))
        tokens = torch.cat([roots, blocks.masks], 1)
        read = model.forward(tokens, self._rotary(position)[0], attend)
        return model.read_at(read, size.levels)

    def _grow(
        self, size: Size, starts: TreeStarts, roots: Tensor, read: Tensor, record: Record
    ) -> Tensor | None:
        """Write full trees into the record's `grown`. Returns what Drafting.work does."""
        grown = record.grown.view(3, size.rows, -1)
        rows, levels, width = size.rows, size.levels, size.width
        # The best of each depth, whatever stands above them.
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
    """Trees that grow into grown int32[3,R,K], between two levels.

    tokens, values  int[R,n] and float32[R,n] of the newest level's nodes, values of the paths down
                    to them; at first the roots, whose values are nothing
    state           [R,n,r] of what is above them, if anything is
    """

    def __init__(self, grown: Tensor, width: int, roots: Tensor) -> None:
        self.width, self.tokens = width, roots
        self.values: Tensor | None = None
        self.state: Tensor | None = None
        self._grown, self._whole = grown, grown[2].view(torch.float32)

    def add(self, level: int, tokens: Tensor, values: Tensor, state: Tensor | None = None) -> None:
        """Write the best `width` squared of the children [R,n,width] of the newest level, best
        first of each node, or [R,1,width] of every node; state: [R,n,r].
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
    """The fixed tensors of one size: of R blocks of P places.

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
        """Return the geometry of blocks at position int32[R*P], behind the rows' new ends."""
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
