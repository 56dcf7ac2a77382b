"""Attention over pages and trees whose order of operations depends on positions alone.

Along its own path every node of a tree is an ordinary causal token: the key at position p is
the cached one, or that of its ancestor there. So a tree is read as a few *chains*, root to leaf,
and a node needs no tree mask: it attends to positions up to its own.

Keys are read in blocks of BLOCK consecutive positions, from position 0, and each node merges its
blocks in that order by online softmax (Milakov and Gimelshein, arXiv 1805.02867). The blocks, their
keys and the shape of every product depend only on the node's position; a block in which a node
attends to no key changes none of its bits (factor exp(0), addends 0). Hence a node's result has the
same bits alone and in a batch, in any tree, with pages of any size, in any chunks.

With a sliding window of w tokens a node at position p attends to keys at positions above p - w,
along its own path as in the prefix; blocks in which no node of a tile attends to a key are skipped.

    row     |<-------- cached: kv_len -------->| known | draft tokens
    blocks  |  0  |  1  |  2  |  3  |  4  |  5   ...
            '- full of cached keys: shared  -'  '- from here on: one copy per chain
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.executors.torch.attention.kv import CacheTensor, PagedCache, Slots, indices, read
from forerun.executors.torch.decoder.decoder import Attend
from forerun.executors.torch.decoder.elementwise import softcapped
from forerun.interface.plan import Plan
from forerun.networks.layer_spec import AttentionSpec
from forerun.speculative.tree import TreeBatch
from forerun.speculative.verify import positions
from forerun.types import AnyArray, Ints

BLOCK = 128
"""Keys of a block."""

TILE = 8
"""Nodes that read a block together. With BLOCK measured best over 1 to 512 nodes."""


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """The tiles that read keys at positions [i * BLOCK, (i + 1) * BLOCK), for one i.

    nodes   int64[t*TILE]    nodes of each tile, padded with M
    slots   int64[t*BLOCK]   slots of each tile's keys (see kv.py)
    hidden  bool[t,TILE,BLOCK]  keys masked from a node; None if there are none
    """

    nodes: Tensor
    slots: Tensor
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class Seen:
    """The range of key positions that each node attends to: first[m] to last[m], both included,
    int[M+1]; the last entry is padding. first None: all from position 0.
    """

    first: Slots | None
    last: Ints

    @staticmethod
    def of(
        position: Ints, window: int | None, begin: int = 0, last: AnyArray | None = None
    ) -> "Seen":
        """Return the ranges of the nodes at `position` int32[M]: no key before `begin` except the
        node's own, none after `last` int[M] (None: the node's own position). The padding entry
        attends to everything, which avoids a softmax over nothing.
        """
        last = np.append(position if last is None else last, np.iinfo(np.int32).max)
        if window is None and begin == 0:
            return Seen(None, last)
        first = np.minimum(position.astype(np.int64), begin)
        if window is not None:
            first = np.maximum(position.astype(np.int64) - window + 1, first)
        return Seen(np.append(first, 0), last)

    def first_block(self, nodes: Ints) -> int:
        """Return the number of the first block in which any of the nodes int32[n] attends to a
        key.
        """
        return 0 if self.first is None else int(self.first[nodes].min()) // BLOCK


@dataclass(frozen=True, slots=True)
class RowKeys:
    """One row of a pass and the keys that its nodes attend to, each up to its own position.

    nodes   int32[n]       flat nodes
    cached  int64[kv_len]  slots of the keys at positions 0, 1, ...; all nodes read these
    chains  (int64[.] slots of the keys at positions kv_len, ..., int32[.] nodes that read them):
            every node reads along exactly one chain
    """

    nodes: Ints
    cached: Slots
    chains: Iterable[tuple[Slots, Ints]]


class KeyBlocks:
    """The keys that the nodes of a pass attend to, for `attend`; the counterpart of a kernel's
    Geometry.

    slots  int64[M] where the nodes' own keys and values are written
    """

    def __init__(
        self,
        rows: list[RowKeys],
        slots: Slots,
        position: Ints,
        cache: PagedCache,
        *,
        begin: int = 0,
        last: AnyArray | None = None,
    ) -> None:
        """position: int32[M] of every flat node; begin: the first position, within the first block,
        that other nodes may attend to; last: int[M] the last position that each node attends to,
        None: its own.
        """
        self.slots = indices(slots, cache.device)
        self._rows, self._position, self._begin, self._last = rows, position, begin, last
        self._null, self._device = cache.null, cache.device
        self._made: dict[int | None, list[KeyBlock]] = {}

    @staticmethod
    def of(plan: Plan, trees: TreeBatch, places: Slots, cache: PagedCache) -> "KeyBlocks":
        """Return the key blocks of a target's step. places: int64[M], the slots of the nodes' keys
        and values (kv.py).
        """
        rows = [
            RowKeys(
                nodes=np.array(trees.nodes(row), np.int32),
                cached=cache.slots_of(plan.page_table, row, np.arange(int(plan.kv_len[row]))),
                chains=[(places[chain], nodes) for chain, nodes in chains(trees, row)],
            )
            for row in range(plan.rows)
        ]
        return KeyBlocks(rows, places, positions(trees, plan.kv_len), cache)

    def within(self, window: int | None) -> list[KeyBlock]:
        """Return all blocks by ascending position for layers with this window, in tokens; None:
        every node attends to all positions before it.
        """
        if window not in self._made:
            seen = Seen.of(self._position, window, self._begin, self._last)
            tiles: dict[int, list[tuple[Ints, Slots]]] = defaultdict(list)
            for row in self._rows:
                for block, nodes, slots in _row_tiles(row, seen, self._null):
                    tiles[block].append((nodes, slots))
            made = [_stacked(block, tiles[block], seen, self._device) for block in sorted(tiles)]
            self._made[window] = made
        return self._made[window]


def _stacked(
    block: int, tiles: list[tuple[Ints, Slots]], seen: Seen, device: torch.device
) -> KeyBlock:
    nodes = np.full((len(tiles), TILE), len(seen.last) - 1, np.int64)
    for line, (members, _) in zip(nodes, tiles, strict=True):
        line[: len(members)] = members
    keys = block * BLOCK + np.arange(BLOCK)
    hidden = keys > seen.last[nodes][:, :, None]
    if seen.first is not None:
        hidden |= keys < seen.first[nodes][:, :, None]
    return KeyBlock(
        nodes=torch.from_numpy(nodes.ravel()).to(device),
        slots=torch.from_numpy(np.concatenate([slots for _, slots in tiles])).to(device),
        hidden=torch.from_numpy(hidden).to(device) if hidden.any() else None,
    )


def _row_tiles(row: RowKeys, seen: Seen, null: int) -> Iterator[tuple[int, Ints, Slots]]:
    """Yield (block, at most TILE nodes, BLOCK slots) for all keys that the nodes of one row attend
    to.
    """
    full = len(row.cached) // BLOCK
    for nodes in _tiles(row.nodes):
        for block in range(seen.first_block(nodes), full):
            yield block, nodes, row.cached[block * BLOCK : (block + 1) * BLOCK]
    for chain, readers in row.chains:
        slots = np.concatenate([row.cached[full * BLOCK :], chain])
        slots = np.pad(slots, (0, -len(slots) % BLOCK), constant_values=null)
        for nodes in _tiles(readers):
            last = int(seen.last[nodes].max()) // BLOCK
            for block in range(max(full, seen.first_block(nodes)), last + 1):
                begin = (block - full) * BLOCK
                yield block, nodes, slots[begin : begin + BLOCK]


def _tiles(nodes: Ints) -> list[Ints]:
    return [nodes[begin : begin + TILE] for begin in range(0, len(nodes), TILE)]


def chains(trees: TreeBatch, row: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield paths of flat nodes from the row's first node to each leaf, and the nodes that read
    along each: (chain, readers).

    Every node reads along exactly one chain that contains it.
    """
    root, end = trees.root(row), int(trees.start[row + 1])
    known = np.arange(trees.start[row], root + 1, dtype=np.int32)
    inner = set(trees.parents[root + 1 : end].tolist()) | {-1}
    read: set[int] = set()
    for leaf in range(root, end):
        if leaf in inner:
            continue
        draft_tokens: list[int] = []
        node = leaf
        while node > root:
            draft_tokens.append(node)
            node = int(trees.parents[node])
        chain = np.concatenate([known, np.array(draft_tokens[::-1], np.int32)])
        readers = chain if not read else np.array([n for n in chain if n not in read], np.int32)
        read.update(chain.tolist())
        yield chain, readers


