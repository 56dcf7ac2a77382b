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

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from numpy.typing import ArrayLike
from torch import Tensor

from forerun.executors.torch.captured.buffers import Size
from forerun.executors.torch.captured.head_pass import HeadPass
from forerun.executors.torch.eagle_model import HeadArrays
from forerun.executors.torch.geometry import Geometry, tile_nodes, tiles_of
from forerun.executors.torch.kernels import Kernels
from forerun.executors.torch.kv import PagedCache
from forerun.executors.torch.layers import Heads, Rotary
from forerun.executors.torch.plain_round import (
    Accepted,
    Below,
    Extended,
    Facts,
    Levels,
    Prepared,
)
from forerun.interface.draft_model import CANDIDATES
from forerun.speculative.draft_tree import full_size


@dataclass(frozen=True, slots=True)
class Decided:
    """What a round knows when it has committed: its facts (buffers.py), the geometry of its step,
    and what plain_round.py says.
    """

    facts: Facts
    geometry: Geometry
    prepared: Prepared
    accepted: Accepted


class Drafting:
    """The head's part of a round. Between rounds it knows nothing of them."""

    def __init__(self, arrays: HeadArrays, kernels: Kernels, max_nodes: int) -> None:
        self._arrays, self._kernels, self._max_nodes = arrays, kernels, max_nodes
        self._head = arrays.module.head
        self._pass = HeadPass(arrays, kernels.parts)
        self._gqa_group = self._head.heads // self._head.kv_heads
        self._forests: dict[Size, _Forest] = {}

    def fits(self, size: Size) -> bool:
        """Whether there is scratch for the nodes that run, and a child for every place."""
        run = size.rows * max(size.levels - 1, 0) * size.width
        return run <= self._max_nodes and size.width <= self._head.vocab

    # --- launches only: no shape and no branch depends on a value ---------------------------

    def work(self, size: Size, decided: Decided, features: Tensor, grown: Tensor) -> Tensor | None:
        """Fill `grown` int32[3*R*K]: tokens, parents and values' bits of the trees. Returns, where
        grammars hold rows, int32[2*R*CANDIDATES]: ids and bits of log-probabilities of what may
        follow the roots.
        """
        if size not in self._forests:
            device = decided.accepted.choices.device
            self._forests[size] = _Forest(size, self._gqa_group, self._arrays.cache, device)
        forest = self._forests[size]
        below = self._extend(forest, decided, features)
        self._grow(forest, decided, below, grown.view(3, size.rows, -1))
        return self._candidates(below.read) if size.masked else None

    def _extend(self, forest: "_Forest", decided: Decided, features: Tensor) -> Below:
        """Run every node and make the accepted ones permanent.

        Also in rows that are not followed: what it writes there lies behind all that counts, and
        whoever extends them later writes it anew.
        """
        arrays, kernels, size = self._arrays, self._kernels, forest.size
        prepared, accepted = decided.prepared, decided.accepted
        geometry = replace(decided.geometry, tiles=forest.tiles, tile=forest.tile)
        read, outputs = self._pass(
            accepted.choices.clamp_min(0),
            self._pass.enter(features),
            self._turned(prepared.position),
            lambda heads: self._attend(heads, prepared.slots, geometry),
        )
        if size.nodes > 1:
            kernels.move(arrays.cache, prepared.slots, prepared.pages, accepted.kept.flatten())
        extended = Extended(read, outputs, arrays.outputs, self._max_nodes)
        return kernels.follow(extended, accepted, prepared, decided.facts, forest.levels)

    def _grow(self, forest: "_Forest", decided: Decided, below: Below, grown: Tensor) -> None:
        """Full trees below the rows' new ends, into grown int32[3,R,K]."""
        arrays, kernels, size = self._arrays, self._kernels, forest.size
        width, rows = size.width, size.rows

        def hang(level: int, read: Tensor, chosen: Tensor | None) -> None:
            logits, noise = self._pass.logits(read), below.noise[level]
            kernels.grow(logits, arrays.ids, noise, forest.levels, level, grown, chosen)

        hang(0, below.read, None)
        if size.levels == 1:
            return
        cos, sin = self._turned(below.position.flatten())
        rotary = zip(cos.split(rows * width), sin.split(rows * width), strict=True)
        hidden = below.hidden  # Of what is above the newest level.
        if width > 1:
            hidden = hidden[:, None].expand(-1, width, -1).reshape(rows * width, -1)
        forest.begin(arrays.cache.page_size, decided.facts["table"], below.kv_len)
        for level, turned in enumerate(rotary, 1):
            chosen = forest.frontier(grown, level)
            if level > 1 and chosen is not None:
                hidden = _of_rows(hidden.view(rows, width, -1), chosen // width).flatten(0, 1)
                forest.descend(chosen // width)
            read, hidden = self._pass(
                forest.tokens(grown, level, chosen),
                hidden,
                turned,
                partial(self._attend_level, forest=forest, level=level - 1),
            )
            hang(level, read, chosen)

    def _turned(self, position: Tensor) -> Rotary:
        rope = self._head.rope
        return self._kernels.rotation(position, self._arrays.turning, rope.attention_factor)

    def _attend(self, heads: Heads, slots: Tensor, geometry: Geometry) -> Tensor:
        held = self._arrays.cache.of_layer(0)
        queries = self._kernels.enter(heads, held, slots)
        return self._kernels.attend(queries, *held, geometry)

    def _attend_level(self, heads: Heads, forest: "_Forest", level: int) -> Tensor:
        """As if all levels stood there, but only this one's nodes ask."""
        return self._attend(heads, forest.slots[level], forest.geometry(level))

    def _candidates(self, read: Tensor) -> Tensor:
        """int32[2*R*CANDIDATES]."""
        logits = self._pass.logits(read).float()
        best, which = logits.topk(min(CANDIDATES, self._head.vocab), -1)
        missing = (0, CANDIDATES - which.shape[1])
        ids = F.pad(self._arrays.ids[which], missing)
        log_probs = best - logits.logsumexp(-1, keepdim=True)
        log_probs = F.pad(log_probs, missing, value=-torch.inf)
        return torch.cat([ids.flatten(), log_probs.flatten().view(torch.int32)])


def _of_rows(tensor: Tensor, which: Tensor) -> Tensor:
    """[R,n,H]: nodes which int64[R,n] of tensor [R,m,H]."""
    return tensor.gather(1, which[..., None].expand(-1, -1, tensor.shape[-1]))


class _Forest:
    """The fixed tensors of one size, and the trees' state while they grow.

    The nodes that run are those of all levels but the last, [R, levels - 1, width].
    """

    def __init__(self, size: Size, gqa_group: int, cache: PagedCache, device: torch.device) -> None:
        self.size, count, width = size, max(size.levels - 1, 1), size.width
        self.shape = size.rows, count, width
        self.levels = Levels(size.levels, width)

        def there(array: ArrayLike) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)

        start = np.arange(size.rows + 1, dtype=np.int32) * np.int32(size.nodes)
        self.tile = tile_nodes(size.nodes, gqa_group)
        self.tiles = there(tiles_of(start, self.tile))
        self._start = there(np.arange(size.rows + 1) * count * width)
        self._tile = tile_nodes(width, gqa_group)
        nodes = np.arange(size.rows * count * width).reshape(self.shape)
        self._slots = there(cache.scratch_begin + nodes.ravel())
        # Of each level: its nodes, their slots, and tiles of them.
        self._asking = [there(nodes[:, level].ravel()) for level in range(count)]
        self.slots = [
            there(cache.scratch_begin + nodes[:, level].ravel()) for level in range(count)
        ]
        self._tiles = [
            there([
                (row, nodes[row, level, first], row * width + first)
                for row in range(size.rows)
                for first in range(0, width, self._tile)
            ])
            for level in range(count)
        ]  # fmt: skip
        # Of a level that asks: its own nodes see themselves, later ones are seen by nobody.
        self._places = torch.arange(width, dtype=torch.int32, device=device)
        self._everyone = torch.arange(width, device=device).expand(size.rows, -1)
        own = np.broadcast_to([np.arange(width), np.arange(1, width + 1)], (size.rows, 2, width))
        later = np.full((size.rows, 2, count, width), width)
        later[:, :, 0] = own
        self._own = there(later.transpose(1, 0, 2, 3))
        # In a chain whoever came before is above.
        ones = np.ones(size.rows * count)
        self._chain = [
            there(np.stack([np.tile(np.arange(count) > level, size.rows), ones]))
            for level in range(count)
        ]

    def begin(self, page_size: int, table: Tensor, kv_len: Tensor) -> None:
        """Roots are known: nothing has run."""
        # Of the newest level's nodes, who is above them in each level before: int64[R,.,width].
        self._above = self._everyone.new_zeros(self.size.rows, 0, self.size.width)
        self._geometry = Geometry(
            start=self._start,
            slots=self._slots,
            kv_len=kv_len,
            table=table,
            tree_intervals=self._own,
            tiles=self._tiles[0],
            tile=self._tile,
            page_size=page_size,
            asking=self._asking[0],
        )

    def frontier(self, grown: Tensor, level: int) -> Tensor | None:
        """int64[R,width]: which of the level before are the best, ascending; None in a chain."""
        width = self.size.width
        if width == 1:
            return None
        if level == 1:
            return self._everyone
        newest = slice(full_size(width, level - 1), full_size(width, level))
        values = grown[2].view(torch.float32)[:, newest]
        best = values.sort(dim=1, descending=True, stable=True).indices[:, :width]
        return best.sort(dim=1).values

    def tokens(self, grown: Tensor, level: int, chosen: Tensor | None) -> Tensor:
        """int32[R*width] tokens of the nodes that a level runs."""
        begin = full_size(self.size.width, level - 1)
        if chosen is None:
            return grown[0, :, begin].contiguous()
        return grown[0].gather(1, begin + chosen).flatten()

    def descend(self, parents: Tensor) -> None:
        """The newest level's nodes hang below `parents` int64[R,width] of the one before."""
        above = self._above.gather(2, parents[:, None].expand(-1, self._above.shape[1], -1))
        self._above = torch.cat([above, parents[:, None]], 1)

    def geometry(self, level: int) -> Geometry:
        """For a level that asks."""
        levels = self.shape[1]
        if self.size.width == 1:
            intervals = self._chain[level]
        else:
            above = self._above[..., None, :]
            places = self._places[:, None]
            enter, leave = ((above < places).sum(-1), (above <= places).sum(-1))
            earlier = torch.stack([enter, leave]).int()
            intervals = torch.cat([earlier, self._own[:, :, : levels - level]], 2).view(2, -1)
        return replace(
            self._geometry,
            tree_intervals=intervals,
            tiles=self._tiles[level],
            asking=self._asking[level],
        )
