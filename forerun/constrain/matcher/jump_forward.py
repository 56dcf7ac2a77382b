"""Predicts the tokens that a grammar makes certain or likely at the end of a text: a tree, best
first.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from time import thread_time
from typing import NamedTuple

from forerun.constrain.matcher.matcher import Matcher
from forerun.speculative.tree import DraftSource

MAX_AHEAD = 32
"""Most tokens that are predicted."""
PATIENCE = 0.01
"""Seconds of work after which no more is drafted for a sequence: hostile grammars need 20 ms for a
node. Draft tokens change no text, so this limit does not either.
"""

Likely = Callable[[tuple[int, ...]], list[tuple[int, float]]]
"""Returns the tokens that the prior expects after a path, where the matcher must be, with their
probabilities, best first.
"""


class PredictedToken(NamedTuple):
    """One predicted token.

    parent  number of the predicted token above it, -1 = none
    score   probability that the whole path to it is right
    source  GRAMMAR if it alone can follow, else TOKEN_PRIOR
    """

    token: int
    parent: int
    score: float
    source: DraftSource = DraftSource.GRAMMAR


class JumpForward:
    """Predicts tokens from a matcher's position, without changing the position.

    min_prob  less probable paths are not followed
    """

    def __init__(self, matcher: Matcher, likely: Likely, min_prob: float) -> None:
        self._matcher, self._likely, self._min_prob = matcher, likely, min_prob
        self._found: list[PredictedToken] = []
        self._heap: list[tuple[float, int, PredictedToken]] = []
        self._path: list[int] = []

    def draft_tokens(self) -> list[PredictedToken]:
        """Return at most MAX_AHEAD predicted tokens, likeliest first, parents before children; none
        if min_prob is above 1. Stops after PATIENCE seconds of work. Call it once.
        """
        if self._min_prob > 1.0:
            return []
        end = thread_time() + PATIENCE
        self._below(-1, 1.0)
        while self._heap and len(self._found) < MAX_AHEAD and thread_time() < end:
            _, _, draft_token = heappop(self._heap)
            self._found.append(draft_token)
            self._below(len(self._found) - 1, draft_token.score)
        self._matcher.back(len(self._path))
        return self._found

    def _below(self, node: int, score: float) -> None:
        """Add the forced tokens below a node, and queue the likely ones after them."""
        matcher, path = self._matcher, path_of(self._found, node)
        if not move(matcher, self._path, path) or matcher.complete:
            return
        for token in matcher.forced()[: MAX_AHEAD - len(self._found)]:
            if not matcher.advance(token):
                return
            self._path.append(token)
            self._found.append(PredictedToken(token, node, score))
            node = len(self._found) - 1
        # Only forced tokens have probability 1, so with `min_prob` 1 no estimate is needed.
        if self._min_prob == 1.0 or matcher.waiting or matcher.complete:
            return
        if len(self._found) == MAX_AHEAD:
            return
        for token, chance in self._likely(tuple(self._path)):
            if score * chance >= self._min_prob:
                prior = DraftSource.TOKEN_PRIOR
                draft_token = PredictedToken(token, node, score * chance, prior)
                heappush(
                    self._heap,
                    (-draft_token.score, len(self._heap) + len(self._found), draft_token),
                )


def path_of(draft_tokens: list[PredictedToken], node: int) -> list[int]:
    """Return the token ids from below the root down to number `node` of `draft_tokens`; [] for
    -1.
    """
    path: list[int] = []
    while node >= 0:
        path.append(draft_tokens[node].token)
        node = draft_tokens[node].parent
    path.reverse()
    return path


def move(matcher: Matcher, path: list[int], target: list[int]) -> bool:
    """Move the matcher from the end of `path` to that of `target`, over their common ancestor;
    `path` is updated in place. Returns False if a token does not fit; `path` then ends before it.
    """
    common = 0
    while common < min(len(path), len(target)) and path[common] == target[common]:
        common += 1
    matcher.back(len(path) - common)
    del path[common:]
    for token in target[common:]:
        if not matcher.advance(token):
            return False
        path.append(token)
    return True
