"""Log-probabilities, computed where the logits are, so that only the reported values are copied to
the host.

A line is int32[1 + 2*k]: bits of one token's log-probability, the ids of the k most probable
tokens, best first, ties by lowest id, and bits of theirs; k = TOP, or the vocabulary size if that
is smaller. They are raw, before any sampling parameter, in nats, in float32.
"""

import jax.numpy as jnp
from jax import Array, lax

from forerun.speculative.sampling import Sampling

TOP = 20
"""The most alternatives of a token that a program can report; the host computes more."""

REPORTED = 16
"""Prompt tokens whose log-probabilities are computed in one dispatch."""

MASS_ERROR = 1e-4
"""Bound of the relative error of a sum of probabilities in float32: about 900 consecutive roundings
of 2**-24 each, and two of every exponential.
"""

_RUN = 256
"""Probabilities that are added one after the other."""


def reports_logprobs(sampling: Sampling) -> bool:
    """Return whether a program reports the log-probabilities of the tokens it chooses: the request
    has logprobs, and at most TOP alternatives.
    """
    return sampling.logprobs is not None and sampling.logprobs <= TOP


def line_size(vocab: int) -> int:
    """Return the number of elements of a line: 1 + 2 * min(TOP, vocab)."""
    return 1 + 2 * min(TOP, vocab)


def mass(weights: Array) -> Array:
    """Return float32[...], sums of [...,V] over the last axis, in runs of _RUN, so that the
    relative error stays below MASS_ERROR.
    """
    vocab = weights.shape[-1]
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, -vocab % _RUN)]
    runs = jnp.pad(weights, padding).reshape(*weights.shape[:-1], -1, _RUN)
    partial: Array = lax.optimization_barrier(runs.sum(-1))
    return partial.sum(-1)


def lines(logits: Array, tokens: Array) -> Array:
    """Return int32[n,line_size]: one line per node, as described above.

    logits  float32[n,V]
    tokens  int32[n] whose own log-probability comes first; below 0 counts as token 0
    """
    best, ids = lax.top_k(logits, min(TOP, logits.shape[1]))
    # A slice of `best` would make XLA's CPU backend sort the whole vocabulary: 143 ms, not 1.3.
    most = logits.max(-1, keepdims=True)
    normaliser = most + jnp.log(mass(jnp.exp(logits - most)))[:, None]
    own = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], 1)
    bits = lax.bitcast_convert_type(
        jnp.concatenate([own - normaliser, best - normaliser], 1), jnp.int32
    )
    return jnp.concatenate([bits[:, :1], ids, bits[:, 1:]], 1)
