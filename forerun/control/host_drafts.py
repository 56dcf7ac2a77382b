"""Draft tokens that lie on the host: how far their scores are to be believed, which are kept.

The compiled core's n-gram drafter buys by itself, so this is for grammars and draft models.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from forerun.control.account import Account
from forerun.control.constants import DECAY, MIN_PROB
from forerun.control.policy import Lookahead
from forerun.speculative.tree import NO_DRAFT, Draft, DraftSource
from forerun.types import Ints

CERTAIN = 1.0
"""Score of what a grammar forces. What a drafter proposes is never certain."""
ALMOST = 0.999
"""The most that is believed of what a drafter proposes."""
_GRAMMARS = (DraftSource.GRAMMAR, DraftSource.TOKEN_PRIOR)


class LevelCounts(NamedTuple):
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

    def learn(self, draft: Draft, tokens: list[int]) -> LevelCounts | None:
        """`tokens` came, at least one, where this was proposed. None where nothing was."""
        expected, tried, right = compare(draft, tokens)
        if not tried:
            return None
        self._expected = DECAY * self._expected + expected
        self._right = DECAY * self._right + right
        return LevelCounts(tried, right)


class HostDrafts:
    """Keeps of what drafters and grammars propose that which brings more than its time would bring
    elsewhere.

    nodes       draft tokens of a row, at most
    calibrated  see Trust
    """

    def __init__(self, account: Account, nodes: int, calibrated: bool) -> None:
        self.trust, self._account, self._nodes = Trust(calibrated), account, nodes

    def known(self, lookahead: Lookahead, slots: Ints, kv_len: list[int], plain: bool) -> list[int]:
        """By row, how many tokens there are that a grammar knows, as far as they pay; plain: only
        what it forces.
        """
        price, count = CERTAIN, len(kv_len)
        if not plain:
            most = count * (1 + self._nodes)
            price = self._account.costs.price(count, most, sum(kv_len))
        rows = lookahead.predicted(slots, min(CERTAIN, max(MIN_PROB, price)))
        owners = [row for row, scores in enumerate(rows) for _ in scores]
        bought, _ = self.buy([score for row in rows for score in row], owners, kv_len)
        counts = Counter(owners[index] for index in bought)
        return [counts[row] for row in range(count)]

    def select(self, kv_len: list[int], drafts: list[Draft]) -> list[Draft]:
        """Of all rows the draft tokens that pay: any path is kept down to where it stops to."""
        drafts = [self.trust.believed(draft) if len(draft) else draft for draft in drafts]
        return cut(drafts, self.buy(*scored(drafts), kv_len)[0])

    def learn(self, drafts: Sequence[Draft], tokens: list[list[int]]) -> list[LevelCounts]:
        """These tokens came where this was proposed. Of each row that had draft tokens and emitted
        something, what came of them.
        """
        rows = zip(drafts, tokens, strict=bool(drafts))
        found = [self.trust.learn(draft, emitted) for draft, emitted in rows if emitted]
        return [each for each in found if each is not None]

    def buy(
        self, scores: list[float], owners: list[int], kv_len: list[int]
    ) -> tuple[Sequence[int], float]:
        """Which of the tokens with these chances of being right bring most beyond what their time
        would bring elsewhere, by index, of those that lose no more than the stake if all that is
        not certain turns out wrong; and how many tokens that is. owners: the row of each.

        Plain Python: NumPy's calls, cold after a forward pass, take longer than the step can win.
        """
        costs, stake = self._account.costs, self._account.stake
        rows, cached, padded = len(kv_len), sum(kv_len), costs.measured.padded
        layers, price = ranked(scores, owners, padded), self._account.price(rows, cached)
        best, most, tokens, certain_longest, nodes = 0, 0.0, 0.0, 1.0, rows
        for number, layer in enumerate(layers, 1):
            nodes += rows if padded else 1
            tokens += sum(scores[index] for index in layer)
            time = costs.ratio(rows, nodes, cached, hopeful=True)
            longest = costs.at_most(rows, nodes, cached)
            if min(scores[index] for index in layer) >= CERTAIN:
                certain_longest = longest
            if longest - certain_longest > stake:
                break
            if (won := tokens - price * (time - 1.0)) > most:
                best, most = number, won
        return [index for layer in layers[:best] for index in layer], most


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
