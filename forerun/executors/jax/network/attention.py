"""Attention of R rows of N nodes over their pages and their own tree, in plain jnp.

A row's prefix is visible to all of its nodes, so the mask of a tree is N x N, never N x context.
The tree is read first; then the prefix in blocks of BLOCK positions, merged by online softmax
(arXiv 1805.02867): all of it, or with a window only the blocks in the window. The number of blocks
is that of the row that reads most and is known only at run time: one program serves every length.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.jax.network.kv import slots_of
from forerun.executors.jax.network.layers import softcapped
from forerun.networks.layer_spec import AttentionSpec

BLOCK = 128
"""Cached positions read at once."""


class Past(NamedTuple):
    """The pages that the rows of a program can read.

    keys, values  [L,slots,G,E]; values of width 0 if they are the first elements of the keys
    table         int32[R,W]
    kv_len        int32[R]
    page_size     tokens
    """

    keys: Array
    values: Array
    table: Array
    kv_len: Array
    page_size: int


Pages = tuple[tuple[Array, ...], tuple[Array, ...]]
"""Keys and values of each kind, as in State."""

Pasts = tuple[Past, ...]
"""A Past for each kind."""


def pasts_of(
    pages: Pages, tables: Array, kv_len: Array, page_size: int, which: Sequence[int] = (0,)
) -> Pasts:
    """Return the cached keys and values of each kind for rows with these page tables int32[R,K,W]
    and lengths. which: for each kind, the number of its table.
    """
    return tuple(
        Past(keys, values, tables[:, table], kv_len, page_size)
        for keys, values, table in zip(*pages, which, strict=True)
    )


class Layer(NamedTuple):
    """A layer's number and its kind of attention.

    number  of its keys and values among those of their kind; traced, in a scan
    spec    of its attention
    kind    of its keys and values (kv.CacheKind), by number
    sinks   float32[A] a score of each head that has no value; None: none
    """

    number: Any
    spec: AttentionSpec
    kind: int = 0
    sinks: Array | None = None


def ancestors(intervals: Array) -> Array:
    """Return bool[R,N,N]: [r,i,j] is True if node j of row r is node i or an ancestor of it.

    intervals  int32[2,R,N] enter and leave of each node, as forerun.speculative.verify.intervals
    """
    enter, leave = intervals
    seen: Array = (enter[:, None] <= enter[..., None]) & (enter[..., None] < leave[:, None])
    return seen


class Tree(NamedTuple):
    """The rows' own nodes.

    seen      bool[R,N,T] which of the T fresh keys each attends to, if a window does not exclude
              them; if only the nodes themselves are fresh that is `ancestors`
    position  int32[R,N]
    fresh     int32[R,T] positions of the fresh keys; None: those of the nodes
    """

    seen: Array
    position: Array
    fresh: Array | None = None


def attend(queries: Array, fresh: tuple[Array, ...], past: Past, tree: Tree, how: Layer) -> Array:
    """Return the attention output [R,N,A,E] of R rows of N nodes, in the dtype of the queries.

    queries  [R,N,A,E], rotated
    fresh    keys and values [R,T,G,E] that are not in pages, including those of the same nodes; for
             latent attention the output has `rank` elements, the first of the keys'; (): nodes
             attend to pages alone
    past     pages, of which row r attends to positions 0 .. kv_len[r]-1
    tree     which fresh keys each node attends to

    Scores and sums are float32; the prefix is read in blocks and merged by online softmax (arXiv
    1805.02867). A block in which no node of its row attends to a key changes no bit. A node that
    attends to no key gives NaN.
    """
    rows, nodes, heads, size = queries.shape
    groups, spec = past.keys.shape[2], how.spec
    grouped = (queries * spec.scale).reshape(rows, nodes, groups, heads // groups, size)
    running = _nothing(grouped, past, how)
    if fresh:
        (keys, values), seen = fresh, tree.seen
        if spec.window is not None:
            own = tree.position if tree.fresh is None else tree.fresh
            seen = seen & (tree.position[:, :, None] - own[:, None] < spec.window)
        scores = _masked(_scores(grouped, keys), seen, spec)
        running = _merged(running, scores, _values(keys, values, spec))

    begin = jnp.zeros_like(past.kv_len)
    if spec.window is not None:
        begin = jnp.maximum(tree.position.min(1) + 1 - spec.window, 0) // BLOCK

    def block(index: Array, running: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        places = (begin + index)[:, None] * BLOCK + jnp.arange(BLOCK)
        slots = slots_of(past.table, places, past.page_size)
        seen = (places < past.kv_len[:, None])[:, None]
        if spec.window is not None:
            seen = seen & (tree.position[..., None] - places[:, None] < spec.window)
        keys, values = past.keys[how.number, slots], past.values[how.number, slots]
        scores = _masked(_scores(grouped, keys), seen, spec)
        return _merged(running, scores, _values(keys, values, spec))

    blocks = ((past.kv_len + BLOCK - 1) // BLOCK - begin).max()
    _, total, summed = lax.fori_loop(0, blocks, block, running)
    context = jnp.moveaxis(summed / total[..., None], 3, 1)
    return context.reshape(rows, nodes, heads, -1).astype(queries.dtype)


def _values(keys: Array, values: Array, spec: AttentionSpec) -> Array:
    return values if spec.latent is None else keys[..., : spec.latent.rank]


def _masked(scores: Array, seen: Array, spec: AttentionSpec) -> Array:
    """Return scores [R,G,A/G,N,T], with softcap, where seen [R,N or 1,T]; -inf elsewhere."""
    return jnp.where(seen[:, None, None], softcapped(scores, spec.softcap), -jnp.inf)


def _scores(queries: Array, keys: Array) -> Array:
    """Return scores float32[R,G,A/G,N,T]."""
    return jnp.einsum(
        "rngae,rtge->rgant",
        queries,
        keys,
        precision=lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _mixed(weights: Array, values: Array) -> Array:
    """Return weighted values float32[R,G,A/G,N,E]."""
    return jnp.einsum(
        "rgant,rtge->rgane",
        weights.astype(values.dtype),
        values,
        precision=lax.Precision.HIGHEST if values.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _nothing(queries: Array, past: Past, how: Layer) -> tuple[Array, Array, Array]:
    """Return the initial greatest score, sum of weights and weighted values."""
    rows, nodes, *heads, _ = queries.shape
    none = jnp.zeros((rows, *heads, nodes), jnp.float32)
    size = _values(past.keys, past.values, how.spec).shape[-1]
    summed = jnp.zeros((*none.shape, size), jnp.float32)
    if how.sinks is None:
        return jnp.full_like(none, jnp.finfo(jnp.float32).min), none, summed
    return none + how.sinks.reshape(*heads, 1), none + 1.0, summed


def _merged(
    running: tuple[Array, Array, Array], scores: Array, values: Array
) -> tuple[Array, Array, Array]:
    before, total, summed = running
    most = jnp.maximum(before, scores.max(-1))
    weights, fade = jnp.exp(scores - most[..., None]), jnp.exp(before - most)
    mixed = summed * fade[..., None] + _mixed(weights, values)
    return most, total * fade + weights.sum(-1), mixed
