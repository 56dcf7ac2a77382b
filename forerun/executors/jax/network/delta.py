"""A gated delta net (layer_spec.GatedDelta) as pure functions: how a state becomes the next one,
and what nodes read of it. What it computes is torch/decoder's, node by node.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.jax.network.weights import Params
from forerun.networks.layer_spec import GatedDelta

_LEAST = 1e-6
"""Keeps the length of a query or a key from zero; the published model's."""


class DeltaTokens(NamedTuple):
    """What nodes advance states by and read them with: float32.

    queries, keys  [R,N,Hv,Dk], values [R,N,Hv,Dv]
    decay, beta    [R,N,Hv]
    """

    queries: Array
    keys: Array
    values: Array
    decay: Array
    beta: Array

    def by_node(self) -> "DeltaTokens":
        """Return the same with the axis of nodes first."""
        return DeltaTokens(*(part.swapaxes(0, 1) for part in self))


def tokens_of(about: GatedDelta, weights: Params, sums: Array, gates: Array) -> DeltaTokens:
    """Return the tokens of nodes, from the convolution's sums float32[R,N,C], and b and a
    [R,N,2Hv].
    """
    passed = sums / (1 + jnp.exp(-sums))
    parts = jnp.split(passed, [about.keys, 2 * about.keys], -1)
    heads = about.value_heads, about.value_size
    queries, keys = (
        _of_value_heads(about, _of_unit_length(part.reshape(*part.shape[:2], -1, about.key_size)))
        for part in parts[:2]
    )
    b, a = jnp.split(gates, 2, -1)
    a = a + weights["linear_attn.dt_bias"]
    soft = jnp.maximum(a, 0) + jnp.log1p(jnp.exp(-jnp.abs(a)))
    return DeltaTokens(
        queries * about.key_size**-0.5,
        keys,
        parts[2].reshape(*passed.shape[:2], *heads),
        jnp.exp(-jnp.exp(weights["linear_attn.A_log"]) * soft),
        1 / (1 + jnp.exp(-b)),
    )


def _of_unit_length(x: Array) -> Array:
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + _LEAST)


def _of_value_heads(about: GatedDelta, x: Array) -> Array:
    """Return [R,N,Hv,Dk] of key heads [R,N,Hk,Dk]: several value heads share one."""
    times = about.value_heads // about.key_heads
    return jnp.tile(x, (1, 1, times, 1)) if about.tiled else jnp.repeat(x, times, 2)


def _step(states: Array, token: DeltaTokens) -> Array:
    """Return states [R,Hv,Dk,Dv] behind one token of each row."""
    keys = token.keys[..., None]
    states = states * token.decay[..., None, None]
    change = (token.values - (states * keys).sum(-2)) * token.beta[..., None]
    return states + keys * change[..., None, :]


def _read(states: Array, token: DeltaTokens) -> Array:
    return (states * token.queries[..., None]).sum(-2)


def along_chains(states: Array, tokens: DeltaTokens, real: Array) -> tuple[Array, Array]:
    """Return float32[R,N,Hv,Dv], what nodes of chains read, and the states behind the last that are
    `real`, bool[R,N].
    """

    def once(states: Array, given: tuple[DeltaTokens, Array]) -> tuple[Array, Array]:
        token, there = given
        after = jnp.where(there[:, None, None, None], _step(states, token), states)
        return after, _read(after, token)

    last, found = lax.scan(once, states, (tokens.by_node(), real.swapaxes(0, 1)))
    return found.swapaxes(0, 1), last


def along_trees(states: Array, tokens: DeltaTokens, parents: Array) -> Array:
    """Return float32[R,N,Hv,Dv], what nodes with these parents [R,N] (below 0: none) read: each
    state is made of its parent's, and all are kept until the last node.
    """
    rows, nodes = parents.shape
    every = jnp.zeros((nodes + 1, *states.shape), states.dtype).at[0].set(states)
    each = jnp.arange(rows)

    def once(every: Array, given: tuple[DeltaTokens, Array, Array]) -> tuple[Array, Array]:
        token, parent, number = given
        after = _step(every[jnp.maximum(parent + 1, 0), each], token)
        return every.at[number].set(after), _read(after, token)

    numbers = jnp.arange(1, nodes + 1)
    _, found = lax.scan(once, every, (tokens.by_node(), parents.swapaxes(0, 1), numbers))
    return found.swapaxes(0, 1)


def along_path(states: Array, tokens: DeltaTokens, kept: Array, ends: Array) -> tuple[Array, Array]:
    """Return the states behind the nodes bool[R,N] of a path, and behind the last of `ends`."""

    def once(
        held: tuple[Array, Array], given: tuple[DeltaTokens, Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        states, copy = held
        token, there, full = (given[0], *(each[:, None, None, None] for each in given[1:]))
        states = jnp.where(there, _step(states, token), states)
        return (states, jnp.where(full, states, copy)), None

    given = tokens.by_node(), kept.swapaxes(0, 1), ends.swapaxes(0, 1)
    return lax.scan(once, (states, states), given)[0]
