"""The contracts of matchers: what a grammar library must be able to do on the engine's thread, and
what follows a grammar in a process of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self


class Automaton(Protocol):
    """A place in a compiled grammar. Used by one thread at a time.

    A mask is a function of the tokens taken and of nothing else: on that rests that speculation
    changes no text. An automaton therefore only moves forward: libraries' rollback is not to be
    trusted with that (docs/inside/llguidance-rollback.md). To come back, keep a fork.
    """

    @property
    def complete(self) -> bool:
        """Whether the text is whole and nothing but its end may follow. Changes nothing."""
        ...

    @property
    def error(self) -> str:
        """Why it failed for good, as a limit was reached; empty while it has not. Forks made before
        have not failed with it.
        """
        ...

    def fork(self) -> Self:
        """Return an independent copy at the same place."""
        ...

    def take(self, token: int) -> bool:
        """Step over token id `token`. False if it does not fit; then nothing has changed, unless
        a limit was reached (see error).
        """
        ...

    def forced(self) -> list[int]:
        """Return the ids of the tokens that alone can follow, in order; often none. Changes
        nothing.
        """
        ...

    def mask(self) -> bytes | None:
        """Return one bit per id of the tokenizer, set if the token may follow: token 8 t + i is bit
        i of byte t. None = every token may. Changes nothing but `error`.
        """
        ...


class FreeText(Automaton):
    """Takes every token."""

    complete, error = False, ""

    def fork(self) -> Self:
        """Return itself: it has no state."""
        return self

    def take(self, token: int) -> bool:
        """Return True."""
        return True

    def forced(self) -> list[int]:
        """Return []."""
        return []

    def mask(self) -> None:
        """Return None: every token may follow."""


class Vocabulary(Protocol):
    """What a library needs to know of a tokenizer; a Tokenizer is one."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text, the declared one first; at least one."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The begin-of-text id; None if there is none."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens, whose bytes are not text."""
        ...

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that token `id` stands for, possibly half a character."""
        ...

    def encode_within(self, text: str) -> list[int]:
        """Return the ids of text that continues other text (see Tokenizer.encode_within)."""
        ...


@dataclass(frozen=True, slots=True)
class MatcherAnswer:
    """An AsyncMatcher's answer. See Automaton.

    mask  of the allowed tokens; if the text is complete, its end
    lost  the error is not due to the grammar
    """

    mask: bytes = b""
    complete: bool = False
    error: str = ""
    lost: bool = False


class AsyncMatcher(Protocol):
    """Follows one sequence through a grammar, forward only, without blocking."""

    @property
    def ready(self) -> bool:
        """Whether the answer behind the last token taken is there. Never blocks."""
        ...

    @property
    def answer(self) -> MatcherAnswer:
        """The latest answer, empty before the first."""
        ...

    def take(self, tokens: Sequence[int]) -> None:
        """Step over decided tokens; returns at once. What may follow them will be answered
        later.
        """
        ...

    def close(self) -> None:
        """End it and free its process; nothing is answered any more."""
        ...
