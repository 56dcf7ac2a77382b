"""Every sampling parameter in a program: forerun.speculative.sampling.process, and the choice.

Penalties, biases and early stop tokens come as one list of edited tokens for all rows, read up to
its length; a node adds its ancestors' draft tokens. Cut-offs need no sort: the k-th largest logit
is computed bit by bit, if a row needs it. The choice equals the host's bit for bit on machines with
the host's float32 arithmetic.

Only top_p sums numbers, on the host in float64: the program keeps one set of tokens that is
certainly too small and one that is certainly too large, and if these do not give the same choice
there is none: then the host decides a root, and a draft token's node is not accepted. The host
decides rows with accept thresholds.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.executors.device_choice import LEAST_TOP_P
from forerun.executors.jax.rounds.accept import NodeSampling, Trees, sampled
from forerun.executors.jax.rounds.batches import Batch
from forerun.executors.jax.rounds.reports import MASS_ERROR, mass, reports_logprobs
from forerun.executors.packed import Shapes, views_of, zeros_of
from forerun.speculative.accept import NOTHING
from forerun.speculative.sampling import History, Sampling
from forerun.types import Ints

Reaches = Callable[[Array], Array]
"""Whether values uint32[...] reach the requested count or mass, bool[...]."""

SEEN, BANNED = 1, 2
"""Flags of an edit: SEEN, the token was seen (repetition penalty); BANNED, it is a stop token."""

FEW_EDITS = 64
"""The usual maximum of tokens of a row with changed logits."""

MOST_BIASES = 512
"""The usual maximum of tokens in one request's biases and stop tokens."""

_READ = 256
"""Edits that are scattered at once."""


Edits = dict[int, tuple[int, int, float]]
"""By token: its count in the output, SEEN and BANNED, and its bias."""

EditsByRow = dict[int, tuple[Sampling, Edits]]
"""By row of a plan."""


def edits_of(sampling: Sampling, history: History) -> Edits:
    """Return the changes of single tokens' logits at a request's next output position: penalties'
    counts, early stop tokens, biases; may be empty.
    """
    found: Edits = {}
    if sampling.penalised:
        output = history.tokens[history.prompt_len :]
        for token, count in zip(*np.unique(output, return_counts=True), strict=True):
            found[int(token)] = (int(count), SEEN, 0.0)
        if sampling.repetition_penalty != 1.0:
            for token in np.unique(history.tokens[: history.prompt_len]).tolist():
                found[token] = found.get(token, (0, SEEN, 0.0))
    if history.output_len < sampling.min_tokens:
        for token in sampling.stop_tokens:
            count, flags, bias = found.get(token, (0, 0, 0.0))
            found[token] = count, flags | BANNED, bias
    for token, value in sampling.logit_bias:
        count, flags, bias = found.get(token, (0, 0, 0.0))
        found[token] = count, flags, value if bias == 0.0 else bias + value
    return found


