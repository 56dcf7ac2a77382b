"""Draft tokens that lie on the host: how far their scores are to be believed, which are kept."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from forerun.control.constants import DECAY
from forerun.speculative.tree import NO_DRAFT, Draft, DraftSource

CERTAIN = 1.0
"""Score of what a grammar forces. What a drafter proposes is never certain."""
ALMOST = 0.999
"""The most that is believed of what a drafter proposes."""
_GRAMMARS = (DraftSource.GRAMMAR, DraftSource.TOKEN_PRIOR)


class Found(NamedTuple):
    """Of a row that had draft tokens: levels tried below one that was right, and levels right."""

    tried: int
    right: int


class Trust:
    """How far a drafter's scores are to be believed: draft tokens that were right of those that
    should have been by their scores, verified or not.

    calibrated  they are believed as they are: the drafter learns by itself what they are worth
    """

    def __init__(self, calibrated: bool = False) -> None:
        self._calibrated = calibrated
        self._expected = self._right = 1.0

    @property
    def share(self) -> float:
        """What scores are multiplied with, per level; 0 to 1."""
        return 1.0 if self._calibrated else min(1.0, self._right / self._expected)

    def believed(self, draft: Draft) -> Draft:
        """The draft with the drafter's scores times share**depth, and a grammar's as they are."""
        share, given = self.share, draft.score.tolist()
        scores: list[float] = []
        nodes = zip(draft.parents.tolist(), given, draft.sources(), strict=True)
        for parent, score, source in nodes:
            above, told = (scores[parent], given[parent]) if parent >= 0 else (1.0, 1.0)
            chance = score / told if told > 0.0 else 0.0
            if source not in _GRAMMARS:
                chance = min(chance * share, ALMOST)
            scores.append(above * min(chance, 1.0))
        return Draft(draft.tokens, draft.parents, np.array(scores, np.float32), draft.source)

    def learn(self, draft: Draft, tokens: list[int]) -> Found | None:
        """`tokens` came, at least one, where this was proposed. None where nothing was."""
        expected, tried, right = compare(draft, tokens)
        if not tried:
            return None
        self._expected = DECAY * self._expected + expected
        self._right = DECAY * self._right + right
        return Found(tried, right)


def compare(draft: Draft, tokens: list[int]) -> tuple[float, int, int]:
    """(draft tokens that should have been right, levels tried, levels that were right) along the
    path that `tokens` took. At every node on the path the drafter's tokens below it are, together,
    right or wrong; what a grammar added is followed, and tells nothing about the drafter.
    """
    if not len(draft):
        return 0.0, 0, 0
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(draft.parents.tolist()):
        children.setdefault(parent, []).append(index)
    scores, tokens_of, sources = draft.score.tolist(), draft.tokens.tolist(), draft.sources()
    expected, tried, right = 0.0, 0, 0
    node, score = -1, 1.0
    for token in tokens:
        proposed = [n for n in children.get(node, ()) if sources[n] not in _GRAMMARS]
        following = [n for n in children.get(node, ()) if tokens_of[n] == token]
        if proposed:
            tried += 1
            expected += min(1.0, sum(scores[n] for n in proposed) / max(score, 1e-6))
            right += any(n in proposed for n in following)
        if not following:
            break
        node, score = following[0], scores[following[0]]
    return expected, tried, right


def scored(drafts: Sequence[Draft]) -> tuple[list[float], list[int]]:
    """Scores of all draft tokens, and the row of each."""
    scores = [score for draft in drafts for score in draft.score.tolist()]
    return scores, [row for row, draft in enumerate(drafts) for _ in range(len(draft))]


def ranked(scores: list[float], owners: list[int], together: bool) -> list[list[int]]:
    """Draft tokens, best first, each alone; of equals the first, so that parents stay with their
    children. together: the best of every row, the second of every row, ...: where every row takes
    as long as the longest, one more of each is one price. owners: the row of each.
    """
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    if not together:
        return [[index] for index in order]
    layers: list[list[int]] = []
    ranks = dict.fromkeys(owners, 0)
    for index in order:
        rank = ranks[owners[index]]
        ranks[owners[index]] += 1
        if rank == len(layers):
            layers.append([])
        layers[rank].append(index)
    return layers


def cut(drafts: Sequence[Draft], bought: Sequence[int]) -> list[Draft]:
    """What is left of the drafts where only these tokens are kept, by number over all of them;
    every one's parent is.
    """
    keep, end, kept = np.zeros(sum(map(len, drafts)), np.bool_), 0, list[Draft]()
    keep[list(bought)] = True
    for draft in drafts:
        mine, end = keep[end : end + len(draft)], end + len(draft)
        some = mine.tolist()
        if True in some and False in some:
            place = np.array([*accumulate(some), 0], np.int32) - np.int32(1)
            part = draft.tokens[mine], place[draft.parents[mine]], draft.score[mine]
            kept.append(Draft(*part, draft.source_of(mine)))
        else:
            kept.append(draft if True in some else NO_DRAFT)
    return kept