def attend(
    queries: Tensor,
    keys: CacheTensor,
    values: CacheTensor,
    seen: KeyBlocks,
    spec: AttentionSpec | None = None,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output [M,A,E] of queries [M,A,E] over one layer's keys and values; for
    latent attention [M,A,rank].

    The step's own keys and values must already be in their slots. Queries that are in no block,
    which are padding, get zeros.

    spec   how scores are computed; None: scaled by 1/sqrt(E), no window
    sinks  float32[A]: a score of each head that has no value
    """
    count, heads, size = queries.shape
    groups, value_size = len(keys), values.shape[-1]
    spec = spec or AttentionSpec(size**-0.5)
    running = _Running(queries, groups, value_size, sinks)
    query = queries.new_zeros(groups, count + 1, heads // groups, size)
    query[:, :count] = (queries * spec.scale).unflatten(1, (groups, -1)).transpose(0, 1)
    for block in seen.within(spec.window):
        tiles = len(block.nodes) // TILE
        # Batched products of one fixed shape: a tile's queries of a group by a block's keys.
        tile = query.index_select(1, block.nodes).view(groups * tiles, -1, size)
        key, value = (
            read(cached, block.slots).to(queries.dtype).reshape(-1, BLOCK, width)
            for cached, width in ((keys, size), (values, value_size))
        )
        scores = softcapped(torch.bmm(tile, key.transpose(1, 2)).float(), spec.softcap)
        scores = scores.view(groups, tiles, TILE, -1, BLOCK)
        if block.hidden is not None:
            scores.masked_fill_(block.hidden[:, :, None], -torch.inf)
        running.merge(block.nodes, scores.flatten(1, 2), value, spec.window is not None)
    return running.context(queries.dtype)


class _Running:
    """State of the online softmax of all nodes: greatest score, sum of weights and weighted values
    so far. [G, M+1, A/G] and [G, M+1, A/G, E], float32; the last node is padding. Sinks are merged
    first.
    """

    def __init__(
        self, queries: Tensor, groups: int, size: int, sinks: Tensor | None = None
    ) -> None:
        count, heads, _ = queries.shape
        shape = (groups, count + 1, heads // groups)
        if sinks is None:
            self._most = torch.full(shape, -torch.inf, device=queries.device)
            self._total = torch.zeros(shape, device=queries.device)
        else:
            self._most = sinks.view(groups, 1, -1).expand(shape).contiguous()
            self._total = torch.ones(shape, device=queries.device)
        self._sum = torch.zeros((*shape, size), device=queries.device)

    def merge(self, nodes: Tensor, scores: Tensor, values: Tensor, windowed: bool) -> None:
        """Merge a block: scores [G,n,A/G,BLOCK] of nodes [n] and values [G*t,BLOCK,E].

        windowed  a node may attend to no key of this block nor of any before it
        """
        before = self._most.index_select(1, nodes)
        most = torch.maximum(before, scores.amax(-1))
        # Avoids -inf - -inf, which is NaN, if nothing was seen yet.
        level = torch.where(most == -torch.inf, 0.0, most) if windowed else most
        weights = torch.exp(scores - level.unsqueeze(-1))
        fade = torch.exp(before - level)
        shape = len(values), -1, BLOCK
        mixed = torch.bmm(weights.view(shape).to(values.dtype), values).float()
        mixed = mixed.view(*scores.shape[:3], -1)
        total = self._total.index_select(1, nodes) * fade + weights.sum(-1)
        summed = self._sum.index_select(1, nodes) * fade.unsqueeze(-1) + mixed
        self._most.index_copy_(1, nodes, most)
        self._total.index_copy_(1, nodes, total)
        self._sum.index_copy_(1, nodes, summed)

    def context(self, dtype: torch.dtype) -> Tensor:
        """Return the attention output [M,A,E]. A node's total is at least 1, the weight of its
        greatest score.
        """
        out = self._sum / self._total.clamp_min(1).unsqueeze(-1)
        return out[:, :-1].transpose(0, 1).flatten(1, 2).to(dtype)


AttendApart = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(layer, queries [M,A,E], keys [M,G,E], values [M,G,E], sinks), all rotated -> attention output
[M,A,E].
"""


def apart(attend: AttendApart) -> Attend:
    """Return the attention function for a decoder, of rotated queries, keys and values."""
    return lambda layer, heads: attend(layer, *heads.turned(), heads.sinks)
