"""Attention of prompt chunks with FlashAttention: `--prefill-attention-backend torch_native`, the
default in 16 bits.

Our kernel (triton_attention.py) reads a prefix once for every tile of a few nodes, which suits
trees. A chunk of many prompt tokens has many tiles; a library for long queries reads the prefix
less often. It supports neither pages nor trees: so the keys of these rows are gathered first, and
only rows that are plain sequences of known tokens use it. All of them, whole prompts and chunks
after a cached prefix alike, are concatenated in one call per layer: FlashAttention's
variable-length call (Dao, arXiv 2307.08691).

Layers with a softcap, sinks or a latent use our kernel. scaled_dot_product_attention is not used
because it may choose cuDNN, which builds a plan for every new length while the whole step waits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forerun.executors.torch.attention.geometry import Attend, Geometry
from forerun.executors.torch.attention.kv import CacheTensor, PagedCache, read
from forerun.executors.torch.sizes import most_parts, programs_for, split_of, tiles_of
from forerun.interface.plan import Plan
from forerun.networks.layer_spec import AttentionSpec
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
NEVER_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """N rows of known tokens only, concatenated: n nodes over S keys.

    nodes        these nodes among the step's flat nodes, in order: a slice if they are contiguous,
                 else int64[n] on the device
    slots        int64[S] on the device: slots of the keys at all positions of each row
    queries      int32[N]: nodes of each row
    keys         int32[N]: keys of each row; its nodes are the last of them
    query_start  int32[N+1] on the device: cumulative sums of `queries`
    key_start    int32[N+1] on the device: cumulative sums of `keys`
    """

    nodes: slice | Tensor
    slots: Tensor
    queries: Ints
    keys: Ints
    query_start: Tensor
    key_start: Tensor

    @staticmethod
    def of(plan: Plan, trees: TreeBatch, cache: PagedCache, rows: list[int]) -> "PackedPrompts":
        """Return the prompts of at least one row of a step as one variable-length call reads them:
        the offsets of their nodes and keys, and the slots of their keys.
        """
        count = np.diff(trees.start)[rows].astype(np.int32)
        keys = (plan.kv_len[rows] + count).astype(np.int32)
        slots = [
            cache.slots_of(plan.page_table, row, np.arange(seen))
            for row, seen in zip(rows, keys, strict=True)
        ]

        def there(values: Ints) -> Tensor:
            return torch.from_numpy(values).to(cache.device)

        def sums(lengths: Ints) -> Tensor:
            return there(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

        nodes: slice | Tensor = slice(int(trees.start[rows[0]]), int(trees.start[rows[-1] + 1]))
        if rows != list(range(rows[0], rows[-1] + 1)):
            found = [np.arange(trees.start[row], trees.start[row + 1]) for row in rows]
            nodes = there(np.concatenate(found).astype(np.int64))
        return PackedPrompts(
            nodes, there(np.concatenate(slots)), count, keys, sums(count), sums(keys)
        )


VariableLength = Callable[[Tensor, Tensor, Tensor, PackedPrompts, AttentionSpec], Tensor]
"""(queries [n,A,E], keys and values [S,G,E] of one dtype, rows, spec of the scores) -> attention
output [n,A,E]: each row's nodes are the last of its keys and attend to those up to their own
position, within the window.
"""


def flash(
    queries: Tensor, keys: Tensor, values: Tensor, packed: PackedPrompts, spec: AttentionSpec
) -> Tensor:
    """Compute VariableLength with FlashAttention on CUDA: one launch. Row by row if it does not
    support the dtype or the head size. torch.nn.attention.varlen would choose cuDNN in some
    versions.
    """
    if queries.dtype not in SIXTEEN_BITS or queries.shape[-1] > 256 or queries.shape[-1] % 8:
        return row_by_row(queries, keys, values, packed, spec)
    context: Tensor = torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        values,
        packed.query_start,
        packed.key_start,
        int(packed.queries.max()),
        int(packed.keys.max()),
        0.0,
        True,
        False,
        scale=spec.scale,
        window_size_left=-1 if spec.window is None else spec.window - 1,
        window_size_right=0,
    )[0]
    return context


def row_by_row(
    queries: Tensor, keys: Tensor, values: Tensor, packed: PackedPrompts, spec: AttentionSpec
) -> Tensor:
    """Compute VariableLength's result [Q,A,E] on any device and in any dtype: the reference for
    `flash`.
    """
    context = torch.empty_like(queries)
    first = before = 0
    for count, seen in zip(packed.queries.tolist(), packed.keys.tolist(), strict=True):
        own, there = slice(first, first + count), slice(before, before + seen)
        key = torch.arange(seen, device=queries.device)
        mine = key[seen - count :, None]
        mask = key <= mine
        if spec.window is not None:
            mask &= key > mine - spec.window
        query, keyed, valued = (
            rows.transpose(0, 1)[None] for rows in (queries[own], keys[there], values[there])
        )
        with sdpa_kernel(NEVER_CUDNN):
            found = F.scaled_dot_product_attention(
                query, keyed, valued, attn_mask=mask, scale=spec.scale, enable_gqa=True
            )
        context[own] = found[0].transpose(0, 1)
        first, before = first + count, before + seen
    return context


class PromptAttention:
    """Attention of one step that has prompt chunks.

    attend    for rows that are not prompt chunks
    varlen    for rows that are
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
        """Return the attention output [M,A,E] of rotated queries [M,A,E] over one layer's keys and
        values, for a layer that `takes` accepts.
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
    """Return whether PromptAttention supports `spec`: no softcap, no sinks and no latent heads."""
    return spec.softcap is None and not spec.sinks and spec.latent is None


def prompt_rows(trees: TreeBatch, tile: int) -> list[int]:
    """Return the rows without draft tokens that have more nodes than a tile of `tile` nodes."""
    lengths = np.diff(trees.start)
    found: list[int] = np.flatnonzero((trees.known == lengths) & (lengths > tile)).tolist()
    return found


def without(
    geometry: Geometry, plan: Plan, trees: TreeBatch, groups: int, rows: list[int]
) -> Geometry | None:
    """Return the geometry of a step without some rows; None if no others are left. The attention
    output of those rows' nodes is then undefined.
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
