"""Grows draft trees, for every kind of drafter: selects which draft tokens to propose.

Level by level (EAGLE-2, arXiv 2406.16858, section 4). Expand (4.1): the `width` nodes of the newest
level whose paths the drafter finds most probable get their `width` best children. Rerank (4.2): of
all nodes grown, keep the best N. A node's value is the drafter's probability of its whole path, so
no child has a higher value than its parent, and the best N, ties to the earlier node, are connected
without further checks. `DraftTree` does that.

Best first. If children cost nothing to compute, the next draft token is always the most probable
known path that is not in the tree yet: `best_first`. A block's marginals (DDTree, arXiv 2604.12989,
`block_draft`) and the n-gram table's votes grow like this.

Captured steps grow level by level in fixed shapes (executors/torch/captured/drafting.py grows,
triton_future.py reranks); `full_size` and `full_draft` are the part that host and device share.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from forerun.speculative.tree import Draft, DraftSource, full_size
from forerun.types import AnyArray, Floats, Ints


class DraftTree:
    """A tree while it grows level by level. `tokens`, `parents`, `value` are append-only.

    tokens   int32[.]   as in Draft
    parents  int32[.]   as in Draft
    value    float32[.] log-probability of the whole path to the node, never above its parent's
    levels   how many have been grown

    A drafter of many rows has one tree per row and expands all of them in one forward pass.
    """

    def __init__(self, width: int) -> None:
        self.tokens: Ints = np.zeros(0, np.int32)
        self.parents: Ints = np.zeros(0, np.int32)
        self.value: Floats = np.zeros(0, np.float32)
        self.levels = 0
        self._width = width
        self._newest = 0

    def frontier(self) -> Ints:
        """Return int32[F]: the `width` best nodes of the newest level; at first [-1], the root."""
        if not self.levels:
            return np.array([-1], np.int32)
        best = _best(self.value[self._newest :], self._width)
        return (self._newest + best).astype(np.int32)

    def best(self) -> float:
        """Return the probability of the best path to the newest level; -1.0 if that level has no
        nodes.
        """
        newest = self.value[self._newest :]
        return float(np.exp(newest.max())) if len(newest) else -1.0

    def extend(self, tokens: Ints, log_probs: Floats) -> None:
        """Append children below `frontier()`, row i below node i.

        tokens     int32[F,k] for the F nodes of `frontier()`
        log_probs  float32[F,k] given the node's path; -inf = no such child

        A log-probability that is NaN counts as -inf, one above 0 as 0.
        """
        above = self.frontier()
        base = np.append(self.value, np.float32(0))[above]  # Index -1, the root, is worth 0.
        value = base[:, None] + np.minimum(log_probs, 0)
        real = value > -np.inf  # False for NaN too.
        parents = np.broadcast_to(above[:, None], real.shape)
        self._newest = len(self.tokens)
        self.levels += 1
        self.tokens = np.append(self.tokens, tokens[real]).astype(np.int32)
        self.parents = np.append(self.parents, parents[real]).astype(np.int32)
        self.value = np.append(self.value, value[real]).astype(np.float32)

    @staticmethod
    def regrown(width: int, depth: int, tokens: Ints, parents: Ints, value: Floats) -> "DraftTree":
        """Return the first `depth` levels of a full tree grown elsewhere, at least as deep.

        Its arrays [K] are in the order of growth, with `width` children below each of the `width`
        nodes that were expanded per level; a value of -inf marks a missing node.
        """
        count = full_size(width, depth)
        real = value[:count] > -np.inf
        place = np.append(np.cumsum(real, dtype=np.int32) - np.int32(1), np.int32(-1))
        tree = DraftTree(width)
        tree.tokens, tree.value = tokens[:count][real], value[:count][real]
        tree.parents = place[parents[:count][real]]
        tree.levels = depth
        tree._newest = int(np.count_nonzero(real[: full_size(width, depth - 1)]))
        return tree

    def draft(self, nodes: int) -> Draft:
        """Return the best `nodes` nodes in the order of growth; all if there are fewer."""
        keep = _best(self.value, nodes)
        source = DraftSource.DRAFT_MODEL
        return pruned(self.tokens, self.parents, np.exp(self.value), keep, source)


def full_draft(
    width: int, depth: int, nodes: int, tokens: Ints, parents: Ints, value: Floats
) -> Draft:
    """Return the best `nodes` nodes of a full tree, cut to `depth` levels, in the order of growth.

    tokens, parents  int32[K] target ids, and the node above or -1; K is full_size(width, levels)
    value            float32[K] log-probability of each path in nats; -inf: the node does not exist

    Equals `DraftTree.regrown(width, depth, tokens, parents, value).draft(nodes)`; a chain (width 1)
    is cut without growing a tree.
    """
    if width > 1:
        return DraftTree.regrown(width, depth, tokens, parents, value).draft(nodes)
    value = value[: min(depth, nodes)]
    count = int(np.count_nonzero(value > -np.inf))
    parents = np.arange(-1, count - 1, dtype=np.int32)
    return Draft(tokens[:count], parents, np.exp(value[:count]), DraftSource.DRAFT_MODEL)


Offer = tuple[float, int, int, int, Any, DraftSource]
"""A path that may be drafted next: (minus its score, its rank among equal scores, its last token,
the draft token above or -1, state of the drafter, its source).
"""

Children = Callable[[Offer, int], Iterable[Offer]]
"""(an offer that was taken, its number among the draft tokens) -> new offers, none scored
higher.
"""


def best_first(first: Iterable[Offer], children: Children, nodes: int) -> Draft:
    """Return the `nodes` best paths below the root, best first, with the scores of the offers.

    If no offer scores above its parent, these are the best possible and connected.
    """
    heap = list(first)
    heapify(heap)
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    sources: list[int] = []
    while heap and len(tokens) < nodes:
        offer = heappop(heap)
        tokens.append(offer[2])
        parents.append(offer[3])
        scores.append(-offer[0])
        sources.append(offer[5])
        for more in children(offer, len(tokens) - 1):
            heappush(heap, more)
    return Draft(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(scores, np.float32),
        np.array(sources, np.int32),
    )


def block_draft(tokens: Ints, log_probs: Floats, nodes: int) -> Draft:
    """Return the best `nodes` paths of a block, best first.

    tokens     int32[depth,k]    candidates of each depth, best first, whatever the tokens above
    log_probs  float32[depth,k]  their log-probabilities; -inf or NaN = none from here on

    A path's weight is the product of its tokens' probabilities, as if depths were independent; then
    the heaviest nodes are connected and maximise the expected number of accepted tokens. Taking a
    node offers its next sibling and its first child, so at most two offers per node exist.
    """
    names, probs = tokens.tolist(), np.exp(np.minimum(log_probs, 0)).tolist()
    return path_draft(len(names), lambda path: (names[len(path)], probs[len(path)]), nodes)


Path = tuple[int, ...]
"""Draft tokens from below the root down."""

Ranked = tuple[Sequence[int], Sequence[float]]
"""Tokens and their probabilities, best first."""


def path_draft(depth: int, below: Callable[[Path], Ranked], nodes: int) -> Draft:
    """Return the best `nodes` paths of at most `depth` tokens, best first, as `block_draft` does.

    below  path -> the tokens that may follow it, and their probabilities; one not above 0 ends it
    """

    def offer(path: Path, choices: Ranked, rank: int, above: float, parent: int) -> list[Offer]:
        tokens, probs = choices
        if rank == len(tokens) or not probs[rank] > 0:
            return []
        state = (path, choices, rank, above)
        place = (len(path) << 20) + rank
        score = above * min(probs[rank], 1.0)
        return [(-score, place, tokens[rank], parent, state, DraftSource.DRAFT_MODEL)]

    def children(taken: Offer, number: int) -> list[Offer]:
        path, choices, rank, above = taken[4]
        sibling = offer(path, choices, rank + 1, above, taken[3])
        longer = (*path, taken[2])
        if len(longer) == depth:
            return sibling
        return sibling + offer(longer, below(longer), 0, -taken[0], number)

    return best_first(offer((), below(()), 0, 1.0, -1) if depth else [], children, nodes)


def pruned(
    tokens: Ints, parents: Ints, score: Floats, keep: AnyArray, source: Ints | DraftSource
) -> Draft:
    """Return the draft of nodes `keep` int[n], ascending. It must include each node's parent: a
    node without it would hang below the root. `source` is int32[.] by node, or one for all.
    """
    # The new index of each kept node; the last entry maps the root, -1, to itself.
    place = np.full(len(tokens) + 1, -1, np.int32)
    place[keep] = np.arange(len(keep))
    sources = source if isinstance(source, DraftSource) else source[keep]
    return Draft(tokens[keep], place[parents[keep]], score[keep], sources)


def _best(value: Floats, count: int) -> AnyArray:
    """Return the indices, ascending, of the `count` largest values, ties to the lower index."""
    return np.sort(np.argsort(-value, kind="stable")[:count])
