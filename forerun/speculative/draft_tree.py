"""Growing a draft tree as in EAGLE-2 (arXiv 2406.16858, section 4).

Expand (4.1): level by level, the `width` nodes of the newest level whose paths the drafter finds
most probable get their `width` best children. Rerank (4.2): of all nodes grown, keep the best N.
A node's value is the drafter's probability of its whole path, so no child is worth more than its
parent, and the best N, ties to the earlier node, are connected without further care.
"""

from collections.abc import Callable

import numpy as np

from forerun.speculative.tree import Draft, DraftSource
from forerun.types import AnyArray, Floats, Ints

Expand = Callable[["Growth", Ints], tuple[Ints, Floats]]
"""(growth, int32[F] nodes to expand, -1 the root) -> their best children: tokens int32[F,k] and
log-probabilities float32[F,k] given the node's path; -inf where there is no such child."""


class Growth:
    """A tree while it grows. `tokens`, `parents` and `value` only ever get longer.

    tokens   int32[.]   as in Draft
    parents  int32[.]   as in Draft
    value    float32[.] log-probability of the whole path to the node, never above its parent's

    `grow` drives one; a drafter of many rows drives one per row and expands all in one forward.
    """

    def __init__(self, width: int) -> None:
        self.tokens: Ints = np.zeros(0, np.int32)
        self.parents: Ints = np.zeros(0, np.int32)
        self.value: Floats = np.zeros(0, np.float32)
        self._width = width
        self._newest = -1

    def frontier(self) -> Ints:
        """Nodes to expand next, ascending: the best of the newest level; at first the root."""
        if self._newest < 0:
            return np.array([-1], np.int32)
        best = _best(self.value[self._newest :], self._width)
        return (self._newest + best).astype(np.int32)

    def extend(self, tokens: Ints, log_probs: Floats) -> None:
        """Hang children below `frontier()`, row i below node i; shapes and -inf as in Expand.

        A log-probability that is NaN counts as -inf, one above 0 as 0.
        """
        above = self.frontier()
        base = np.append(self.value, np.float32(0))[above]  # Index -1, the root, is worth 0.
        value = base[:, None] + np.minimum(log_probs, 0)
        real = value > -np.inf  # False for NaN too.
        parents = np.broadcast_to(above[:, None], real.shape)
        self._newest = len(self.tokens)
        self.tokens = np.append(self.tokens, tokens[real]).astype(np.int32)
        self.parents = np.append(self.parents, parents[real]).astype(np.int32)
        self.value = np.append(self.value, value[real]).astype(np.float32)

    @classmethod
    def regrown(
        cls, width: int, depth: int, tokens: Ints, parents: Ints, value: Floats
    ) -> "Growth":
        """The first `depth` levels of a full tree that was grown elsewhere, at least so deep.

        In the order of growth, with `width` children below each of the `width` nodes that were
        expanded per level; a value of -inf says that there is no such node.
        """
        count = full_size(width, depth)
        real = value[:count] > -np.inf
        place = np.append(np.cumsum(real, dtype=np.int32) - np.int32(1), np.int32(-1))
        growth = cls(width)
        growth.tokens, growth.value = tokens[:count][real], value[:count][real]
        growth.parents = place[parents[:count][real]]
        growth._newest = int(np.count_nonzero(real[: full_size(width, depth - 1)]))
        return growth

    def draft(self, nodes: int) -> Draft:
        """The best `nodes` of what was grown, in the order of growth."""
        keep = _best(self.value, nodes)
        # Where each kept node went; the last entry sends the root, -1, to itself.
        place = np.full(len(self.tokens) + 1, -1, np.int32)
        place[keep] = np.arange(len(keep))
        score = np.exp(self.value[keep])
        return Draft(self.tokens[keep], place[self.parents[keep]], score, DraftSource.DRAFT_MODEL)


def full_size(width: int, levels: int) -> int:
    """Nodes of so many levels of a tree of this width where no child is missing."""
    return width + (levels - 1) * width * width if levels else 0


def full_draft(
    width: int, depth: int, nodes: int, tokens: Ints, parents: Ints, value: Floats
) -> Draft:
    """`Growth.regrown(...).draft(nodes)`; of chains without growing anything."""
    if width > 1:
        return Growth.regrown(width, depth, tokens, parents, value).draft(nodes)
    value = value[: min(depth, nodes)]
    count = int(np.count_nonzero(value > -np.inf))
    parents = np.arange(-1, count - 1, dtype=np.int32)
    return Draft(tokens[:count], parents, np.exp(value[:count]), DraftSource.DRAFT_MODEL)


def grow(expand: Expand, width: int, depth: int, nodes: int) -> Draft:
    """A draft of at most `nodes` draft tokens, at most `depth` deep and `width` children wide."""
    growth = Growth(width)
    for _ in range(depth):
        frontier = growth.frontier()
        if len(frontier) == 0:
            break
        growth.extend(*expand(growth, frontier))
    return growth.draft(nodes)


def _best(value: Floats, count: int) -> AnyArray:
    """Indices, ascending, of the `count` largest values, ties to the lower index."""
    return np.sort(np.argsort(-value, kind="stable")[:count])
