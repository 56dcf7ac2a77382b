r"""Accept thresholds: accept draft tokens that the target did not choose.

SGLang's rule (`tree_speculative_sampling_target_only`) at one node, p the target's distribution
after all sampling parameters, u one coin in [0, 1), x_1 .. x_k the children in their order:

    accept the first x_i with p(x_i) > 0 and (u < (p(x_1) + .. + p(x_i)) / threshold_acc
                                              or p(x_i) >= threshold_single);
    if there is none, draw from p without x_1 .. x_k.

Here the coin depends on the target's choice c (accept.py): the children's probabilities divide
[0, 1) in their order, the rest of the vocabulary takes the remainder, and u lies within c's part,
at a place that is a function of (seed, position), like the noise. u is uniform if the children do
not depend on the noise, and a c outside of the children is the draw that the rule requires. With
both thresholds 1 the first x_i with u < p(x_1) + .. + p(x_i) is c itself: the lossless rule.

A threshold below 1 is lossy: the text depends on what was drafted, so a seed does not reproduce it
in another batch. Greedy decoding ignores thresholds, as in SGLang: its distribution is one token.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from forerun.speculative.noise import coin
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import TreeBatch
from forerun.types import Floats

LEAST_DIVISOR = 1e-9
"""The divisor for a threshold_acc of 0, as in SGLang."""


def relaxed(
    processed: Floats, sampling: Sampling, position: int, drafted: Sequence[int], chosen: int
) -> int:
    """Return the token that follows a node: one of `drafted` that the thresholds accept, or
    `chosen`.

    processed  float32[V] as in accept.choose
    position   output position that the node decides
    drafted    tokens of the node's children, in their order; at least one
    chosen     the target's choice there, not NOTHING

    Computes in float64. Changes nothing; equal to `chosen` if both thresholds are 1.
    """
    tokens = list(dict.fromkeys(drafted))
    weights = np.exp(processed.astype(np.float64) - float(processed.max()))
    shares = weights[tokens] / weights.sum()
    ends = shares.cumsum()
    low, high = float(ends[-1]), 1.0
    if chosen in tokens:
        place = tokens.index(chosen)
        low, high = float(ends[place] - shares[place]), float(ends[place])
    thrown = low + coin(sampling.seed, position) * (high - low)
    single, divisor = sampling.accept_thresholds
    divisor = max(divisor, LEAST_DIVISOR)
    for token, share, end in zip(tokens, shares.tolist(), ends.tolist(), strict=True):
        likely = single < 1 and share >= single
        if share > 0 and (token == chosen or likely or thrown < end / divisor):
            return token
    return chosen


def children(trees: TreeBatch, row: int, node: int) -> Iterator[int]:
    """Yield the target ids of the draft tokens right below flat node `node` of `row`, in their
    order.
    """
    for below in range(node + 1, int(trees.start[row + 1])):
        if trees.parents[below] == node:
            yield int(trees.tokens[below])
