"""Attention of prompt chunks by torch's scaled_dot_product_attention, which on CUDA is
FlashAttention (Dao, arXiv 2307.08691): `--prefill-attention-backend torch_native`, and by default
in 16 bits.

Our kernel (triton_attention.py) reads a prefix once for every tile of a few nodes, which suits
trees. A chunk of many prompt tokens has many tiles; a library made for long queries reads the
prefix less often. It knows neither pages nor trees: a row's keys are gathered first, and only rows
that are plain sequences of known tokens go there. Layers with a window or a softcap stay with our
kernel.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from forerun.executors.torch.geometry import (
    Geometry,
    most_parts,
    programs_for,
    split_of,
    tiles_of,
)
from forerun.executors.torch.kernels import Attend
from forerun.executors.torch.kv import CacheTensor, PagedCache, read
from forerun.executors.torch.layers import plain
from forerun.interface.plan import Plan
from forerun.models.layer_spec import AttentionSpec
from forerun.speculative.tree import TreeBatch


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A row of known tokens alone: its flat nodes first:end, and where the keys of all positions
    that they see are, int64[S] on the device (see kv.py).
    """

    first: int
    end: int
    slots: Tensor


class PromptAttention:
    """Attention of one step that has prompt chunks.

    attend    for the rows that are none
    geometry  of all rows; keys and values of prompt chunks must be in their pages at each call
    """

    def __init__(
        self, attend: Attend, geometry: Geometry, plan: Plan, trees: TreeBatch, cache: PagedCache
    ) -> None:
        rows = prompt_rows(trees, geometry.tile)
        self._attend, self._rest = attend, without(geometry, plan, trees, cache.groups, rows)
        self._chunks = [_chunk(plan, trees, cache, row) for row in rows]

    def __call__(
        self, queries: Tensor, keys: CacheTensor, values: CacheTensor, spec: AttentionSpec
    ) -> Tensor:
        """Context [M,A,E] of queries [M,A,E], rotated, over one layer's keys and values, of a layer
        that `takes`.
        """
        context = torch.empty_like(queries)
        if self._rest is not None:
            context = plain(self._attend(queries, keys, values, self._rest, spec))
        for chunk in self._chunks:
            nodes = slice(chunk.first, chunk.end)
            context[nodes] = attend_chunk(queries[nodes], keys, values, chunk.slots, spec.scale)
        return context


def takes(spec: AttentionSpec) -> bool:
    """Whether `attend_chunk` makes such scores."""
    return spec.window is None and spec.softcap is None and not spec.sinks and spec.latent is None


def prompt_rows(trees: TreeBatch, tile: int) -> list[int]:
    """Rows without draft tokens that tiles of so many nodes would cut."""
    lengths = np.diff(trees.start)
    found: list[int] = np.flatnonzero((trees.known == lengths) & (lengths > tile)).tolist()
    return found


def without(
    geometry: Geometry, plan: Plan, trees: TreeBatch, groups: int, rows: list[int]
) -> Geometry | None:
    """The geometry of a step but for some rows; None where no other is left. What attention gives
    for the nodes of those rows is left undefined.
    """
    tiles = tiles_of(trees.start, geometry.tile)
    tiles = np.ascontiguousarray(tiles[~np.isin(tiles[:, 0], rows)])
    if not len(tiles):
        return None
    programs = programs_for(len(tiles), groups, most_parts(len(trees.tokens)))
    split = split_of(plan.kv_len[tiles[:, 0]], programs)
    device = geometry.tiles.device
    return replace(
        geometry,
        tiles=torch.from_numpy(tiles).to(device),
        split=torch.from_numpy(split).to(device),
    )


def _chunk(plan: Plan, trees: TreeBatch, cache: PagedCache, row: int) -> PromptChunk:
    first, end = int(trees.start[row]), int(trees.start[row + 1])
    seen = np.arange(int(plan.kv_len[row]) + end - first)
    slots = torch.from_numpy(cache.slots(plan.page_table[row], seen))
    return PromptChunk(first, end, slots.to(cache.device))


def attend_chunk(
    queries: Tensor, keys: CacheTensor, values: CacheTensor, slots: Tensor, scale: float
) -> Tensor:
    """Context [n,A,E] of queries [n,A,E], which stand at the last n of the positions whose keys and
    values are at `slots` int64[S] of [G,.,E]; each sees all positions up to its own.
    """
    key, value = (read(cached, slots).to(queries.dtype)[None] for cached in (keys, values))
    found = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        key,
        value,
        attn_mask=causal_lower_right(len(queries), len(slots)),
        scale=scale,
        enable_gqa=True,
    )
    context: Tensor = found[0].transpose(0, 1)
    return context
