"""The state of a model on the device, which every program takes, donated, and returns.

Slots as in torch/kv.py, `slots` axis second:

    0 .. P*page_size     pages: offset o of page p is slot p*page_size + o
    .. + scratch         nodes of rounds, until their rows are decided

Layers with window pages (executors/window_pages.py) have slots for these instead, found by a second
page table.

A program reads pages as they were before the step; permanent entries are written at its end, so XLA
needs no copy of the pages.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.executors.feature_ring import ring_size
from forerun.executors.jax.network.recurrent import RecurrentTables
from forerun.executors.jax.network.sharding import Sharding
from forerun.executors.state_slots import rows_of
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.networks.arch import Architecture
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.layer_spec import GatedDelta, LayerSpec
from forerun.speculative.tree import full_size
from forerun.types import Ints


class CacheKind(NamedTuple):
    """A kind of keys and values: those of layers in the same array.

    shape  of a position's keys and values
    near   whether the layers have window pages
    """

    shape: CacheLayer
    near: bool

    @classmethod
    def of(cls, arch: Architecture, spec: LayerSpec, windowed: bool) -> "CacheKind":
        """Return the kind of a layer's keys and values, or of those that it reads. windowed:
        whether sliding-window layers have window pages.
        """
        owner = spec if spec.reads is None else arch.layer_specs[spec.reads]
        return cls(arch.cache_of(spec), windowed and owner.attention.window is not None)


def kinds_of(arch: Architecture, windowed: bool) -> Counter[CacheKind]:
    """Return how many layers have keys and values of each kind, in the order of first use."""
    owners = (spec for spec in arch.layer_specs if spec.recurrent is None and spec.reads is None)
    return Counter(CacheKind.of(arch, spec, windowed) for spec in owners)


@dataclass(frozen=True, slots=True)
class NetworkSizes:
    """Sizes and switches of a network.

    features    indices of the target's hidden states that it reads, as transformers'
    width       total size of these, per node
    cache       shape of each layer's keys and values; the same for all layers
    hidden      size of a next draft step's input
    read        size of its output head's input
    vocab       Vd, or how many of these are scored at once (of an assistant's clusters, a selector)
    parameters  number of its own weights
    cut         whether keys and values are sharded by head; else copied to each shard
    runs_root   whether it reads tokens alone, and each row's root is a node of its own
    block       draft tokens that it proposes at once; 0 = it proposes level by level
    confident   whether it has a confidence
    borrows     for a network without a cache that reads the target's pages: the number of the page
                table of each kind; all draft tokens have one position (drafts/assistant.py). (): it
                has pages of its own
    """

    features: tuple[int, ...]
    width: int
    cache: tuple[CacheLayer, ...]
    hidden: int
    read: int
    vocab: int
    parameters: int
    cut: bool
    runs_root: bool = False
    block: int = 0
    confident: bool = False
    borrows: tuple[int, ...] = ()

    def record(self, rows: int, width: int, levels: int) -> int:
        """Return the length of the record of its drafts for `rows` rows (drafting.py)."""
        nodes = full_size(width, levels)
        return rows * (3 * nodes + self.confident * (1 + nodes))


class DraftArrays(NamedTuple):
    """The state of a draft network; `slots` of pages, M nodes of a step, S slots of sequences.

    streams       [Xh + S*RING_TOKENS, width] residual streams that it reads of the step's nodes, at
                  the rows of `State.hidden`; then a ring of the slots' last accepted tokens
                  (feature_ring.py)
    keys, values  [layers,slots + M,G,E] in the target's pages, then of draft nodes; then S more, of
                  the slots' roots, if these are nodes of their own
    outputs       [M + S,hidden] input of a next draft step: of draft nodes, then of each slot's
                  root
    reads         [M + S,read] input of the output head, of the last pass's nodes
    """

    streams: Array
    keys: Array
    values: Array
    outputs: Array
    reads: Array


class State(NamedTuple):
    """All device arrays that change.

    keys, values  of each kind (kinds_of) [L,slots,G,E]; values have size 0 if keys begin with them
    hidden        [Xh,H] residual streams after the last layer of the step's nodes
    draft         of the draft network, if there is one
    future        from which a next round can continue (future_map.py), if rounds overlap
    recurrent     states of recurrent layers, if there are any
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    hidden: Array
    draft: DraftArrays | None = None
    future: Any = None
    recurrent: RecurrentTables | None = None

    @property
    def drafting(self) -> DraftArrays:
        """`draft`; raises AssertionError if no draft network is attached."""
        assert self.draft is not None, "a draft network was attached"
        return self.draft


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of a State.

    slots    of pages
    scratch  slots after them, for nodes of rounds
    hidden   rows of `State.hidden`: those of rounds, then those of prompt chunks
    nodes    M of a step at most
    states   rows of recurrent states; the last is zeros
    near     slots of window pages; 0 = every layer keeps all pages
    """

    slots: int
    scratch: int
    hidden: int
    nodes: int
    states: int = 0
    near: int = 0

    @property
    def paged(self) -> tuple[int, ...]:
        """Slots of pages in the array of each of a row's page tables."""
        return (self.slots, self.near) if self.near else (self.slots,)

    @classmethod
    def of(cls, limits: ExecutorLimits, scratch: int, largest_chunk: int) -> "StateShape":
        """Return sizes with room for any step: `scratch` padded nodes of rounds and chunks of at
        most `largest_chunk` tokens.
        """
        return cls(
            slots=limits.pages * limits.page_size,
            scratch=scratch,
            hidden=scratch + limits.max_nodes + largest_chunk,
            nodes=limits.max_nodes,
            states=rows_of(limits) + 1,
            near=limits.window_pages * limits.page_size,
        )

    def cache_bytes(self, arch: Architecture, itemsize: int) -> int:
        """Return the bytes of keys and values of pages and scratch, all devices together;
        `itemsize` bytes per element.
        """
        kinds = kinds_of(arch, bool(self.near)).items()
        numbers = (
            layers * kind.shape.numbers * (self.paged[kind.near] + self.scratch)
            for kind, layers in kinds
        )
        return sum(numbers) * itemsize

    def drafting(self, sizes: NetworkSizes, limits: ExecutorLimits) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of DraftArrays, in its order, for a network of these sizes."""
        room, nodes = self.hidden + ring_size(limits.slots), limits.max_nodes
        layer = sizes.cache[0] if sizes.cache else CacheLayer(1, 1)
        roots = limits.slots * sizes.runs_root
        places = self.slots + nodes + roots
        keys, values = _planes(len(sizes.cache), places, layer)
        kept = nodes + limits.slots
        return (room, sizes.width), keys, values, (kept, sizes.hidden), (kept, sizes.read)

    def allocate(self, arch: Architecture, dtype: jnp.dtype, sharding: Sharding) -> State:
        """Allocate a State of zeros on the devices."""
        planes = [
            _planes(layers, self.paged[kind.near] + self.scratch, kind.shape)
            for kind, layers in kinds_of(arch, bool(self.near)).items()
        ]
        keys, values = (
            tuple(jnp.zeros(part[which], dtype, device=sharding.cache) for part in planes)
            for which in (0, 1)
        )
        about, tables = arch.recurrent, None
        if about is not None:
            shape = arch.recurrent_layers, self.states, about.window - 1, about.channels
            windows, matrices = jnp.zeros(shape, jnp.float32, device=sharding.replicated), None
            if isinstance(about, GatedDelta):
                sizes = about.value_heads, about.key_size, about.value_size
                matrices = jnp.zeros((*shape[:2], *sizes), jnp.float32, device=sharding.replicated)
            tables = RecurrentTables(windows, matrices)
        return State(
            recurrent=tables,
            keys=keys,
            values=values,
            hidden=jnp.zeros((self.hidden, arch.hidden), dtype, device=sharding.replicated),
        )


def _planes(layers: int, places: int, layer: CacheLayer) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of keys and values; values have size 0 if keys begin with them."""
    size = layer.head_size
    return tuple((layers, places, layer.kv_heads, n) for n in (size, (layer.planes - 1) * size))


def slots_of(table: Array, positions: Array, page_size: int) -> Array:
    """Return int32[R,T], the slot of each position [R,T] through page tables [R,W]. A missing page
    (-1) counts as page 0, positions beyond the table as its last page; the caller masks them.
    """
    last = table.shape[1] - 1
    page = jnp.take_along_axis(table, jnp.minimum(positions // page_size, last), 1)
    return jnp.maximum(page, 0) * page_size + positions % page_size


def of_nodes(made: Array) -> Array:
    """Return [L,R*N,G,E] of keys or values [L,R,N,G,E], E of which may be 0."""
    layers, rows, nodes, *rest = made.shape
    return made.reshape(layers, rows * nodes, *rest)


def after(slots: Array, made: Array) -> Array:
    """Return `slots` int32[...] unchanged, but computed from `made`: a write at them then follows
    every read that `made` depends on, and happens in place. XLA would otherwise write first and
    copy all pages for later readers. The added value is always 0, which XLA cannot infer.
    """
    bits = lax.bitcast_convert_type(made.reshape(-1)[0].astype(jnp.float32), jnp.int32)
    return slots + ((bits & 1) >> 1)


def sanitised(keys: Array, values: Array) -> tuple[Array, Array]:
    """Return keys and values [...,E] that may be written to pages: a NaN or infinity in a value
    becomes 0 there and NaN in its key, where masks hide it; in a value, zero times NaN would spoil
    other nodes.
    """
    spoiled = (keys * 0 + values * 0).sum(-1, keepdims=True)
    return keys + spoiled, jnp.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def first_without_page(plan: Plan, reach: np.ndarray, page_size: int) -> int | None:
    """Return the first row of a plan that has a position below reach int[B] without a page; None =
    all have them.
    """
    pages = -(-reach // page_size)
    width = plan.page_table.shape[1]
    missing = (plan.page_table < 0) & (np.arange(width) < pages[:, None])
    rows = np.flatnonzero(missing.any(1) | (pages > width))
    return int(rows[0]) if len(rows) else None


def page_tables(pages: Ints, width: int) -> Ints:
    """Return int32[R,1,width], the page tables in programs for rows with these pages int32[R,W]:
    absent pages (-1) become 0, pages beyond `width` are dropped.
    """
    found = np.zeros((len(pages), 1, width), np.int32)
    held = pages[:, :width]
    found[:, 0, : held.shape[1]] = np.maximum(held, 0)
    return found