def room_for_edits(slots: int, context: int, vocab: int) -> int:
    """Return the number of edits of one dispatch, all rows together: some for each row, and one for
    each token of a whole context. A multiple of _READ.
    """
    needed = FEW_EDITS * slots + min(context, vocab) + MOST_BIASES
    return -(-needed // _READ) * _READ


FLOATS = ("repetition", "frequency", "presence", "min_p", "top_p")
"""Values of rows, stored in the vector as their bits."""


def shaping_shapes(rows: int, room: int) -> Shapes:
    """Return the parts of the int32 vector that `shaped` reads, for `room` edits.

    By row: bits of the penalties, of log(min_p), of top_p; top_k; min_tokens; reported, 1 if
    log-probabilities are reported. Then the number of edits, and of each: the row, the token, 4
    times its count in the output plus flags, and bits of the bias.
    """
    return {
        **dict.fromkeys((*FLOATS, "top_k", "min_tokens", "reported"), (rows,)),
        "edits": (1,),
        **dict.fromkeys(("row", "token", "counted", "bias"), (room,)),
    }


def packed_shaping(batch: Batch, by_row: EditsByRow, room: int, vocab: int) -> Ints:
    """Return the int32[total] vector of `shaping_shapes` for a batch; rows that are not in `by_row`
    have neutral values. Raises ValueError if there are more than `room` edits.
    """
    whole, views = zeros_of(shaping_shapes(batch.size.rows, room))
    views["row"][:] = batch.size.rows
    views["top_k"][:] = vocab
    for name in ("repetition", "top_p"):
        views[name].view(np.float32)[:] = 1.0
    views["min_p"].view(np.float32)[:] = -np.inf
    edits: list[tuple[int, int, int, float]] = []
    for line, row in enumerate(batch.rows):
        if row not in by_row:
            continue
        sampling, listed = by_row[row]
        views["repetition"].view(np.float32)[line] = sampling.repetition_penalty
        views["frequency"].view(np.float32)[line] = sampling.frequency_penalty
        views["presence"].view(np.float32)[line] = sampling.presence_penalty
        views["min_tokens"][line] = sampling.min_tokens
        views["reported"][line] = reports_logprobs(sampling)
        if sampling.top_k > 0:
            views["top_k"][line] = min(sampling.top_k, vocab)
        views["top_p"].view(np.float32)[line] = sampling.top_p
        if sampling.min_p > 0:
            views["min_p"].view(np.float32)[line] = np.log(sampling.min_p)
        edits += [(line, token, 4 * n + flags, b) for token, (n, flags, b) in listed.items()]
    views["edits"][0] = len(edits)
    if edits:
        rows, tokens, counted, bias = zip(*edits, strict=True)
        given = ("row", rows), ("token", tokens), ("counted", counted)
        for name, values in given:
            views[name][: len(edits)] = values
        views["bias"].view(np.float32)[: len(edits)] = bias
    return whole


class JaxShaping(NamedTuple):
    """The vector's parts inside a program; [R], [1] and [room]."""

    repetition: Array
    frequency: Array
    presence: Array
    min_p: Array
    top_p: Array
    top_k: Array
    min_tokens: Array
    reported: Array
    edits: Array
    row: Array
    token: Array
    counted: Array
    bias: Array

    @classmethod
    def of(cls, whole: Array, rows: int, room: int) -> "JaxShaping":
        """Return the parts of an int32[total] vector of `shaping_shapes(rows, room)` inside a
        program.
        """
        views = views_of(whole, shaping_shapes(rows, room))
        for name in (*FLOATS, "bias"):
            views[name] = lax.bitcast_convert_type(views[name], jnp.float32)
        return cls(**views)


class Edited(NamedTuple):
    """The edits by token, [R,V]: count in the output, bools seen and banned, the bias."""

    counts: Array
    seen: Array
    banned: Array
    bias: Array

    @classmethod
    def of(cls, shaping: JaxShaping, rows: int, vocab: int) -> "Edited":
        """Return the edits of `rows` rows as tables [R,V]: counts int32, seen and banned bool, bias
        float32. They are scattered _READ at a time: a program reads no more than there are.
        """

        def read(number: Array, tables: tuple[Array, Array]) -> tuple[Array, Array]:
            row, token, counted, bias = (
                lax.dynamic_slice(part, (number * _READ,), (_READ,))
                for part in (shaping.row, shaping.token, shaping.counted, shaping.bias)
            )
            counts, biases = tables
            return (
                counts.at[row, token].set(counted, mode="drop"),
                biases.at[row, token].set(bias, mode="drop"),
            )

        start = jnp.zeros((rows, vocab), jnp.int32), jnp.zeros((rows, vocab), jnp.float32)
        blocks = (shaping.edits[0] + _READ - 1) // _READ
        counted, bias = lax.fori_loop(0, blocks, read, start)
        return cls(counted >> 2, counted & SEEN > 0, counted & BANNED > 0, bias)


def choose_shaped(
    logits: Array, sampling: NodeSampling, trees: Trees, shaping: JaxShaping, allowed: Array
) -> Array:
    """Return int32[R,N], the target's choice at R rows of N nodes under every sampling parameter.

    logits   float32[R,N,V]
    allowed  bool[R,N,V] of grammar masks

    NOTHING (-1) as in accept.choose, and if float32 sums cannot decide whether top_p keeps the
    choice: then the host decides.
    """
    rows, nodes, vocab = logits.shape
    finite = jnp.isfinite(logits.max(-1)) & ~jnp.isnan(logits).any(-1)
    listed = Edited.of(shaping, rows, vocab)
    edited = _edited(logits, trees, shaping, listed)
    early = sampling.positions.reshape(rows, nodes) < shaping.min_tokens[:, None]
    banned = listed.banned[:, None] & early[..., None]
    without = allowed & ~banned
    allowed = jnp.where(without.any(-1, keepdims=True), without, allowed)
    edited = jnp.where(allowed, edited, -jnp.inf)
    greedy = edited.argmax(-1).astype(jnp.int32)
    hot = (sampling.temperature > 0).reshape(rows, nodes)

    def drawn() -> tuple[Array, Array]:
        temperature = sampling.temperature.reshape(rows, nodes)
        heated = edited / jnp.where(hot, temperature, 1.0)[..., None]
        likely = heated >= heated.max(-1, keepdims=True) + shaping.min_p[:, None, None]
        heated = jnp.where(likely, heated, -jnp.inf)
        counted, summed = (shaping.top_k < vocab).any(), (shaping.top_p < 1.0).any()
        every = jnp.ones(heated.shape, bool)
        kept = lax.cond(counted, lambda: _largest(heated, shaping.top_k[:, None]), lambda: every)
        heated = jnp.where(kept, heated, -jnp.inf)
        fewer, more = lax.cond(
            summed, lambda: _nuclei(heated, shaping.top_p[:, None]), lambda: (every, every)
        )
        most = jnp.where(more, heated, -jnp.inf)
        token = sampled(most.reshape(-1, vocab), sampling).reshape(rows, nodes)
        sure = jnp.take_along_axis(fewer, token[..., None], -1)[..., 0]
        return token, sure

    token, sure = lax.cond(hot.any(), drawn, lambda: (greedy, jnp.ones_like(hot)))
    token = jnp.where(hot, token, greedy)
    best = jnp.take_along_axis(edited, token[..., None], -1)[..., 0]
    good = finite & jnp.isfinite(best) & (sure | ~hot)
    return jnp.where(good, token, NOTHING).astype(jnp.int32)


def _edited(logits: Array, trees: Trees, shaping: JaxShaping, listed: Edited) -> Array:
    """Apply penalties and biases; a product is rounded before anything is added to it."""
    rows, nodes, vocab = logits.shape
    above = trees.seen & (jnp.arange(nodes) > 0)
    line, node, _ = jnp.indices((rows, nodes, nodes))
    tokens = jnp.broadcast_to(trees.tokens[:, None], (rows, nodes, nodes))
    drafted = jnp.zeros((rows, nodes, vocab), jnp.int32)
    drafted = drafted.at[line, node, tokens].add(above.astype(jnp.int32), mode="drop")
    counts = listed.counts[:, None] + drafted
    seen = listed.seen[:, None] | (drafted > 0)
    repetition, frequency, presence = (
        part[:, None, None] for part in (shaping.repetition, shaping.frequency, shaping.presence)
    )
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    often = frequency * counts.astype(jnp.float32)
    there = presence * (counts > 0).astype(jnp.float32)
    repeated, often, there = lax.optimization_barrier((repeated, often, there))
    edited: Array = jnp.where(seen, repeated, logits) - often - there
    return edited + listed.bias[:, None]


def _ordered(values: Array) -> Array:
    """Return uint32 that order as float32 values do; both zeros are equal."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    negative = bits >> 31 > 0
    return jnp.where(negative, ~bits, bits | np.uint32(1 << 31))


def _bitwise(reaches: Reaches, shape: tuple[int, ...]) -> Array:
    """Return the largest uint32 for which `reaches` is True, if it is True for all below; else
    0.
    """

    def step(index: Array, found: Array) -> Array:
        candidate = found | (np.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(reaches(candidate), candidate, found)

    found: Array = lax.fori_loop(0, 32, step, jnp.zeros(shape, jnp.uint32))
    return found


def _before(ties: Array) -> Array:
    """Return int32[...,V], the number of ties with a lower id."""
    return jnp.cumsum(ties, -1, dtype=jnp.int32) - ties.astype(jnp.int32)


def _largest(values: Array, count: Array) -> Array:
    """Return bool[...,V], the `count` [...] largest, ties to the lowest id."""
    keys = _ordered(values)

    def reaches(least: Array) -> Array:
        return (keys >= least[..., None]).sum(-1) >= count

    least = _bitwise(reaches, values.shape[:-1])[..., None]
    above, ties = keys > least, keys == least
    spare = count[..., None] - above.sum(-1, keepdims=True)
    return above | (ties & (_before(ties) < spare))


def _nuclei(values: Array, top_p: Array) -> tuple[Array, Array]:
    """Return bool[...,V] twice: fewer and more tokens than the most probable ones with mass top_p
    [...].
    """
    keys = _ordered(values)
    weights = jnp.exp(values - values.max(-1, keepdims=True))
    whole = mass(weights)

    def cut(needed: Array) -> Array:
        def reaches(least: Array) -> Array:
            return mass(jnp.where(keys >= least[..., None], weights, 0.0)) >= needed

        least = _bitwise(reaches, values.shape[:-1])[..., None]
        above, ties = keys > least, keys == least
        before = mass(jnp.where(above, weights, 0.0))[..., None]
        return above | (ties & (before + _before(ties) * weights < needed[..., None]))

    every = (top_p >= 1.0)[..., None]
    top_p = jnp.maximum(top_p, LEAST_TOP_P)
    fewer, more = (cut(whole * top_p * (1 + sign * MASS_ERROR)) for sign in (-1, 1))
    return fewer | every, more | every
