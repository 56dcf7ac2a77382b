"""What a draft head does at the end of a captured round: follow the target, grow the next trees.

    round      ... -> walk -> move pages -> extend -> level 1 -> level 2 -> ... -> record
    per slot                                  '-> the last output, for passes that the host asks for

The arithmetic is that of forerun.drafters.model_drafter and forerun.speculative.draft_tree, in
fixed shapes and with nothing that waits: what the host decides by looking is sorted, gathered or
masked here.

The extension runs the head over *all* nodes of the step, in the target's own geometry: node n
pairs its features with the target's choice there, so along the accepted path stand exactly the
tokens that follow. What is not on it is computed for nothing and left in scratch.

A level's nodes are queries, and all levels so far are keys: a row's run nodes lie side by side in
scratch, `width` per level. Level by level they are in the order of their parents, so those below
any node are neighbours; that makes `enter` and `leave` (geometry.py) two counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from numpy.typing import ArrayLike
from torch import Tensor

from forerun.executors.torch.accept import Likely, NodeNoise
from forerun.executors.torch.captured.buffers import Size
from forerun.executors.torch.eagle_model import HeadArrays
from forerun.executors.torch.geometry import Geometry, tile_nodes, tiles_of
from forerun.executors.torch.kernels import Kernels
from forerun.executors.torch.layers import rotation
from forerun.interface.draft_model import CANDIDATES
from forerun.speculative.draft_tree import full_size


@dataclass(frozen=True, slots=True)
class Decided:
    """What a round knows when it has committed.

    buffers   buffers.py
    geometry  of the step
    noise     of every row's root, [R]
    choices   int32[R*N] of all nodes
    kept      bool[R,N] nodes on an accepted path
    position  int32[R*N]; slot int64[R*N] where it is in pages
    """

    buffers: dict[str, Tensor]
    geometry: Geometry
    noise: NodeNoise
    choices: Tensor
    kept: Tensor
    position: Tensor
    slot: Tensor


@dataclass(frozen=True, slots=True)
class _Below:
    """Where a tree starts: of every row, the end of what was extended.

    read, hidden  [R,H] what the output head reads there, and what a next step receives
    kv_len        int32[R] cached draft positions
    noise         of the position that a child of it takes
    """

    read: Tensor
    hidden: Tensor
    kv_len: Tensor
    noise: NodeNoise


class Drafting:
    """The head's part of a round. Between rounds it knows nothing of them."""

    def __init__(self, arrays: HeadArrays, kernels: Kernels, max_nodes: int) -> None:
        self._arrays, self._kernels, self._max_nodes = arrays, kernels, max_nodes
        self._head = arrays.module.head
        self._gqa_group = self._head.heads // self._head.kv_heads
        self._forests: dict[Size, _Forest] = {}

    def fits(self, size: Size) -> bool:
        """Whether there is scratch for the nodes that run, and a child for every place."""
        run = size.rows * max(size.levels - 1, 0) * size.width
        return run <= self._max_nodes and size.width <= self._head.vocab

    # --- launches only: no shape and no branch depends on a value ---------------------------

    def work(self, size: Size, decided: Decided, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """int32[3*R*K]: tokens, parents and values' bits of the trees; and where grammars hold rows
        int32[2*R*CANDIDATES]: ids and bits of log-probabilities of what may follow the roots.
        """
        if size not in self._forests:
            self._forests[size] = _Forest(size, self._gqa_group, decided.choices.device)
        forest = self._forests[size]
        below = self._extend(forest, decided, features)
        tokens, parents, values = self._grow(forest, decided, below)
        grown = torch.cat([tokens.int(), parents.int(), values.view(torch.int32)]).flatten()
        return grown, self._candidates(below.read) if size.masked else None

    def _extend(self, forest: "_Forest", decided: Decided, features: Tensor) -> _Below:
        """Run every node, make the accepted ones permanent in rows that are followed."""
        arrays, size, buffers = self._arrays, forest.size, decided.buffers
        cache = arrays.cache
        geometry = replace(
            decided.geometry, tiles=forest.tiles, tile=forest.tile, scratch=cache.scratch_begin
        )
        tokens = decided.choices.clamp_min(0).long()
        hidden = arrays.enter(features)
        read, outputs = self._pass(
            tokens, hidden, decided.position, lambda q, k, v: self._attend(q, k, v, geometry)
        )
        extends = buffers["draft_slot"] >= 0
        kept = (decided.kept & extends[:, None]).flatten()
        scratch = cache.scratch_begin + forest.nodes
        cache.move(scratch, torch.where(kept, decided.slot, scratch))
        depth = buffers["depth"].view(size.rows, size.nodes) + 1
        last = forest.first + (decided.kept * depth).argmax(1)
        count = decided.kept.sum(1, dtype=torch.int32)
        below = _Below(
            read=read[last],
            hidden=outputs[last],
            kv_len=buffers["kv_len"] + count,
            noise=decided.noise.at(forest.rows, count),
        )
        draft_slot = torch.where(
            extends, self._max_nodes + buffers["draft_slot"], len(arrays.outputs) - 1
        )
        arrays.outputs.index_copy_(0, draft_slot.long(), below.hidden)
        return below

    def _grow(
        self, forest: "_Forest", decided: Decided, below: _Below
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and values [R,K] of full trees below the rows' new ends."""
        size, width = forest.size, forest.size.width
        tokens, values = self._children(below.read, below.noise, width)
        values = values.clamp_max(0.0)
        grown = [(tokens, torch.full_like(tokens, -1), values)]
        hidden = below.hidden[:, None].expand(-1, width, -1)  # Of what is above the newest level.
        forest.begin(self._arrays, decided.buffers["table"], below.kv_len)
        for level in range(1, size.levels):
            chosen = forest.frontier(values)
            if level > 1 and width > 1:
                hidden = _of_rows(hidden, chosen // width)
                forest.descend(chosen // width)
            token, base = tokens.gather(1, chosen), values.gather(1, chosen)
            position = (below.kv_len + (level - 1)).repeat_interleave(width)
            read, outputs = self._pass(
                token.flatten().long(),
                hidden.reshape(len(position), -1),
                position,
                partial(self._attend_level, forest=forest, level=level - 1),
            )
            hidden = outputs.view(size.rows, width, -1)
            noise = below.noise.at(forest.rows.repeat_interleave(width), level)
            tokens, values = (
                each.view(size.rows, -1) for each in self._children(read, noise, width)
            )
            values = base.repeat_interleave(width, 1) + values.clamp_max(0.0)
            parents = full_size(width, level - 1) + chosen.repeat_interleave(width, 1)
            grown.append((tokens, parents, values))
        tokens, parents, values = (torch.cat(each, 1) for each in zip(*grown, strict=True))
        return tokens, parents, values

    def _pass(
        self,
        tokens: Tensor,
        hidden: Tensor,
        position: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        arrays = self._arrays
        cos, sin = rotation(position.long(), arrays.turning, self._head.rope.attention_factor)
        read, outputs = arrays.module(arrays.embed(tokens), hidden, cos, sin, attend)
        return read, outputs

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, geometry: Geometry) -> Tensor:
        # Turned by float32 angles, whatever the dtype.
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        held = self._arrays.cache.of_layer(0)
        self._kernels.write(keys, values, held, geometry.scratch)
        return self._kernels.attend(queries, *held, geometry)

    def _attend_level(
        self, queries: Tensor, keys: Tensor, values: Tensor, forest: "_Forest", level: int
    ) -> Tensor:
        """As if all levels asked, but only this one's tiles do."""
        whole = forest.put(level, queries.to(values.dtype), keys.to(values.dtype), values)
        context = self._attend(whole[0], whole[1], whole[2], forest.geometry(level))
        return context.view(*forest.shape, *context.shape[1:])[:, level].flatten(0, 1)

    def _children(self, read: Tensor, noise: NodeNoise, width: int) -> tuple[Tensor, Tensor]:
        return self._kernels.pick(self._likely(read, width), noise, width)

    def _likely(self, read: Tensor, width: int) -> Likely:
        logits = self._arrays.module.logits(read).float()
        best, which = logits.topk(min(max(CANDIDATES, width), self._head.vocab), -1)
        return Likely(best, which, logits.logsumexp(-1), self._arrays.ids)

    def _candidates(self, read: Tensor) -> Tensor:
        """int32[2*R*CANDIDATES]."""
        likely = self._likely(read, CANDIDATES)
        missing = (0, CANDIDATES - likely.which.shape[1])
        ids = F.pad(likely.ids[likely.which], missing)
        log_probs = F.pad(likely.logits - likely.normaliser[:, None], missing, value=-torch.inf)
        return torch.cat([ids.flatten(), log_probs.flatten().view(torch.int32)])


def _of_rows(tensor: Tensor, which: Tensor) -> Tensor:
    """[R,n,H]: nodes which int64[R,n] of tensor [R,m,H]."""
    return tensor.gather(1, which[..., None].expand(-1, -1, tensor.shape[-1]))


class _Forest:
    """The fixed tensors of one size, and the trees' state while they grow.

    The nodes that run are those of all levels but the last, [R, levels - 1, width].
    """

    def __init__(self, size: Size, gqa_group: int, device: torch.device) -> None:
        self.size, levels, width = size, max(size.levels - 1, 1), size.width
        self.shape = size.rows, levels, width

        def there(array: ArrayLike) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)

        start = np.arange(size.rows + 1, dtype=np.int32) * np.int32(size.nodes)
        self.tile = tile_nodes(size.nodes, gqa_group)
        self.tiles = there(tiles_of(start, self.tile))
        self.nodes = torch.arange(size.total, device=device)
        self.rows = torch.arange(size.rows, device=device)
        self.first = self.rows * size.nodes
        self._start = there(np.arange(size.rows + 1) * levels * width)
        self._tile = tile_nodes(width, gqa_group)
        self._tiles = [
            there([
                (row, (row * levels + level) * width + first)
                for row in range(size.rows)
                for first in range(0, width, self._tile)
            ])
            for level in range(levels)
        ]  # fmt: skip
        # Of a level that asks: its own nodes see themselves, later ones are seen by nobody.
        self._places = torch.arange(width, dtype=torch.int32, device=device)
        self._everyone = torch.arange(width, device=device).expand(size.rows, -1)
        own = np.broadcast_to([np.arange(width), np.arange(1, width + 1)], (size.rows, 2, width))
        later = np.full((size.rows, 2, levels, width), width)
        later[:, :, 0] = own
        self._own = there(later.transpose(1, 0, 2, 3))
        # In a chain whoever came before is above.
        ones = np.ones(size.rows * levels)
        self._chain = [
            there(np.stack([np.tile(np.arange(levels) > level, size.rows), ones]))
            for level in range(levels)
        ]

    def begin(self, arrays: HeadArrays, table: Tensor, kv_len: Tensor) -> None:
        """Roots are known: nothing has run."""
        head = arrays.module.head
        self._whole = [
            arrays.outputs.new_zeros(*self.shape, heads, head.head_size)
            for heads in (head.heads, head.kv_heads, head.kv_heads)
        ]
        # Of the newest level's nodes, who is above them in each level before: int64[R,.,width].
        self._above = self.rows.new_zeros(self.size.rows, 0, self.size.width)
        self._geometry = Geometry(
            start=self._start,
            kv_len=kv_len,
            table=table,
            tree_intervals=self._own,
            tiles=self._tiles[0],
            tile=self._tile,
            page_size=arrays.cache.page_size,
            scratch=arrays.cache.scratch_begin,
        )

    def frontier(self, values: Tensor) -> Tensor:
        """int64[R,width]: the best of the newest level, values [R,.], ascending."""
        width = self.size.width
        if values.shape[1] == width:
            return self._everyone
        best = values.sort(dim=1, descending=True, stable=True).indices[:, :width]
        return best.sort(dim=1).values

    def descend(self, parents: Tensor) -> None:
        """The newest level's nodes hang below `parents` int64[R,width] of the one before."""
        above = self._above.gather(2, parents[:, None].expand(-1, self._above.shape[1], -1))
        self._above = torch.cat([above, parents[:, None]], 1)

    def put(self, level: int, *parts: Tensor) -> list[Tensor]:
        """Queries, keys and values of all levels, as nodes, with this one's filled in."""
        for whole, part in zip(self._whole, parts, strict=True):
            whole[:, level] = part.unflatten(0, (self.size.rows, -1))
        return [whole.flatten(0, 2) for whole in self._whole]

    def geometry(self, level: int) -> Geometry:
        """For a level that asks."""
        levels = self.shape[1]
        if self.size.width == 1:
            return replace(
                self._geometry, tree_intervals=self._chain[level], tiles=self._tiles[level]
            )
        above = self._above[..., None, :]
        places = self._places[:, None]
        enter, leave = ((above < places).sum(-1), (above <= places).sum(-1))
        earlier = torch.stack([enter, leave]).int()
        tree_intervals = torch.cat([earlier, self._own[:, :, : levels - level]], 2)
        return replace(
            self._geometry, tree_intervals=tree_intervals.view(2, -1), tiles=self._tiles[level]
        )
