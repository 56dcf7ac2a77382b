"""What lives on the device from step to step, all of it donated to every program and given back.

Slots as in torch/kv.py, `slots` axis second:

    0 .. P*page_size     pages: offset o of page p is slot p*page_size + o
    .. + scratch         nodes of rounds, until their rows are decided

A program reads pages as they were before the step; what a step makes permanent is written at its
end, so XLA needs no copy of the pages.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from forerun.executors.jax.sharding import Sharding
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.models.arch import Architecture
from forerun.models.draft_config import DraftHead


class DraftArrays(NamedTuple):
    """What a draft head needs from step to step.

    streams       [Xh + more, F*H] residual streams that it reads of the step's nodes, where
                  `State.hidden` has theirs; then room for what the host has kept
    keys, values  [layers,slots + nodes,G,E] under the target's page ids, then of draft nodes
    outputs       [nodes + S,H] what a next draft step receives: of draft nodes, then of each
                  slot's root
    reads         [nodes,H] what the output head reads of the last pass's nodes
    """

    streams: Array
    keys: Array
    values: Array
    outputs: Array
    reads: Array

    @property
    def roots(self) -> int:
        """Where the roots begin in `outputs`."""
        return int(self.reads.shape[0])


class State(NamedTuple):
    """The bundle.

    keys, values  [L,slots,G,E]
    hidden        [Xh,H] residual streams after the last layer of the step's nodes
    draft         of the draft head, if there is one
    """

    keys: Array
    values: Array
    hidden: Array
    draft: DraftArrays | None = None


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of a State.

    slots    of pages
    scratch  behind them, for nodes of rounds
    hidden   rows of `State.hidden`: those of rounds, then those of prompt chunks
    """

    slots: int
    scratch: int
    hidden: int

    @classmethod
    def of(cls, limits: ExecutorLimits, scratch: int, largest_chunk: int) -> "StateShape":
        """Room for any step."""
        return cls(
            slots=limits.pages * limits.page_size,
            scratch=scratch,
            hidden=scratch + limits.max_nodes + largest_chunk,
        )

    def cache_bytes(self, arch: Architecture, itemsize: int) -> int:
        """Bytes of keys and values."""
        per_slot = 2 * arch.layers * arch.kv_heads * arch.head_size * itemsize
        return (self.slots + self.scratch) * per_slot

    def drafting(
        self, head: DraftHead, limits: ExecutorLimits, largest_chunk: int
    ) -> tuple[tuple[int, ...], ...]:
        """Shapes of DraftArrays. The host keeps no more features than fit into a step."""
        room = self.hidden + limits.max_nodes + largest_chunk
        cache = (
            len(head.cache),
            self.slots + limits.max_nodes,
            head.kv_heads,
            head.head_size,
        )
        return (
            (room, head.target_hidden * len(head.features)),
            cache,
            cache,
            (limits.max_nodes + limits.slots, head.hidden),
            (limits.max_nodes, head.hidden),
        )

    def made(self, arch: Architecture, dtype: jnp.dtype, sharding: Sharding) -> State:
        """All zeros, on the device."""
        cache = (arch.layers, self.slots + self.scratch, arch.kv_heads, arch.head_size)
        return State(
            keys=jnp.zeros(cache, dtype, device=sharding.cache),
            values=jnp.zeros(cache, dtype, device=sharding.cache),
            hidden=jnp.zeros((self.hidden, arch.hidden), dtype, device=sharding.whole),
        )


def slots_of(table: Array, positions: Array, page_size: int) -> Array:
    """int32[R,T] slots of positions [R,T] through page tables [R,W]; no page counts as page 0."""
    last = table.shape[1] - 1
    page = jnp.take_along_axis(table, jnp.minimum(positions // page_size, last), 1)
    return jnp.maximum(page, 0) * page_size + positions % page_size


def sanitised(keys: Array, values: Array) -> tuple[Array, Array]:
    """What may be kept: what is not finite is moved into the key, where a mask hides it; among
    values zero times NaN would spoil the nodes that must not see it.
    """
    spoiled = (keys * 0 + values * 0).sum(-1, keepdims=True)
    return keys + spoiled, jnp.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def first_without_page(plan: Plan, reach: np.ndarray, page_size: int) -> int | None:
    """The first row that has a position below reach[b] without a page; None = all have them."""
    pages = -(-reach // page_size)
    width = plan.page_table.shape[1]
    missing = (plan.page_table < 0) & (np.arange(width) < pages[:, None])
    rows = np.flatnonzero(missing.any(1) | (pages > width))
    return int(rows[0]) if len(rows) else None
