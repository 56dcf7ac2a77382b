"""The tokens that a grammar makes certain or likely below the end of a text: a tree, best first."""

from collections.abc import Callable
from heapq import heappop, heappush
from time import thread_time
from typing import NamedTuple

from forerun.constrain.matcher.matcher import Matcher
from forerun.speculative.tree import DraftSource

MAX_AHEAD = 32
"""Tokens that are looked ahead at most."""
PATIENCE = 0.01
"""Seconds of work after which no more is drafted for a sequence: hostile grammars need 20 ms for
a node. Draft tokens change no text, so neither does the clock."""

Likely = Callable[[tuple[int, ...]], list[tuple[int, float]]]
"""Tokens that the prior expects after a path, where the matcher stands, each with its probability,
best first."""


class PredictedToken(NamedTuple):
    """One of the tokens ahead.

    parent  number of the draft token above it, -1 = none
    score   probability that the whole path to it is right
    source  GRAMMAR where it alone can follow, else TOKEN_PRIOR
    """

    token: int
    parent: int
    score: float
    source: DraftSource = DraftSource.GRAMMAR


class JumpForward:
    """Looks ahead from where a matcher stands, and leaves it there.

    min_prob  paths that are less likely are not followed
    """

    def __init__(self, matcher: Matcher, likely: Likely, min_prob: float) -> None:
        self._matcher, self._likely, self._min_prob = matcher, likely, min_prob
        self._found: list[PredictedToken] = []
        self._heap: list[tuple[float, int, PredictedToken]] = []
        self._path: list[int] = []

    def draft_tokens(self) -> list[PredictedToken]:
        """Return the tokens ahead, likeliest first, parents before children, MAX_AHEAD at most;
        none if min_prob is above 1. Stops after PATIENCE seconds of work. Call it once; the matcher
        ends at its place.
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
        """Hang what is forced below a node, and remember what is likely behind that."""
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
    """Return the token ids from below the root down to number `node` of `draft_tokens`; []
    for -1.
    """
    path: list[int] = []
    while node >= 0:
        path.append(draft_tokens[node].token)
        node = draft_tokens[node].parent
    path.reverse()
    return path


def move(matcher: Matcher, path: list[int], wanted: list[int]) -> bool:
    """Move the matcher from the end of `path` to that of `wanted`, over their common ancestor;
    `path` is updated in place.

    False where a token did not fit; then `path` says how far it came.
    """
    common = 0
    while common < min(len(path), len(wanted)) and path[common] == wanted[common]:
        common += 1
    matcher.back(len(path) - common)
    del path[common:]
    for token in wanted[common:]:
        if not matcher.advance(token):
            return False
        path.append(token)
    return True
