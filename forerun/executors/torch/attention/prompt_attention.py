"""Attention of prompt chunks by a library: `--prefill-attention-backend torch_native`, and by
default in 16 bits.

Our kernel (triton_attention.py) reads a prefix once for every tile of a few nodes, which suits
trees. A chunk of many prompt tokens has many tiles; a library made for long queries reads the
prefix less often. It knows neither pages nor trees: the keys of all such rows are gathered first,
and only rows that are plain sequences of known tokens go there. All of them are one call a layer
(varlen_attention.py), whatever their number, whole prompts and chunks behind a cached prefix alike.
Layers with a softcap, sinks or a latent stay with our kernel.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from forerun.executors.torch.attention.geometry import Attend, Geometry
from forerun.executors.torch.attention.kv import CacheTensor, PagedCache, read
from forerun.executors.torch.attention.tiles import most_parts, programs_for, split_of, tiles_of
from forerun.executors.torch.attention.varlen_attention import PackedPrompts, VariableLength
from forerun.interface.plan import Plan
from forerun.networks.layer_spec import AttentionSpec
from forerun.speculative.tree import TreeBatch


class PromptAttention:
    """Attention of one step that has prompt chunks.

    attend    for the rows that are none
    varlen    for those that are
    geometry  of all rows; keys and values of prompt chunks must be in their pages at each call
    """

    def __init__(
        self,
        attend: Attend,
        varlen: VariableLength,
        geometry: Geometry,
        plan: Plan,
        trees: TreeBatch,
        cache: PagedCache,
    ) -> None:
        rows = prompt_rows(trees, geometry.tile)
        self._attend, self._varlen = attend, varlen
        self._rest = without(geometry, plan, trees, cache.groups, rows)
        self._packed = PackedPrompts.of(plan, trees, cache, rows)

    def __call__(
        self, queries: Tensor, keys: CacheTensor, values: CacheTensor, spec: AttentionSpec
    ) -> Tensor:
        """Return the context [M,A,E] of queries [M,A,E], rotated, over one layer's keys and values,
        of a layer that `takes`.
        """
        packed = self._packed
        key, value = (
            read(cached, packed.slots).to(queries.dtype).transpose(0, 1)
            for cached in (keys, values)
        )
        found = self._varlen(queries[packed.nodes], key, value, packed, spec)
        if self._rest is None and len(found) == len(queries):
            return found
        context = torch.empty_like(queries)
        if self._rest is not None:
            context = self._attend(queries, keys, values, self._rest, spec)
        context[packed.nodes] = found
        return context


def takes(spec: AttentionSpec) -> bool:
    """Return whether PromptAttention can compute the scores of `spec`: without a cap, sinks and
    latent heads.
    """
    return spec.softcap is None and not spec.sinks and spec.latent is None


def prompt_rows(trees: TreeBatch, tile: int) -> list[int]:
    """Return the rows without draft tokens that tiles of so many nodes would cut."""
    lengths = np.diff(trees.start)
    found: list[int] = np.flatnonzero((trees.known == lengths) & (lengths > tile)).tolist()
    return found


def without(
    geometry: Geometry, plan: Plan, trees: TreeBatch, groups: int, rows: list[int]
) -> Geometry | None:
    """Return the geometry of a step without some rows; None if no other is left. The attention of
    those rows' nodes is then undefined.
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
