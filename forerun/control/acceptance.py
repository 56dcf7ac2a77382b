"""What came of draft tokens lately: how often they were right, by sequence."""

from dataclasses import dataclass, field

import numpy as np

from forerun.control.constants import DECAY, FIRST_RATE, MERGED_PRIOR
from forerun.speculative.tree import NO_DRAFT, Draft
from forerun.types import AnyArray, Ints

CERTAIN = 1.0
"""Score of what a grammar forces. What a drafter proposes is never certain."""
_ALMOST = 0.999


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
    """Learns from every draft, verified or not: what came is compared with what was proposed.

    Two things are kept of each slot, both decayed. `trust`: draft tokens that were right over
    those that should have been by their scores. `rates`: how often level d of a draft was right
    where level d - 1 was. What all sequences share, and of a level what is known of the one
    above, counts as one observation; the former as MERGED_PRIOR where scores are calibrated.

    levels  D, depth of a draft at most; 0: nobody asks for rates, so none are kept
    calibrated  scores are believed as they are: the drafter learns by itself what they are worth
    """

    def __init__(self, levels: int, calibrated: bool = False) -> None:
        self._calibrated = calibrated
        self._records: dict[int, _Record] = {}
        self._expected = self._hits = 1.0
        self.first_rate, self._levels = FIRST_RATE, levels
        self._tries = np.zeros((0, levels))
        self._right = np.zeros((0, levels))

    def open(self, slot: int) -> None:
        """A sequence took the slot: start from what other sequences taught."""
        self._records[slot] = _Record(1.0, self.shared_trust)
        if not self._levels:
            return
        more = (0, max(slot + 1 - len(self._tries), 0)), (0, 0)
        self._tries, self._right = np.pad(self._tries, more), np.pad(self._right, more)
        self._tries[slot], self._right[slot] = 0.0, 0.0
        prior = MERGED_PRIOR if self._calibrated else 1.0
        self._tries[slot, 0], self._right[slot, 0] = prior, prior * self.first_rate

    @property
    def shared_trust(self) -> float:
        """The trust that a new sequence starts with, 0 to 1."""
        return min(1.0, self._hits / self._expected)

    def trust(self, slot: int) -> float:
        """What the drafter's scores are multiplied with, per level, to be believed; 0 to 1."""
        record = self._records[slot]
        return 1.0 if self._calibrated else min(1.0, record.hits / record.expected)

    def rates(self, slots: Ints) -> AnyArray:
        """float64[B,D]: chance of each level given the one above; unseen: as above."""
        right, tries = self._right[slots], self._tries[slots]
        rates = np.empty_like(right)
        rates[:, 0] = right[:, 0] / tries[:, 0]
        for level in range(1, rates.shape[1]):
            rates[:, level] = (rates[:, level - 1] + right[:, level]) / (1.0 + tries[:, level])
        return rates

    def seen(self, slots: Ints) -> AnyArray:
        """float64[B,D]: how many observations `rates` rest on, the one that is shared included."""
        tries = self._tries[slots] + 1.0
        tries[:, 0] -= 1.0
        return tries

    def calibrated(self, slot: int, draft: Draft) -> Draft:
        """The draft with scores that are believed: score * trust**depth. It is remembered, and
        compared with what comes.
        """
        self._records[slot].proposed = draft
        trust = self.trust(slot)
        depth: list[int] = []
        for parent in draft.parents.tolist():
            depth.append(depth[parent] + 1 if parent >= 0 else 1)
        scores = [
            min(score * trust**level, _ALMOST)
            for score, level in zip(draft.score.tolist(), depth, strict=True)
        ]
        return Draft(draft.tokens, draft.parents, np.array(scores, np.float32), draft.source)

    def modelled(self, slot: int) -> bool:
        """False where only the free drafters of a merged tree were asked for the last draft."""
        return not self._calibrated or self._records[slot].proposed.free is not None

    def learn(self, slot: int, tokens: list[int], draft_tokens: int, given: int) -> bool | None:
        """`tokens` came, at least one. True where a draft token was right, False where none was,
        None where nothing was proposed.

        draft_tokens, given  verified, and levels that were allowed, 0 = less than one: all that is
                             known of a draft that the device made by itself
        """
        record = self._records[slot]
        if len(record.proposed):
            expected, tried, right = compare(record.proposed, tokens)
            record.proposed = NO_DRAFT
            record.expected = DECAY * record.expected + expected
            record.hits = DECAY * record.hits + right
            self._expected = DECAY * self._expected + expected
            self._hits = DECAY * self._hits + right
        elif draft_tokens:
            right = len(tokens) - 1
            tried = min(right + 1, given, draft_tokens)
        else:
            return None
        if self._levels and given:
            # Levels not tried fade too: what was seen of them long ago must not forbid them.
            self._tries[slot] *= DECAY
            self._right[slot] *= DECAY
            self._tries[slot, :tried] += 1.0
            self._right[slot, :right] += 1.0
        if given or not self._levels:
            self.first_rate += (1.0 - DECAY) * ((right > 0) - self.first_rate)
        return right > 0


def compare(draft: Draft, tokens: list[int]) -> tuple[float, int, int]:
    """(draft tokens that should have been right, levels tried, levels that were right) along the
    path that `tokens` took. At every node on the path the draft tokens below it are, together,
    right or wrong.
    """
    below: dict[int, list[int]] = {}
    for index, parent in enumerate(draft.parents.tolist()):
        below.setdefault(parent, []).append(index)
    scores, tokens_of = draft.score.tolist(), draft.tokens.tolist()
    expected, tried, right = 0.0, 0, 0
    node, score = -1, 1.0
    for token in tokens:
        children = below.get(node, [])
        if not children:
            break
        tried += 1
        expected += min(1.0, sum(scores[child] for child in children) / max(score, 1e-6))
        found = [child for child in children if tokens_of[child] == token]
        if not found:
            break
        right += 1
        node, score = found[0], scores[found[0]]
    return expected, tried, right
