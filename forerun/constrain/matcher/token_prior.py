"""Predicts the usual tokens where a grammar leaves a choice, learned from constrained text.

Much of what a grammar leaves open is always decided in the same way: the blank after a colon, the
line break and indentation before the next property. N-grams of the text predict little of it,
because the words around it differ. Here the key is the grammar's state (its mask) and the last
tokens; first in this sequence, then in all earlier ones of its tenant. Without observations in
either, the model's n-gram table gives its usual tokens.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from forerun.drafts.ngram_table import NgramTable
from forerun.interface.grammars import legal

Weights = dict[int, float]
"""Decayed counts of the tokens that were chosen at a place."""

Last = tuple[int, int]
"""The last but one token and the last; -1 before the beginning."""

DOUBT = 4.0
"""Initial count of other tokens at every place."""
BACKOFF = 4.0
"""Weight of the more general estimate in the more specific one, in observations."""
CHILDREN = 2
"""Most tokens that are expected at a place: a third is hardly ever worth a node."""
TAIL = 8
"""Last tokens of the text that are passed to a table: more than any table's contexts have."""
FADED = 0.1
"""A token with a lower weight is dropped."""


class Places:
    """Weights by place; the least recently used are dropped first. Not locked.

    decay  factor of an observation's weight for each later one at its place
    size   most places
    """

    def __init__(self, decay: float, size: int) -> None:
        self._decay, self._size = decay, size
        self._weights: OrderedDict[Hashable, Weights] = OrderedDict()

    def learn(self, place: Hashable, token: int) -> None:
        """Record that `token` was chosen at this place; earlier choices there decay. May drop the
        least recently used place.
        """
        faded = {t: self._decay * w for t, w in self._weights.pop(place, {}).items()}
        weights = {t: w for t, w in faded.items() if w > FADED}
        weights[token] = weights.get(token, 0.0) + 1.0
        self._weights[place] = weights
        if len(self._weights) > self._size:
            self._weights.popitem(last=False)

    def at(self, place: Hashable) -> Weights:
        """Return decayed counts by token of the choices at a place; {} if there were none."""
        return self._weights.get(place, {})


class TokenPrior:
    """The prior of one sequence, on top of the one that all sequences of its tenant share.

    shared  places of all tenants
    table   n-gram table of the target's usual continuations, or None
    tenant  as in SlotInit
    """

    def __init__(self, shared: Places, table: NgramTable | None = None, tenant: int = 0) -> None:
        self._shared, self._table, self._tenant = shared, table, tenant
        self._own = Places(decay=0.7, size=1024)

    def learn(self, mask: bytes, last: Last, token: int) -> None:
        """Record that `token` was chosen after the tokens `last` with the grammar's mask `mask`,
        for this sequence and for all of its tenant that share places.
        """
        for place in _places(self._tenant, mask, last):
            self._shared.learn(place, token)
            self._own.learn(place, token)

    def likely(self, mask: bytes, text: Sequence[int]) -> list[tuple[int, float]]:
        """Return at most CHILDREN likely tokens after `text` that `mask` allows, with their
        probabilities, best first; none without observations. Estimates go from the most general
        place to the most specific, each smoothed by the one before (back-off).
        """
        here = _places(self._tenant, mask, last_of(text))
        chance = self._usual(mask, text)
        prior = DOUBT
        for places in (self._shared, self._own):
            for place in here:
                seen = {t: w for t, w in places.at(place).items() if legal(mask, t)}
                total = prior + sum(seen.values())
                chance = {t: prior * p / total for t, p in chance.items()}
                for token, weight in seen.items():
                    chance[token] = chance.get(token, 0.0) + weight / total
                prior = BACKOFF
        return sorted(chance.items(), key=lambda item: -item[1])[:CHILDREN]

    def _usual(self, mask: bytes, text: Sequence[int]) -> dict[int, float]:
        """Return the table's probabilities of the tokens that the mask allows, given that the next
        token is allowed.
        """
        if self._table is None:
            return {}
        usual = self._table.follow(text[-TAIL:])
        allowed = {token: probability for token, probability in usual.items() if legal(mask, token)}
        illegal = sum(usual.values()) - sum(allowed.values())
        return {
            token: probability / max(1.0 - illegal, 0.05) for token, probability in allowed.items()
        }


def last_of(text: Sequence[int]) -> Last:
    """Return the last two tokens of a text, -1 for those before its beginning."""
    before, last = (-1, -1, *text[-2:])[-2:]
    return before, last


def shared_places() -> Places:
    """Return empty places for all sequences of an engine; they take at most twenty megabytes."""
    return Places(decay=0.9, size=16384)


def _places(tenant: int, mask: bytes, last: Last) -> tuple[Hashable, ...]:
    """Return the keys of a place, from the most general to the most specific."""
    state = hash(mask)
    places = last[1:], state, (state, last[1]), last, (state, *last)
    return tuple((tenant, place) for place in places)
