"""The usual tokens at places where a grammar leaves a choice: learned from constrained text.

Much of what a grammar leaves open is always decided in the same way: the blank after a colon, the
line break and indentation before the next property. N-grams of the text predict little of it, for
the words around differ. Here the key of a place in the text is the grammar's state, that is its
mask, and the last tokens; first in this sequence, then in all earlier ones of its tenant. If
neither knows better, the model's n-gram table gives its usual tokens.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from forerun.drafts.ngram_table import NgramTable
from forerun.interface.grammars import legal

Weights = dict[int, float]
"""Decayed counts of the tokens that were chosen somewhere."""

Last = tuple[int, int]
"""The last token but one and the last; -1 before the beginning."""

DOUBT = 4.0
"""Initial observations of other tokens at every place."""
BACKOFF = 4.0
"""Weight of the more general estimate in the more special one, in observations."""
CHILDREN = 2
"""Tokens that are expected at a place at most: a third is hardly ever worth a node."""
TAIL = 8
"""Tokens of the text that a table is shown: more than any table's contexts have."""
FADED = 0.1
"""Weight below which a token is forgotten."""


class Places:
    """Weights by place; the least recently used go first. Not locked.

    decay  what is left of an observation's weight after the next one at its place
    size   places that are remembered
    """

    def __init__(self, decay: float, size: int) -> None:
        self._decay, self._size = decay, size
        self._weights: OrderedDict[Hashable, Weights] = OrderedDict()

    def learn(self, place: Hashable, token: int) -> None:
        """Record that `token` was chosen at this place; earlier choices there fade by `decay`. May
        forget the least recently used place.
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
    table   the target's usual continuations, or None
    tenant  as of SlotInit
    """

    def __init__(self, shared: Places, table: NgramTable | None = None, tenant: int = 0) -> None:
        self._shared, self._table, self._tenant = shared, table, tenant
        self._own = Places(decay=0.7, size=1024)

    def learn(self, mask: bytes, last: Last, token: int) -> None:
        """Record that `token` was chosen after the tokens `last`, where the grammar's mask was
        `mask`: for this sequence and for all of its tenant that share places.
        """
        for place in _places(self._tenant, mask, last):
            self._shared.learn(place, token)
            self._own.learn(place, token)

    def likely(self, mask: bytes, text: Sequence[int]) -> list[tuple[int, float]]:
        """Return the likeliest tokens after `text` that `mask` allows, and their probabilities,
        best first, CHILDREN at most; none if nothing is known.

        Estimates go from the most general place to the most special, each smoothed by the one
        before (back-off).
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
        """Return the table's tokens that the mask allows; the others' probability is divided among
        them.
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
    """Return new places for all sequences of an engine: twenty megabytes at most."""
    return Places(decay=0.9, size=16384)


def _places(tenant: int, mask: bytes, last: Last) -> tuple[Hashable, ...]:
    """Return the keys of a place, from the most general to the most special."""
    state = hash(mask)
    places = last[1:], state, (state, last[1]), last, (state, *last)
    return tuple((tenant, place) for place in places)
