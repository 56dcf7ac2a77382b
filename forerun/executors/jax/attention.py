"""Attention of R rows of N nodes over their pages and their own tree, in plain jnp.

A row's prefix is visible to all of its nodes, so the mask of a tree is N x N, never N x context.
The tree is read first; then the prefix in blocks of BLOCK positions, merged by online softmax
(arXiv 1805.02867). The number of blocks is that of the longest prefix, known to the running
program alone: one program serves every length.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.jax.kv import slots_of

BLOCK = 128
"""Cached positions read at once."""


class Past(NamedTuple):
    """What the rows of a program can read of the pages.

    keys, values  [L,slots,G,E]
    table         int32[R,W]
    kv_len        int32[R]
    """

    keys: Array
    values: Array
    table: Array
    kv_len: Array


def ancestors(intervals: Array) -> Array:
    """bool[R,N,N]: [r,i,j] is true where node j is node i or above it.

    intervals  int32[2,R,N] enter and leave of a walk, depth first (torch/geometry.py)
    """
    enter, leave = intervals
    return (enter[:, None] <= enter[..., None]) & (enter[..., None] < leave[:, None])


def attend(
    queries: Array, fresh: tuple[Array, Array], past: Past, seen: Array, where: tuple[Array, int]
) -> Array:
    """Context [R,N,A,E] of queries [R,N,A,E], rotated.

    fresh  keys and values [R,N,G,E] of the same nodes
    seen   bool[R,N,N] from `ancestors`
    where  (layer, page size)
    """
    rows, nodes, heads, size = queries.shape
    groups = fresh[0].shape[2]
    layer, page_size = where
    grouped = (queries * size**-0.5).reshape(rows, nodes, groups, heads // groups, size)
    scores = _scores(grouped, fresh[0])
    running = _first(jnp.where(seen[:, None, None], scores, -jnp.inf), fresh[1])

    def block(index: Array, running: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        position = index * BLOCK + jnp.arange(BLOCK)
        slots = slots_of(past.table, jnp.broadcast_to(position, (rows, BLOCK)), page_size)
        cached = position < past.kv_len[:, None]
        scores = _scores(grouped, past.keys[layer, slots])
        scores = jnp.where(cached[:, None, None, None], scores, -jnp.inf)
        return _merged(running, scores, past.values[layer, slots])

    blocks = (past.kv_len.max() + BLOCK - 1) // BLOCK
    _, total, summed = lax.fori_loop(0, blocks, block, running)
    context = jnp.moveaxis(summed / total[..., None], 3, 1)
    return context.reshape(rows, nodes, heads, size).astype(queries.dtype)


def _scores(queries: Array, keys: Array) -> Array:
    """float32[R,G,A/G,N,T]."""
    return jnp.einsum(
        "rngae,rtge->rgant",
        queries,
        keys,
        precision=lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _mixed(weights: Array, values: Array) -> Array:
    """float32[R,G,A/G,N,E]."""
    return jnp.einsum(
        "rgant,rtge->rgane",
        weights.astype(values.dtype),
        values,
        precision=lax.Precision.HIGHEST if values.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _first(scores: Array, values: Array) -> tuple[Array, Array, Array]:
    """Greatest score, sum of weights and weighted values; every node sees itself at least."""
    most = scores.max(-1)
    weights = jnp.exp(scores - most[..., None])
    return most, weights.sum(-1), _mixed(weights, values)


def _merged(
    running: tuple[Array, Array, Array], scores: Array, values: Array
) -> tuple[Array, Array, Array]:
    before, total, summed = running
    most = jnp.maximum(before, scores.max(-1))
    weights, fade = jnp.exp(scores - most[..., None]), jnp.exp(before - most)
    mixed = summed * fade[..., None] + _mixed(weights, values)
    return most, total * fade + weights.sum(-1), mixed
