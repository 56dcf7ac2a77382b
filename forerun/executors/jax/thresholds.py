"""Accept thresholds in a program: forerun.speculative.thresholds at every node at once.

The host adds probabilities up in float64. Here every share of a child is an interval that holds the
host's, and so is the coin's place: a child that certainly passes is taken, one that certainly does
not is passed over, and where the first that may pass is neither, there is no choice: then the host
decides, of a draft token's node nobody does.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from forerun.executors.jax.accept import Rules, Trees, twins
from forerun.executors.jax.noise import coins
from forerun.executors.jax.reports import MASS_ERROR, mass
from forerun.speculative.sampling import Sampling
from forerun.speculative.thresholds import LEAST_DIVISOR

NEVER = 2.0
"""A threshold_single that no probability reaches."""

_ROUNDINGS = 1e-6
"""Relative error of a few float32 operations, at most."""

_BELOW = 1 - 2.0**-24
"""The largest float32 below 1."""

_SMALLEST = 1e-37
"""What float32 makes of a weight is wrong by its errors, or by less than this."""

_VANISHED, _THERE = -750.0, -700.0
"""Logits below the best one whose weight is 0 in float64, and whose weight is not."""


class Cut(NamedTuple):
    """What cut-offs leave of logits float32[R,N,V], and bool[R,N,V] fewer and more tokens than
    those that top_p leaves of them.
    """

    logits: Array
    fewer: Array
    more: Array


def packed_thresholds(sampling: Sampling) -> tuple[float, float]:
    """threshold_single, at most 1 or NEVER, and the divisor, 1 only where acc is, as float32."""
    single, acc = sampling.accept_thresholds if sampling.lossy else (1.0, 1.0)
    return (single if single < 1 else NEVER), (
        max(min(acc, _BELOW), LEAST_DIVISOR) if acc < 1 else 1.0
    )


class _Range(NamedTuple):
    """Bounds of a number."""

    low: Array
    high: Array


def relaxed(
    cut: Cut, chosen: Array, trees: Trees, rules: Rules, thresholds: tuple[Array, Array]
) -> tuple[Array, Array]:
    """int32[R,N] tokens that follow the nodes, where they are certain: bool[R,N].

    chosen      int32[R,N] the target's choices, which top_p leaves
    thresholds  float32[R] each: single, divisor
    """
    rows, nodes = chosen.shape
    single, divisor = (part[:, None, None] for part in thresholds)
    children = trees.parents[:, None] == jnp.arange(nodes)[:, None]
    children &= ~twins(trees)[:, None]
    share, possible, excluded = _shares(cut, children, trees)
    ends = _Range(share.low.cumsum(-1), share.high.cumsum(-1))
    token = jnp.broadcast_to(trees.tokens[:, None], children.shape)
    is_choice = children & (token == chosen[..., None])
    thrown = _thrown(ends, is_choice, coins(rules.seeds, rules.positions).reshape(rows, nodes))
    below, above = 1 - _ROUNDINGS, 1 + _ROUNDINGS
    passes = (share.low * below >= single) | (thrown.high < ends.low / divisor * below)
    fails = (share.high * above < single) & (thrown.low >= ends.high / divisor * above)
    passes = children & possible & (is_choice | passes)
    fails = ~children | excluded | (~is_choice & fails)
    first = (~fails).argmax(-1)[..., None]
    taken, certain = (jnp.take_along_axis(part, first, -1)[..., 0] for part in (token, passes))
    none = fails.all(-1)
    return jnp.where(none, chosen, taken), none | certain


def _shares(cut: Cut, children: Array, trees: Trees) -> tuple[_Range, Array, Array]:
    """Probabilities of the children [R,N,N], 0 of others; which certainly have one, and which
    certainly have none.
    """
    below = cut.logits - cut.logits.max(-1, keepdims=True)
    weights = jnp.exp(below)
    least, most = (mass(jnp.where(part, weights, 0.0))[..., None] for part in (cut.fewer, cut.more))
    tokens = jnp.broadcast_to(trees.tokens[:, None], children.shape)
    fewer, more, depth = (
        jnp.take_along_axis(part, tokens, -1) for part in (cut.fewer, cut.more, below)
    )
    weight = jnp.exp(depth)
    low = weight / most * np.float32(1 - MASS_ERROR)
    high = (weight + np.float32(_SMALLEST)) / least * np.float32(1 + MASS_ERROR)
    share = _Range(
        jnp.where(children & fewer & (weight > _SMALLEST), low, 0.0),
        jnp.where(children & more, high, 0.0),
    )
    return share, fewer & (depth > _THERE), ~more | (depth < _VANISHED)


def _thrown(ends: _Range, is_choice: Array, coin: Array) -> _Range:
    """Where the coins float32[R,N] fall: within the choice's part of [0, 1), which is a child's or
    what the children leave; [R,N,1].
    """
    among = is_choice.any(-1, keepdims=True)
    coin = coin[..., None]

    def bound(ends: Array, error: float) -> Array:
        before = jnp.pad(ends[..., :-1], ((0, 0), (0, 0), (1, 0)))
        begin, end = (
            jnp.where(is_choice, part, 0.0).sum(-1, keepdims=True) for part in (before, ends)
        )
        begin, end = jnp.where(among, begin, ends[..., -1:]), jnp.where(among, end, 1.0)
        return (begin * (1 - coin) + end * coin) * np.float32(1 + error)

    return _Range(bound(ends.low, -_ROUNDINGS), bound(ends.high, _ROUNDINGS))
