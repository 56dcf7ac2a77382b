"""Counts which tokens followed the same context in finished answers, while serving.

A target that comes without an n-gram table gets one from its own answers: the dynamic cache of
llama.cpp's lookup decoding, the trie of SGLang's NGRAM, as a back-off model with absolute
discounting (Chen and Goodman 1999, section 2.7). Like every drafter it makes answers faster and
never changes them. The compiled core has a twin (csrc/ngram_cache.h) with the same counts and
probabilities.
"""

from collections.abc import Callable, Iterator, Sequence

from forerun.drafts.ngram_table import Level
from forerun.types import Ints

LONGEST = 4
"""Most tokens of a context."""
FOLLOWERS = 4
"""Most followers counted per context. (Replayed after 60,000 tokens of other answers of the
default model without its table, tokens a step at T=0 and .8: 1.893 and 1.576 with all followers,
1.892 and 1.570 with 4, 1.875 and 1.549 with 2; contexts of 6 and 8 tokens too: 1.824 instead of
1.833 after 32,000.)"""
DISCOUNT = 0.75
"""Subtracted from every follower's count and given to shorter contexts. (Replayed likewise: .5, .8
and 1 by count 1.874 and 1.564; those of drafts/ngram_counts.py 1.894 and 1.576.)
"""
MOST_COUNT = 0xFFFF
"""At this total a context's counts are halved."""


def counted_nothing(tokens: Ints, first: int, tenant: int) -> None:
    """Do nothing: the default of `AnswerCounts.counted`, where the counts are not saved."""


class _Context:
    """The tokens that followed a context: the total count, and counts of at most FOLLOWERS."""

    __slots__ = ("counts", "tokens", "total")

    def __init__(self) -> None:
        self.tokens: list[int] = [0] * FOLLOWERS
        self.counts: list[int] = [0] * FOLLOWERS
        self.total = 0

    def count(self, token: int) -> None:
        """Count a token. A new token takes a free place; else it lowers the rarest follower's
        count, and replaces it at one.
        """
        self.total += 1
        if self.total == MOST_COUNT:
            self.counts = [each // 2 for each in self.counts]
            self.total //= 2
        for place, count in enumerate(self.counts):
            if count and self.tokens[place] == token:
                self.counts[place] += 1
                return
        rarest = min(range(FOLLOWERS), key=lambda place: (self.counts[place], -place))
        if self.counts[rarest] > 1:
            self.counts[rarest] -= 1
            return
        self.tokens[rarest], self.counts[rarest] = token, 1


class NgramCache:
    """Counts what follows contexts of 1 to LONGEST tokens.

    capacity  most contexts, in two halves: when the recent one is full, the former is dropped and
              the recent one takes its place
    counted   see AnswerCounts
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self.counted: Callable[[Ints, int, int], None] = counted_nothing
        self._recent: dict[tuple[int, ...], _Context] = {}
        self._former: dict[tuple[int, ...], _Context] = {}

    @property
    def contexts(self) -> int:
        """The number of contexts; one that is in both halves counts twice."""
        return len(self._recent) + len(self._former)

    def learn(self, tokens: Sequence[int], first: int, tenant: int = 0) -> int:
        """Count tokens[first:] after the contexts that they follow in `tokens`, for `tenant` alone
        (SlotInit.tenant). Returns how many: none without capacity.
        """
        last = len(tokens) if self._half else first
        for end in range(first, last):
            for length in range(1, min(LONGEST, end) + 1):
                self._context((tenant, *tokens[end - length : end])).count(tokens[end])
        return max(last - first, 0)

    def count(self, tokens: Ints, first: int, tenant: int) -> None:
        """Implement AnswerCounts.count."""
        self.learn(tokens.tolist(), first, tenant)

    def learnt(self) -> bytes:
        """Return no bytes: nothing is calibrated here, since the policy calibrates this drafter's
        scores.
        """
        return b""

    def relearn(self, learnt: bytes) -> bool:
        """Return False: there is nothing to restore."""
        return False

    def levels(self, text: Sequence[int], tenant: int = 0) -> Iterator[Level]:
        """Yield estimates of the token after `text` by the counts of `tenant`: by its last token,
        its last two, and so on up to LONGEST, as long as such a context was counted.
        """
        for length in range(1, min(LONGEST, len(text)) + 1):
            key = (tenant, *text[-length:])
            context = self._recent.get(key) or self._former.get(key)
            if context is None:
                break
            shares = [
                (token, (count - DISCOUNT) / context.total)
                for token, count in zip(context.tokens, context.counts, strict=True)
                if count
            ]
            known = sum(count - DISCOUNT for count in context.counts if count)
            yield 1.0 - known / context.total, shares

    def _context(self, key: tuple[int, ...]) -> _Context:
        """Return the entry of a context, after moving it to the recent half."""
        if (context := self._recent.get(key)) is not None:
            return context
        context = self._former.get(key) or _Context()
        if len(self._recent) >= self._half:
            self._recent, self._former = {}, self._recent
        self._recent[key] = context
        return context
