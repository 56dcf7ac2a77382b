"""Attention of prompt rows of different lengths, packed one behind another: FlashAttention's
variable-length call (Dao, arXiv 2307.08691), and its slow twin.

Does not use scaled_dot_product_attention, which may choose cuDNN: that builds a plan for every new
length while the whole step waits.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forerun.executors.torch.attention.kv import PagedCache
from forerun.interface.plan import Plan
from forerun.networks.layer_spec import AttentionSpec
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
NEVER_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Rows of known tokens alone, N of them, n nodes over S keys, one row behind another.

    nodes        of the step's flat nodes those n, in order: a slice where they stand together,
                 else int64[n] on the device
    slots        int64[S] on the device: where the keys of all positions that a row sees are
    queries      int32[N]: nodes of each row
    keys         int32[N]: keys of each row; its nodes stand at the last of them
    query_start  int32[N+1] on the device: sums of `queries`
    key_start    int32[N+1] on the device: sums of `keys`
    """

    nodes: slice | Tensor
    slots: Tensor
    queries: Ints
    keys: Ints
    query_start: Tensor
    key_start: Tensor

    @staticmethod
    def of(plan: Plan, trees: TreeBatch, cache: PagedCache, rows: list[int]) -> "PackedPrompts":
        """Return the prompts of these rows of a step, at least one, as one varlen call reads them:
        where their nodes and keys begin, and the slots of their keys.
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


class VariableLength(Protocol):
    """Attention of rows of different lengths."""

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        packed: PackedPrompts,
        spec: AttentionSpec,
    ) -> Tensor:
        """Return the context [n,A,E] of queries [n,A,E] over keys and values [S,G,E] of one dtype,
        each row's nodes at the last of its own keys, each seeing those up to its own position,
        within the window of `spec`.
        """
        ...


def flash(
    queries: Tensor, keys: Tensor, values: Tensor, packed: PackedPrompts, spec: AttentionSpec
) -> Tensor:
    """Compute VariableLength by FlashAttention on CUDA: one launch. Row by row if it does not
    support the dtype or the head size. torch.nn.attention.varlen would take cuDNN in some versions.
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
    """Compute VariableLength's context [Q,A,E] on any device and in any dtype: the slow twin of
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
