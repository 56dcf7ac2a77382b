"""Guesses from the text itself: what followed the last time these tokens came.

After prompt lookup (Saxena 2023) and suffix decoding (arXiv 2411.04975), on hash chains as in
LZ77. For each order n, every position is linked to the one before it that follows the same n
tokens. Walking the links of the longest order first finds the most recent earlier places whose
past agrees with the present; what follows them, merged into a trie, is the draft.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from forerun.engine.drafter import DrafterTraits
from forerun.engine.plan import Opening, Outcome, Plan
from forerun.spec.tree import Draft, TreeBatch
from forerun.types import Ints

ORDERS = (8, 4, 2)
"""Lengths of the tokens runs that are indexed, longest first."""
PLACES = 16
"""Earlier places that are looked at, most promising first."""
LONGEST = 16
"""Agreement beyond so many tokens counts no more."""
DOUBT = 4.0
"""Weight of "something else follows", where a place with m agreeing tokens weighs 2**m."""
FLOOR = 0.02
"""Guesses less likely than this are not worth a node."""

_BASE, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


class _Chains:
    """Links between equal token runs of one length.

    before[p]  the last position before p that follows the same `order` tokens as p, or -1
    """

    def __init__(self, order: int, tokens: Ints) -> None:
        self.order = order
        self._drop = pow(_BASE, order, 2**64)
        keys = np.zeros(max(len(tokens) - order + 1, 0), np.uint64)
        for offset in range(order):
            run = tokens[offset : offset + len(keys)].astype(np.uint64) + np.uint64(1)
            keys = keys * np.uint64(_BASE) + run
        self._key = 0
        for token in tokens[-order:].tolist():
            self._key = (self._key * _BASE + token + 1) & _MASK
        self._last = dict(zip(keys.tolist(), range(order, len(tokens) + 1), strict=True))
        before = np.full(len(tokens) + 1, -1, np.int64)
        if len(keys) > 1:
            by_key = np.argsort(keys, kind="stable")
            same = np.flatnonzero(keys[by_key[1:]] == keys[by_key[:-1]])
            before[by_key[same + 1] + order] = by_key[same] + order
        self.before: list[int] = before.tolist()

    def append(self, text: list[int]) -> None:
        """`text` has got one more token."""
        end, order = len(text), self.order
        key = self._key * _BASE + text[-1] + 1
        if end > order:
            key -= (text[-order - 1] + 1) * self._drop
        self._key = key = key & _MASK
        if end < order:
            self.before.append(-1)
            return
        self.before.append(self._last.get(key, -1))
        self._last[key] = end


@dataclass(slots=True)
class _Text:
    """One sequence: its tokens, and the links between equal runs of them."""

    tokens: list[int]
    chains: list[_Chains]

    def append(self, token: int) -> None:
        self.tokens.append(token)
        for chain in self.chains:
            chain.append(self.tokens)

    def places(self) -> list[tuple[int, float]]:
        """Earlier positions whose past agrees with the end of the text, with their weights.

        Longest order first, then most recent first, PLACES at most.
        """
        text, end = self.tokens, len(self.tokens)
        found: dict[int, float] = {}
        for chain in self.chains:
            place = chain.before[end]
            while place >= 0 and len(found) < PLACES:
                if place not in found:
                    agree = 0
                    while agree < min(LONGEST, place) and text[place - 1 - agree] == text[~agree]:
                        agree += 1
                    found[place] = 2.0**agree
                place = chain.before[place]
        return list(found.items())


@dataclass(slots=True)
class _Growth:
    """A draft while it grows."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


def grow(text: list[int], places: list[tuple[int, float]], nodes: int, depth: int) -> Draft:
    """The likeliest `nodes` paths that follow `places`, best first, at most `depth` long.

    A place that agrees in m tokens votes with weight 2**m for the token that follows it, and
    with 2**(m+1) for the next one once that was right, and so on. A guess's share of the votes,
    with DOUBT among them, is its probability; its score is the product along its path.
    """
    out = _Growth()
    heap: list[tuple[float, int, int, int, int, list[tuple[int, float]]]] = []
    ticket = 0

    def offer(parent: int, level: int, score: float, voters: list[tuple[int, float]]) -> None:
        nonlocal ticket
        votes: dict[int, list[tuple[int, float]]] = {}
        total = DOUBT
        for place, weight in voters:
            if place < len(text):
                votes.setdefault(text[place], []).append((place + 1, 2 * weight))
                total += weight
        for token, agreeing in votes.items():
            share = score * sum(weight for _, weight in agreeing) / (2 * total)
            if share >= FLOOR:
                ticket += 1
                heappush(heap, (-share, ticket, token, parent, level, agreeing))

    offer(-1, 1, 1.0, places)
    while heap and len(out.tokens) < nodes:
        negative, _, token, parent, level, agreeing = heappop(heap)
        out.tokens.append(token)
        out.parents.append(parent)
        out.scores.append(-negative)
        if level < depth:
            offer(len(out.tokens) - 1, level + 1, -negative, agreeing)
    return Draft(
        np.array(out.tokens, np.int32),
        np.array(out.parents, np.int32),
        np.array(out.scores, np.float32),
    )


class NgramDrafter:
    """Looks up continuations in prompt and output.

    slots  S, for the record; sequences are kept by slot
    """

    def __init__(self, slots: int) -> None:
        self.traits = DrafterTraits(name="ngram", max_depth=64, free=True)
        self._texts: list[_Text | None] = [None] * slots

    def begin(self, opening: Opening) -> None:
        """Index all tokens of the sequence."""
        chains = [_Chains(order, opening.tokens) for order in ORDERS]
        self._texts[opening.slot] = _Text(opening.tokens.tolist(), chains)

    def propose(self, plan: Plan) -> list[Draft]:
        """One draft per row; empty where nothing like the present came before."""
        drafts = []
        for slot, nodes, depth in zip(
            plan.slots.tolist(), plan.max_nodes.tolist(), plan.max_depth.tolist(), strict=True
        ):
            text = self._texts[slot]
            assert text is not None, f"slot {slot} is not open"
            places = text.places() if nodes else []
            drafts.append(grow(text.tokens, places, nodes, depth) if places else Draft())
        return drafts

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Append what was emitted."""
        for row, slot in enumerate(plan.slots.tolist()):
            text = self._texts[slot]
            assert text is not None
            for token in outcome.tokens[row, : outcome.n_tokens[row]].tolist():
                text.append(token)

    def end(self, slot: int) -> None:
        """Forget the sequence."""
        self._texts[slot] = None

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {"drafter": self.traits.name, "orders": ORDERS, "places": PLACES}
