"""The beginning of a constraint that waits for a text, by the bytes of tokens.

A model may spell the end of its reasoning with its own token for it, with others, or with
one that continues behind it (`>{"`). The constraint begins behind the last byte of the text, as the
reader of the answer sees it (text/reasoning.py), so the rest of a token that continues is already
constrained.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from forerun.constrain.grammar import LETTER, Start, ThinkingBudget
from forerun.constrain.matcher.automaton import Vocabulary
from forerun.interface.grammars import legal


class MarkerTokens:
    """How the tokens of a vocabulary spell a start. Immutable; all its requests share it.

    Reads every token of the vocabulary once: 5 to 50 ms.
    """

    def __init__(self, start: Start, vocabulary: Vocabulary) -> None:
        self._text = start.text.encode()
        silent = frozenset[int]() if start.control else vocabulary.special_ids
        ids = range(vocabulary.vocab_size)
        self._bytes = [b"" if id in silent else vocabulary.token_bytes(id) for id in ids]
        last = self._text[-1:]
        plain = set(ids) - vocabulary.special_ids
        passing = [id for id in ids if last in self._bytes[id][:-1]]
        self._beyond = [
            {id: rest for id in passing if (rest := self.take(seen, id)[1])}
            for seen in range(len(self._text))
        ]
        rests = {rest for tokens in self._beyond for rest in tokens.values()}
        # The lowest id where several tokens have the same bytes.
        self._spelling = {
            text: id for id in reversed(ids) if id in plain and (text := self._bytes[id]) in rests
        }

    def __len__(self) -> int:
        """Return the bytes of the text."""
        return len(self._text)

    def take(self, seen: int, token: int) -> tuple[int, bytes]:
        """Return how many bytes of the marker are at the text's end behind `token`, if there were
        `seen` before; and the token's bytes behind the marker's end, b"" if there are none.
        """
        piece = self._bytes[token] if 0 <= token < len(self._bytes) else b""
        tail = self._text[:seen] + piece
        at = tail.find(self._text)
        if at >= 0:
            return len(self._text), tail[at + len(self._text) :]
        sizes = range(min(len(tail), len(self._text) - 1), 0, -1)
        return next((size for size in sizes if tail.endswith(self._text[:size])), 0), b""

    def letter(self, lacking: int, token: int) -> int:
        """Return how many bytes of the last character of a UTF-8 text are missing after `token`;
        lacking: how many were missing before it.
        """
        for byte in self._bytes[token] if 0 <= token < len(self._bytes) else b"":
            if byte & 0xC0 == 0x80:
                lacking = max(lacking - 1, 0)
            else:
                lacking = 3 if byte >= 0xF0 else 2 if byte >= 0xE0 else 1 if byte >= 0xC0 else 0
        return lacking

    def spelling(self, rest: bytes) -> int | None:
        """Return the token whose bytes are exactly `rest`; None if there is none. Known only for
        bytes that some token has behind the marker's end.
        """
        return self._spelling.get(rest)

    def beyond(self, seen: int) -> dict[int, bytes]:
        """Return the tokens that continue behind the marker's end if the text ended with `seen`
        bytes of it, with the bytes behind it.
        """
        return self._beyond[seen]


class MarkerPlace(NamedTuple):
    """Where a sequence is on its way to its constraint.

    seen     bytes of the marker that the text ends with
    thought  tokens before the marker so far, those in the prompt included
    letter   bytes that the text's last letter still lacks
    forced   ids of the budget's ending that are there
    call     bytes of a call's opener that the text ends with; all of them: the call has begun
    """

    seen: int = 0
    thought: int = 0
    letter: int = 0
    forced: int = 0
    call: int = 0


class StartMarker:
    """One sequence's way to where its constraint begins.

    ends    end-of-text ids
    vocab   ids below this are known
    budget  of the tokens on the way; None = there may be any number
    free    every text may follow the marker
    call    ends the thought, too: the budget forces nothing behind it
    place   None = the constraint has begun
    """

    def __init__(
        self,
        marker: MarkerTokens | None,
        ends: tuple[int, ...],
        vocab: int,
        budget: ThinkingBudget | None = None,
        free: bool = False,
        call: MarkerTokens | None = None,
    ) -> None:
        self._marker, self._ends, self._vocab = marker, ends, vocab
        self._budget, self._free, self._call = budget, free, call
        self._masks: dict[int, bytes | None] = {}
        used = 0 if budget is None else budget.used
        self.place: MarkerPlace | None = None if marker is None else MarkerPlace(thought=used)

    @property
    def waiting(self) -> bool:
        """Whether the constraint has not begun."""
        return self.place is not None

    def forced(self) -> list[int]:
        """Return the ids that alone may follow because the budget is used up, often none.

        A letter of several tokens is finished first, of which there are at most three more.
        """
        place, budget = self.place, self._budget
        if place is None or budget is None:
            return []
        if self._call is not None and place.call == len(self._call):
            return []
        over = place.thought - budget.tokens
        if not place.forced and (over < 0 or (place.letter and over < LETTER)):
            return []
        return list(budget.ending[place.forced :])

    def take(self, token: int) -> tuple[int, ...] | None:
        """Step over a token, and say what the constraint sees of it: the token itself once that has
        begun; none while the marker is ahead.

        Where the marker ends within the token, its rest is seen as the token that says just that;
        where no token does, None, and nothing changes. None also where the budget forces another.
        """
        marker, place = self._marker, self.place
        if marker is None or place is None:
            return (token,)
        if forced := self.forced():
            if token != forced[0]:
                return None
            self.place = place._replace(forced=place.forced + 1) if len(forced) > 1 else None
            return ()
        seen, rest = marker.take(place.seen, token)
        spelling = marker.spelling(rest) if rest and not self._free else None
        if rest and spelling is None and not self._free:
            return None
        letter = marker.letter(place.letter, token)
        call = place.call
        if self._call is not None and call < len(self._call):
            call, _ = self._call.take(call, token)
        following = MarkerPlace(seen, place.thought + 1, letter, call=call)
        self.place = None if seen == len(marker) else following
        return () if spelling is None else (spelling,)

    def mask(self, first: bytes | None) -> bytes | None:
        """Return the allowed tokens: one bit per id; None = any token.

        first  the constraint's mask where it now is, or at its beginning while waiting

        While waiting, excludes tokens whose bytes behind the marker's end do not begin the
        constraint, and the end of text unless the constraint allows an empty text: it would
        never begin. Afterwards it is `first`.
        """
        if self._marker is None or self.place is None:
            return first
        if forced := self.forced():
            return only((forced[0],), self._vocab)
        if self._free:
            return None
        seen = self.place.seen
        if seen not in self._masks:
            wrong = [] if any(legal(first, token) for token in self._ends) else [*self._ends]
            for token, rest in self._marker.beyond(seen).items():
                spelling = self._marker.spelling(rest)
                if spelling is None or not legal(first, spelling):
                    wrong.append(token)
            self._masks[seen] = _all_but(wrong, self._vocab) if wrong else None
        return self._masks[seen]


@cache
def only(tokens: tuple[int, ...], vocab: int) -> bytes:
    """Return the mask, one bit per id below `vocab`, that allows only these tokens."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _all_but(tokens: list[int], vocab: int) -> bytes:
    """Return the mask that forbids these tokens."""
    bits = np.ones(-(-vocab // 32) * 32, np.uint8)
    bits[tokens] = 0
    return np.packbits(bits, bitorder="little").tobytes()
