"""Finds the start of a constraint that begins after a certain text, by the bytes of tokens.

A model may spell the end of its reasoning with its own token for it, with others, or with one that
continues after it (`>{"`). The constraint begins after the last byte of the text, as the parser of
the answer sees it (text/reasoning.py), so the rest of such a token is already constrained.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from forerun.constrain.grammar import LETTER, Start, ThinkingBudget
from forerun.constrain.matcher.automaton import Vocabulary
from forerun.interface.grammars import legal


class MarkerTokens:
    """The spellings of a start text by the tokens of a vocabulary. Immutable; its requests share
    it. Creating one reads every token of the vocabulary: 5 to 50 ms.
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
        """Return the length of the text in bytes."""
        return len(self._text)

    def take(self, seen: int, token: int) -> tuple[int, bytes]:
        """Return how many bytes of the marker the text ends with after `token`, if there were
        `seen` before it; and the token's bytes after the marker's end, b"" if there are none.
        """
        piece = self._bytes[token] if 0 <= token < len(self._bytes) else b""
        tail = self._text[:seen] + piece
        at = tail.find(self._text)
        if at >= 0:
            return len(self._text), tail[at + len(self._text) :]
        sizes = range(min(len(tail), len(self._text) - 1), 0, -1)
        return next((size for size in sizes if tail.endswith(self._text[:size])), 0), b""

    def letter(self, lacking: int, token: int) -> int:
        """Return how many bytes of the last UTF-8 character are missing after `token`.

        lacking  how many were missing before it
        """
        for byte in self._bytes[token] if 0 <= token < len(self._bytes) else b"":
            if byte & 0xC0 == 0x80:
                lacking = max(lacking - 1, 0)
            else:
                lacking = 3 if byte >= 0xF0 else 2 if byte >= 0xE0 else 1 if byte >= 0xC0 else 0
        return lacking

    def spelling(self, rest: bytes) -> int | None:
        """Return the token whose bytes are exactly `rest`; None if there is none. Known only for
        bytes that some token has after the marker's end.
        """
        return self._spelling.get(rest)

    def beyond(self, seen: int) -> dict[int, bytes]:
        """Return, for a text that ends with `seen` bytes of the marker, the tokens that complete
        the marker and continue after it, with their bytes after it.
        """
        return self._beyond[seen]


class MarkerPlace(NamedTuple):
    """A sequence's position before its constraint.

    seen     bytes of the marker that the text ends with
    thought  tokens before the marker so far, those in the prompt included
    letter   bytes that the text's last character still lacks
    forced   ids of the budget's ending that were emitted
    call     bytes of a call's opener that the text ends with; all of them: the call has begun
    """

    seen: int = 0
    thought: int = 0
    letter: int = 0
    forced: int = 0
    call: int = 0


class StartMarker:
    """Follows one sequence up to where its constraint begins.

    ends    end-of-text ids
    vocab   ids below this are known
    budget  of the tokens before the marker; None = no limit
    free    any text may follow the marker
    call    also ends the reasoning: the budget forces nothing after it
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
        """Return the ids that must follow because the budget is used up, often none. A character of
        several tokens is finished first, with at most three more tokens.
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
        """Advance by a token, and return the part of it, as tokens, that the constraint applies to:
        the token itself once the constraint has begun, none before. If the marker ends within the
        token, its rest counts as the token with exactly these bytes. Returns None, and changes
        nothing, if no token has them, or if the budget forces another token.
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

        first  the constraint's present mask, or its first one while waiting

        While waiting, excludes tokens whose bytes after the marker's end do not begin the
        constraint, and the end of text unless the constraint allows an empty text: it would never
        begin. Afterwards it is `first`.
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
