"""Which of the draft tokens that were proposed are worth verifying, by the drafter's own scores."""

from dataclasses import dataclass, field

import numpy as np

from forerun.control.slowdown_guard import SlowdownGuard
from forerun.speculative.tree import NO_DRAFT, Draft
from forerun.types import Ints

DECAY = 0.97
"""What is left of an observation's weight after the next one of the sequence."""
SHARED_DECAY = 0.99
"""The same, for the estimate over all sequences that a new one starts with."""
PRIOR = 1.0
"""How many expected hits that estimate is worth to a new sequence."""
MARGIN = 1.02
"""Draft tokens must promise at least this many times the speed of none: promises err."""


@dataclass(slots=True)
class _Record:
    """What is known of the sequence in a slot.

    expected, hits  decayed: draft tokens the drafter expected to be right, and how many were
    offered         what the drafter proposed in the running step, before any was left out
    """

    expected: float
    hits: float
    offered: Draft = field(default_factory=Draft)


class DraftSelector:
    """Chooses the draft tokens that make expected tokens per millisecond of the step largest.

    The drafter's score of a draft token is its estimate that the path to it is right. A sequence's
    trust is how often draft tokens were right over how often the drafter expected them to be, at
    most 1; a draft token at depth d is worth score * trust**d tokens. Every proposal teaches,
    whether it was verified or not: what came is compared with what was proposed.
    """

    def __init__(self, slowdown_guard: SlowdownGuard) -> None:
        self._slowdown_guard = slowdown_guard
        self._records: dict[int, _Record] = {}
        self._expected = self._hits = 10.0

    @property
    def shared(self) -> float:
        """The trust that a new sequence starts with."""
        return min(1.0, self._hits / self._expected)

    def trust(self, slot: int) -> float:
        """How far the drafter's scores are believed for a sequence, 0 to 1."""
        record = self._records[slot]
        return min(1.0, record.hits / record.expected)

    def open(self, slot: int) -> None:
        """Start from what other sequences taught."""
        self._records[slot] = _Record(PRIOR, PRIOR * self.shared)

    def close(self, slot: int) -> None:
        """Forget the sequence."""
        self._records.pop(slot, None)

    def select(
        self, slots: Ints, kv_len: Ints, drafts: list[Draft], everything: bool = False
    ) -> list[Draft]:
        """The draft tokens to verify, row by row: any path is kept down to where it stops to pay.

        slots int32[B] and kv_len int32[B] are those of all rows of the step. everything: leave
        nothing out, to see what it costs.
        """
        worth: list[float] = []
        cached: list[int] = []
        for slot, length, draft in zip(slots.tolist(), kv_len.tolist(), drafts, strict=True):
            if len(draft):
                worth += self._worth(slot, draft)
                cached += [length] * len(draft)
        if everything or not worth:
            return drafts
        kept = self._kept(worth, cached, len(drafts), int(kv_len.sum()))
        chosen, end = [], 0
        for draft in drafts:
            begin, end = end, end + len(draft)
            chosen.append(cut(draft, kept[begin:end]))
        return chosen

    def _kept(self, worth: list[float], cached: list[int], rows: int, seen: int) -> list[bool]:
        """For each draft token whether it is among the best so many that make the step fastest, and
        that can be afforded if all are wrong.

        cached  tokens that each draft token sees; `seen` are those that the `rows` roots see. Plain
        Python: NumPy's calls, cold after a forward pass, take longer than the step can win.
        """
        step_ms = self._slowdown_guard.costs.step_ms_of
        ranked = sorted(range(len(worth)), key=worth.__getitem__, reverse=True)
        tokens, best = float(rows), 0
        plain_ms = step_ms(rows, seen)
        highest, most_ms = MARGIN * tokens / plain_ms, self._slowdown_guard.max_slowdown * plain_ms
        for number, index in enumerate(ranked, 1):
            tokens += worth[index]
            seen += cached[index]
            ms = step_ms(rows + number, seen)
            if ms > most_ms:
                break
            speed = tokens / ms
            if speed > highest:
                best, highest = number, speed
        kept = [False] * len(worth)
        for index in ranked[:best]:
            kept[index] = True
        return kept

    def learn(self, slot: int, tokens: list[int]) -> bool:
        """`tokens` came, at least one: compare them with what was proposed. True if some draft
        token was right.
        """
        record = self._records.get(slot)
        if record is None or not len(record.offered):
            return False
        expected, hits = compare(record.offered, tokens)
        record.offered = NO_DRAFT
        record.expected = DECAY * record.expected + expected
        record.hits = DECAY * record.hits + hits
        self._expected = SHARED_DECAY * self._expected + expected
        self._hits = SHARED_DECAY * self._hits + hits
        return hits > 0.0

    def _worth(self, slot: int, draft: Draft) -> list[float]:
        """Tokens that each draft token is expected to bring."""
        self._records[slot].offered = draft
        trust = self.trust(slot)
        depth: list[int] = []
        for parent in draft.parents.tolist():
            depth.append(depth[parent] + 1 if parent >= 0 else 1)
        return [
            score * trust**level for score, level in zip(draft.score.tolist(), depth, strict=True)
        ]


def cut(draft: Draft, kept: list[bool]) -> Draft:
    """The draft tokens that are kept; every one's parent is."""
    if all(kept):
        return draft
    if not any(kept):
        return NO_DRAFT
    count = sum(kept)
    if all(kept[:count]):  # Mostly: draft tokens come best first.
        source = draft.source_of(slice(count))
        return Draft(draft.tokens[:count], draft.parents[:count], draft.score[:count], source)
    keep = np.array(kept)
    # Where each kept draft token stands now; one more at the end, so that -1 stays the root.
    place = np.append(np.cumsum(keep, dtype=np.int32) - 1, np.int32(-1))
    parents = place[draft.parents[keep]]
    return Draft(draft.tokens[keep], parents, draft.score[keep], draft.source_of(keep))


def compare(draft: Draft, tokens: list[int]) -> tuple[float, float]:
    """(hits the drafter expected, hits there were) along the path that `tokens` took.

    At every node on the path the draft tokens below it are, together, right or wrong.
    """
    below: dict[int, list[int]] = {}
    for index, parent in enumerate(draft.parents.tolist()):
        below.setdefault(parent, []).append(index)
    scores, tokens_of = draft.score.tolist(), draft.tokens.tolist()
    expected = hits = 0.0
    node, score = -1, 1.0
    for token in tokens:
        children = below.get(node, [])
        if not children:
            break
        expected += min(1.0, sum(scores[child] for child in children) / max(score, 1e-6))
        found = [child for child in children if tokens_of[child] == token]
        if not found:
            break
        hits += 1.0
        node, score = found[0], scores[found[0]]
    return expected, hits
