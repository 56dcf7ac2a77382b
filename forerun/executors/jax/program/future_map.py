"""The inputs of a round that the previous one leaves on the device, so that it can begin before the
host has read the previous one.

    slot      kv_len, last token, and the full tree that was built below it
    round     [slots -> rows that are carried] -> forward -> walk -> ... -> [rows -> slots]

A carried row begins with the results of the previous round in its slot. The host gives only bounds:
most draft tokens and levels, and positions it may take. The draft tokens are the best of the full
tree, as forerun.speculative.draft_tree.full_draft selects them.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.executors.jax.drafts.drafting import NOWHERE
from forerun.executors.jax.rounds.accept import NodeSampling, Trees
from forerun.executors.jax.rounds.inputs import Inputs
from forerun.speculative.accept import NOTHING
from forerun.speculative.tree import full_size


class FutureMap(NamedTuple):
    """Results of rounds by slot.

    kv_len, token              int32[S]
    tokens, parents, values    [S,K] of full trees; -inf for missing nodes
    """

    kv_len: Array
    token: Array
    tokens: Array
    parents: Array
    values: Array

    @classmethod
    def of(cls, slots: int, width: int, levels: int) -> "FutureMap":
        """Return an empty map for S slots of trees of `levels` levels and this width."""
        trees = slots, full_size(width, levels)
        rows, more = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32)
        # Separate arrays, since all of them are donated.
        tokens, parents = jnp.zeros(trees, jnp.int32), jnp.zeros(trees, jnp.int32)
        return cls(rows, more, tokens, parents, jnp.full(trees, -jnp.inf, jnp.float32))


def enter(given: Inputs, held: FutureMap, shape: tuple[int, int]) -> Inputs:
    """Return a round's inputs, in which carried rows get length, root, tree and positions from
    their slots; other rows stay as the host packed them.

    shape  width and levels of the trees
    """
    carried, slot = given.bounds.carried > 0, jnp.maximum(given.bounds.slot, 0)
    kv_len = jnp.where(carried, held.kv_len[slot], given.kv_len)
    own, depth = _trees(given, held, kv_len, shape)

    def which(mine: Array, other: Array) -> Array:
        return jnp.where(carried.reshape(-1, *[1] * (mine.ndim - 1)), mine, other)

    depth = which(depth, given.depth)
    at = given.bounds.position[:, None] + jnp.where(carried, kv_len, 0)[:, None] + depth
    return given._replace(
        kv_len=kv_len,
        depth=depth,
        trees=Trees(*map(which, own, given.trees)),
        sampling=NodeSampling(given.sampling.seeds, at.reshape(-1), given.sampling.temperature),
    )


def _trees(
    given: Inputs, held: FutureMap, kv_len: Array, shape: tuple[int, int]
) -> tuple[Trees, Array]:
    """Return the best nodes of the slots' trees below their last tokens, and their depth [R,N]."""
    bounds, (rows, nodes), (width, levels) = given.bounds, given.depth.shape, shape
    slot = jnp.maximum(bounds.slot, 0)
    index = np.arange(held.tokens.shape[1])
    level = np.where(index < width, 1, (index - width) // max(width, 1) ** 2 + 2).astype(np.int32)
    count = min(nodes - 1, len(index))
    deepest = jnp.minimum(bounds.depth, bounds.end - 1 - kv_len)
    values = jnp.where(level <= deepest[:, None], held.values[slot], -jnp.inf)
    best, chosen = lax.top_k(values, count)
    real = (best > -jnp.inf) & (jnp.arange(count) < bounds.most[:, None])
    chosen = jnp.sort(jnp.where(real, chosen, len(index)), -1)
    real = chosen < len(index)

    def of(values: Array, nothing: int) -> Array:
        """Return [R,N-1] of the chosen nodes, in their places."""
        rest = ((0, 0), (0, nodes - 1 - count))
        padded = jnp.pad(values, ((0, 0), (0, 1)))
        found = jnp.where(real, jnp.take_along_axis(padded, chosen, 1), nothing)
        return jnp.pad(found, rest, constant_values=nothing)

    def below(root: Array, rest: Array) -> Array:
        return jnp.concatenate([root[:, None], rest], 1).astype(jnp.int32)

    parents = of(held.parents[slot], NOTHING)
    place = jnp.pad(chosen, ((0, 0), (0, nodes - 1 - count)), constant_values=len(index))
    above = 1 + (place[:, None] < parents[..., None]).sum(-1)
    there = jnp.arange(nodes) <= real.sum(-1)[:, None]
    above = jnp.where(there[:, 1:], jnp.where(parents < 0, 0, above), NOTHING)
    parents = below(jnp.full(rows, NOTHING), above)
    nothing = jnp.zeros(rows, jnp.int32)
    depth = below(nothing, of(jnp.broadcast_to(level, (rows, len(index))), 0))
    tokens = below(held.token[slot], of(held.tokens[slot], 0))
    return Trees(tokens, parents, _seen(parents, levels), there), depth


def _seen(parents: Array, levels: int) -> Array:
    """Return bool[R,N,N], the ancestors (and itself) of each node with these parents [R,N]: paths
    of 1, 2, 4, ... edges.
    """
    nodes = parents.shape[1]
    order = jnp.arange(nodes)
    seen = ((parents[..., None] == order) | (order[:, None] == order)).astype(jnp.float32)
    for _ in range((min(nodes - 1, levels) - 1).bit_length() if nodes > 1 and levels else 0):
        seen = jnp.minimum(jnp.einsum("rij,rjk->rik", seen, seen), 1.0)
    return seen > 0


def leave(
    held: FutureMap, given: Inputs, choices: Array, kept: Array, grown: Array
) -> tuple[FutureMap, Array]:
    """Return the map after a round, and int32[3*R*N] of the nodes that ran: tokens, parents, and
    which nodes exist.

    choices, kept  [R,N] of the round
    grown          int32[3*R*K] the drafts (drafting.py); trees of another shape than the map's are
                   not stored
    """
    slot = jnp.where(given.bounds.slot < 0, NOWHERE, given.bounds.slot)
    rows, count = len(slot), held.tokens.shape[1]
    last = jnp.where(kept, given.depth + 1, 0).argmax(1)
    token = jnp.maximum(jnp.take_along_axis(choices, last[:, None], 1)[:, 0], 0)
    values = jnp.full((rows, count), -jnp.inf)
    tokens = parents = jnp.zeros((rows, count), jnp.int32)
    if len(grown) == 3 * rows * count and count:
        tokens, parents, bits = grown.reshape(3, rows, count)
        follows = given.draft_slot[:, None] >= 0
        values = jnp.where(follows, lax.bitcast_convert_type(bits, jnp.float32), -jnp.inf)
    new = given.kv_len + kept.sum(1, dtype=jnp.int32), token, tokens, parents, values
    put = [into.at[slot].set(value, mode="drop") for into, value in zip(held, new, strict=True)]
    trees = given.trees
    ran = jnp.stack([trees.tokens, trees.parents, trees.real.astype(jnp.int32)])
    return FutureMap(*put), ran.reshape(-1)
