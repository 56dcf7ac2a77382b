"""Drafting within the target's step: the request that a step carries, and the drafts that come with
its outcome. Both are ordinary values; a device that cannot draft ignores the request.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class OnDeviceDraftSpec:
    """The drafting that a step of the target does at its end, if the device supports it.

    slots   int32[.] of sequences whose draft model has caught up: extend it by the accepted tokens,
            then grow the next draft below them
    width   children per node, and nodes expanded per level
    levels  of draft tokens, at least one; a device without room for all of them grows fewer
    chances float32[2,2,D,10]: a confidence c in the best token below a node at depth d counts as
            the chance a + b * c, with a, b = chances[:,s,d,t] for greedy (0) and sampled texts, in
            the tenth t of c; None if the draft model has none
    """

    slots: Ints
    width: int
    levels: int
    chances: Floats | None = None


@dataclass(frozen=True, slots=True)
class NextDrafts:
    """The draft tokens that a step made for the next one.

    K = forerun.speculative.tree.full_size(width, levels).

    rows    bool[B]      rows of the step whose draft model was extended by all that became
                         permanent, as `DraftModel.extend` does, and that have a tree
    width, levels        of the trees; they are full
    tokens  int32[B,K]   target ids, nodes in the order of speculative.draft_tree.DraftTree
    parents int32[B,K]   as in Draft
    value   float32[B,K] as in DraftTree, sampling noise included; -inf = no such node
    ids, log_probs  int32[B,k], float32[B,k] target ids that may follow the rows' last tokens, best
                    first, as `DraftModel.extend` returns; -inf = none. None if no row has a grammar
                    to choose among them
    confident  float32[B,1+K] confidence in the best token below the root, and below each node that
            has children; None if the draft model returns none
    """

    rows: Bools
    width: int
    levels: int
    tokens: Ints
    parents: Ints
    value: Floats
    ids: Ints | None = None
    log_probs: Floats | None = None
    confident: Floats | None = None

    def confidences(self, row: int, tokens: Sequence[int]) -> Iterator[tuple[float, int]]:
        """Yield (confidence in the best token, that token) for each node along the tokens that a
        row emitted, as far as they were drafted. Requires `confident`.
        """
        assert self.confident is not None
        node, value = -1, self.value[row]
        for token in tokens:
            below = np.flatnonzero((self.parents[row] == node) & (value > -np.inf))
            if not len(below):
                return
            drafted = self.tokens[row, below]
            yield float(self.confident[row, 1 + node]), int(drafted[value[below].argmax()])
            if token not in drafted:
                return
            node = int(below[drafted == token][0])
