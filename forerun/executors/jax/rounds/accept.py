"""The target's choices and the accepted path, inside a program: forerun.speculative.accept.

A node's choice is the argmax of logits / temperature + noise, in float32, ties to the lowest id.
Noise is computed for all tokens in float32, which is almost always exact enough to leave one token;
if several are within its error, their exact noise decides, token by token. So the choice is the
host's.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.executors.jax.rounds.noise import (
    APPROXIMATE_ERROR,
    approximate,
    exact,
    noise_words,
    words_of,
)
from forerun.speculative.accept import NOTHING


class NodeSampling(NamedTuple):
    """Sampling parameters of n nodes.

    seeds        uint32[2,n] low and high halves of their requests' seeds
    positions    int32[n] output position that each decides
    temperature  float32[n]; 0 = greedy
    """

    seeds: Array
    positions: Array
    temperature: Array

    def further(self, levels: Any) -> "NodeSampling":
        """Return the parameters of nodes that are `levels` levels deeper."""
        return self._replace(positions=self.positions + levels)

    def repeated(self, times: int) -> "NodeSampling":
        """Return the parameters of n nodes, each repeated `times` times, contiguously."""
        return NodeSampling(*(jnp.repeat(part, times, -1) for part in self))


def choose(logits: Array, sampling: NodeSampling, allowed: Array | None = None) -> Array:
    """Return the target's choice at each of n nodes, int32[n]: argmax of logits / temperature +
    noise.

    logits   float32[n,V]
    allowed  bool[n,V], None = everything

    NOTHING (-1) if a logit is NaN or +inf, or no token is allowed. Equals
    forerun.speculative.accept.choose on the same logits.
    """
    finite = jnp.isfinite(logits.max(-1))
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    hot = sampling.temperature > 0
    scaled = logits / jnp.where(hot, sampling.temperature, 1.0)[:, None]
    greedy = logits.argmax(-1).astype(jnp.int32)
    drawn = lax.cond(hot.any(), lambda: sampled(scaled, sampling), lambda: greedy)
    token = jnp.where(hot, drawn, greedy)
    best = jnp.take_along_axis(scaled, token[:, None], 1)[:, 0]
    return jnp.where(finite & jnp.isfinite(best), token, NOTHING).astype(jnp.int32)


def sampled(scaled: Array, sampling: NodeSampling) -> Array:
    """Return int32[n], the argmax of scaled float32[n,V] plus Gumbel noise, ties to the lowest id.

    `scaled` are logits over the temperature. Noise in float32 leaves one token almost always; among
    those within its error of the best, exact noise decides, so the result is that of exact noise
    throughout.
    """
    words = noise_words(sampling.seeds, sampling.positions, scaled.shape[1])
    near = scaled + approximate(words)
    best = near.max(-1)
    # Each of two scores has the noise's error and a rounding error of the sum.
    margin = 2 * APPROXIMATE_ERROR + jnp.abs(best) * np.float32(2.0**-21)
    pending = near >= (best - margin)[:, None]
    pending &= (pending.sum(-1) > 1)[:, None]
    start = pending, jnp.full_like(best, -jnp.inf), near.argmax(-1).astype(jnp.int32)

    def examine(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Decide the lowest pending token of every node."""
        pending, score, token = state
        candidate = pending.argmax(-1).astype(jnp.int32)
        noise = exact(words_of(sampling.seeds, sampling.positions, candidate))
        found = jnp.take_along_axis(scaled, candidate[:, None], 1)[:, 0] + noise
        better = pending.any(-1) & (found > score)
        column = lax.broadcasted_iota(jnp.int32, pending.shape, 1)
        return (
            pending & (column != candidate[:, None]),
            jnp.where(better, found, score),
            jnp.where(better, candidate, token),
        )

    return lax.while_loop(lambda state: state[0].any(), examine, start)[2]


class Trees(NamedTuple):
    """R rows of N nodes, [R,N] each: tokens; parents within the row (root: below 0); seen, the
    attention mask bool[R,N,N] (itself and its ancestors); and real, which nodes exist, in rows that
    are decided here.
    """

    tokens: Array
    parents: Array
    seen: Array
    real: Array


def twins(trees: Trees) -> Array:
    """Return bool[R,N]: nodes whose token an earlier child of the same parent has too; they can
    never be accepted.
    """
    tokens, parents = trees.tokens, trees.parents
    order = jnp.arange(tokens.shape[1])
    same = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    doubled: Array = (same & (order[:, None] > order)).any(-1)
    return doubled


def walk(choices: Array, trees: Trees) -> Array:
    """Return bool[R,N], the nodes on the accepted path, its root included.

    choices  int32[R,N] of all nodes, NOTHING for none

    The rule of forerun.speculative.accept without a loop: a node is right where it is the first
    child of its parent that drafts the parent's choice, and has a choice itself; it is kept where
    it and everything above it is right. Padding and undecided rows (`trees.real` False) are never
    kept.
    """
    tokens, parents = trees.tokens, trees.parents
    order = jnp.arange(tokens.shape[1])
    drafted = tokens == jnp.take_along_axis(choices, jnp.maximum(parents, 0), 1)
    right = ((drafted & ~twins(trees)) | (order == 0)) & (choices != NOTHING) & trees.real
    kept: Array = ~(trees.seen & ~right[:, None]).any(-1)
    return kept


def unpacked(bits: Array, vocab: int) -> Array:
    """Return bool[n,V] of grammar masks uint32[n,ceil(V/32)]: bit t % 32 of word t // 32 is token
    t.
    """
    token = jnp.arange(vocab)
    return (bits[:, token // 32] >> (token % 32).astype(jnp.uint32)) & 1 > 0
