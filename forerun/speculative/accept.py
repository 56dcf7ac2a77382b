r"""Acceptance: which root-to-node path of a tree is kept, and the token that follows it.

Gumbel-max coupled acceptance (drafter-invariant speculative decoding, arXiv 2408.07978).

Symbols. x_n is the token at output position n and x_<n everything before it. p(. | x_<n) is the
target's distribution after all sampling parameters, g_n(t) the noise of token t at position n:
independent standard Gumbel variables, a function of (seed, n, t) and of nothing else.

Rule. At every node, with prefix x_<n, the target's own choice is

    c(x_<n) = argmax over t of  log p(t | x_<n) + g_n(t),      ties to the lowest id.

Start at the root. While the node has a child whose token *is* the choice, accept that child and
go there. Where it has none, emit the choice and stop.

Proof that it is lossless, for any tree, drafter and temperature. (1) Every emitted token is the
choice at its own prefix: accepted ones because they equal it, the last one by the rule. So the
output is the sequence x_n = c(x_<n), the very sequence that plain decoding (a tree of one node)
emits with this seed; which tree was offered decides only how many of them a step emits.
(2) P(c(x_<n) = t) = p(t | x_<n): the Gumbel-max identity, P(argmax_t log p_t + g_t = t) =
exp(log p_t) / sum_s exp(log p_s). The noise of position n is used at position n only and is
independent of all earlier noise, hence of x_<n, so the joint distribution is the product of
these conditionals: the target's. Nothing is assumed of the draft tokens, which may even depend on
g_n. Log-probabilities may be replaced by logits, since a constant moves no argmax; greedy
decoding is g = 0 at temperature 0.

Thresholds below 1 (thresholds.py) are another rule, on request, and not lossless.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forerun.speculative.noise import gumbel, gumbel_of
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import TreeBatch
from forerun.types import Floats, Ints

NOTHING = -1
"""No choice: the logits are not finite, or no token is allowed."""

ChooseAt = Callable[[int, tuple[int, ...]], int]
"""(flat node, draft tokens from below the root down to it) -> the target's choice, or NOTHING."""
FEW = 2048
"""If at most this many tokens are allowed, noise is computed for these alone, not for all V."""


@dataclass(frozen=True, slots=True)
class Path:
    """The result of acceptance for one row.

    nodes   flat indices of the accepted draft tokens from the root down, root excluded
    tokens  the emitted tokens: the accepted draft tokens', then the target's own; empty if the root
            has no choice
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


def choose(processed: Floats, sampling: Sampling, position: int) -> int:
    """Return the target's choice c at output position `position` (the first output token has 0).

    processed  float32[V] logits after `sampling.process`, left unchanged

    Returns a target id, ties to the lowest; NOTHING if a value is NaN or +inf, or all are -inf.
    Computes in float32. At temperature 0 the noise is 0.
    """
    scores = processed
    if sampling.temperature > 0:
        scores = processed + gumbel(sampling.seed, position, len(processed))
    token = int(scores.argmax())  # The first of equals; a NaN counts as the largest of all.
    return token if np.isfinite(scores[token]) else NOTHING


def choose_left(processed: Floats, sampling: Sampling, position: int) -> int:
    """Return the same as `choose`. If `processed` leaves at most FEW tokens, noise is computed for
    these alone: cut-offs often leave ten of V.
    """
    left = processed != -np.inf
    if sampling.temperature == 0 or np.count_nonzero(left) > FEW:
        return choose(processed, sampling, position)
    tokens = np.flatnonzero(left).astype(np.int32)
    if len(tokens) == 0:
        return NOTHING
    scores = processed[tokens] + gumbel_of(sampling.seed, position, tokens)
    best = int(scores.argmax())
    return int(tokens[best]) if np.isfinite(scores[best]) else NOTHING


def choose_among(logits: Floats, tokens: Ints, sampling: Sampling, position: int) -> int:
    """Return the same as `choose`, for the case that only `tokens` are allowed and temperature is
    the only sampling parameter. Computes these tokens only: a grammar often allows two or three.

    logits    float32[V] the target's own, before any sampling parameter, left unchanged
    tokens    int32[n] allowed ids, ascending
    position  output position to decide

    Returns one of `tokens`; NOTHING if there is none or the best logit is not finite.
    """
    if len(tokens) == 0:
        return NOTHING
    scores = logits[tokens]
    if sampling.temperature > 0 and len(tokens) > 1:
        scores = scores / np.float32(sampling.temperature)
        scores += gumbel_of(sampling.seed, position, tokens)
    best = int(scores.argmax())
    return int(tokens[best]) if np.isfinite(scores[best]) else NOTHING


def accept_row(trees: TreeBatch, row: int, choose_at: ChooseAt) -> Path:
    """Return the accepted path of one row: its root, then the target's choices (rule and proof
    above).

    choose_at is called for nodes of the accepted path only, root first, at most depth + 1 times.

    Returns a `Path`, empty if the root has no choice. A draft token whose logits give no choice is
    not accepted: the step ends before it, and the next step fails at its root, as plain decoding
    does. Changes nothing.
    """
    nodes = [trees.root(row)]
    tokens = [choose_at(nodes[0], ())]
    if tokens == [NOTHING]:
        return Path((), ())
    while (child := _child(trees, row, nodes[-1], tokens[-1])) is not None:
        token = choose_at(child, tuple(tokens))
        if token == NOTHING:
            break
        nodes.append(child)
        tokens.append(token)
    return Path(tuple(nodes[1:]), tuple(tokens))


def _child(trees: TreeBatch, row: int, node: int, token: int) -> int | None:
    """Return the first child of `node` that drafts `token`."""
    below = slice(node + 1, int(trees.start[row + 1]))
    if below.start == below.stop:
        return None
    matching = np.flatnonzero((trees.parents[below] == node) & (trees.tokens[below] == token))
    return node + 1 + int(matching[0]) if len(matching) else None
