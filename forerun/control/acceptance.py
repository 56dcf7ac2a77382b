"""What came of draft tokens lately: how far their scores are to be believed, by sequence."""

from dataclasses import dataclass, field

import numpy as np

from forerun.control.constants import DECAY
from forerun.speculative.tree import NO_DRAFT, Draft, DraftSource

CERTAIN = 1.0
"""Score of what a grammar forces. What a drafter proposes is never certain."""
_ALMOST = 0.999
_GRAMMARS = (DraftSource.GRAMMAR, DraftSource.TOKEN_PRIOR)


@dataclass(slots=True)
class _Record:
    """What is known of the drafter's scores in one sequence.

    expected, hits  decayed: draft tokens that should have been right by their scores, and that were
    proposed        the draft of the running step, before any token was left out
    """

    expected: float
    hits: float
    proposed: Draft = field(default_factory=Draft)


class Acceptance:
    """Learns from every draft that was seen, verified or not: what came is compared with it.

    first_rate  how often the first draft token was right lately

    calibrated  scores are believed as they are: the drafter learns by itself what they are worth
    """

    def __init__(self, first_rate: float, calibrated: bool = False) -> None:
        self._calibrated = calibrated
        self._records: dict[int, _Record] = {}
        self._expected = self._hits = 1.0
        self.first_rate = first_rate

    def open(self, slot: int) -> None:
        """A sequence took the slot: start from what other sequences taught."""
        self._records[slot] = _Record(1.0, self.shared_trust)

    @property
    def shared_trust(self) -> float:
        """The trust that a new sequence starts with, 0 to 1."""
        return min(1.0, self._hits / self._expected)

    def trust(self, slot: int) -> float:
        """What the drafter's scores are multiplied with, per level, to be believed; 0 to 1."""
        record = self._records[slot]
        return 1.0 if self._calibrated else min(1.0, record.hits / record.expected)

    def believed(self, slot: int, draft: Draft) -> Draft:
        """The draft with scores that are believed: the drafter's times trust**depth, a grammar's as
        they are. It is remembered, and compared with what comes.
        """
        trust, given = self.trust(slot), draft.score.tolist()
        scores: list[float] = []
        nodes = zip(draft.parents.tolist(), given, draft.sources(), strict=True)
        for parent, score, source in nodes:
            above, told = (scores[parent], given[parent]) if parent >= 0 else (1.0, 1.0)
            chance = score / told if told > 0.0 else 0.0
            if source not in _GRAMMARS:
                chance = min(chance * trust, _ALMOST)
            scores.append(above * min(chance, 1.0))
        self._records[slot].proposed = draft
        return Draft(draft.tokens, draft.parents, np.array(scores, np.float32), draft.source)

    def learn(self, slot: int, tokens: list[int]) -> tuple[int, int] | None:
        """`tokens` came, at least one: (levels of the proposed draft that were tried, levels that
        were right). None where nothing was proposed.
        """
        record = self._records[slot]
        expected, tried, right = compare(record.proposed, tokens)
        record.proposed = NO_DRAFT
        if not tried:
            return None
        record.expected = DECAY * record.expected + expected
        record.hits = DECAY * record.hits + right
        self._expected = DECAY * self._expected + expected
        self._hits = DECAY * self._hits + right
        self.first_rate += (1.0 - DECAY) * ((right > 0) - self.first_rate)
        return tried, right


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
