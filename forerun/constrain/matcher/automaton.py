"""The contracts of matchers: of a grammar library on the engine's thread, and of a matcher in a
process of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self


class Automaton(Protocol):
    """A position in a compiled grammar. Used by one thread at a time.

    A mask depends only on the tokens taken; otherwise speculation could change the text. An
    automaton therefore only moves forward: libraries' rollback does not guarantee this
    (docs/inside/llguidance-rollback.md). To return to a position, keep a fork.
    """

    @property
    def complete(self) -> bool:
        """Whether the text is complete and only its end may follow. Changes nothing."""
        ...

    @property
    def error(self) -> str:
        """Why the automaton failed permanently (a limit was reached); "" if it has not. Forks made
        before are not affected.
        """
        ...

    def fork(self) -> Self:
        """Return an independent copy at the same position."""
        ...

    def take(self, token: int) -> bool:
        """Advance the grammar by a token. Returns False if the grammar does not allow it; then
        nothing has changed, unless a limit was reached (see error).
        """
        ...

    def forced(self) -> list[int]:
        """Return the ids of the tokens that must follow, in order; often none. Changes nothing."""
        ...

    def mask(self) -> bytes | None:
        """Return one bit per id of the tokenizer, set if the token may follow: token 8 t + i is bit
        i of byte t. None = every token may. Changes nothing but `error`.
        """
        ...


class FreeText(Automaton):
    """An automaton that accepts any text."""

    complete, error = False, ""

    def fork(self) -> Self:
        """Return this object: it has no state."""
        return self

    def take(self, token: int) -> bool:
        """Return True: every token fits."""
        return True

    def forced(self) -> list[int]:
        """Return []: no token is forced."""
        return []

    def mask(self) -> None:
        """Return None: every token may follow."""


class Vocabulary(Protocol):
    """The parts of a tokenizer that a grammar library needs; a Tokenizer is one."""

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

    mask  of the allowed tokens; if the text is complete, of its end
    lost  the error is not due to the grammar
    """

    mask: bytes = b""
    complete: bool = False
    error: str = ""
    lost: bool = False


class AsyncMatcher(Protocol):
    """Matches one sequence with a grammar, forward only, without blocking."""

    @property
    def ready(self) -> bool:
        """Whether the answer for the last token taken has arrived. Never blocks."""
        ...

    @property
    def answer(self) -> MatcherAnswer:
        """The latest answer, empty before the first."""
        ...

    def take(self, tokens: Sequence[int]) -> None:
        """Advance the grammar by decided tokens; returns at once. `answer` follows later."""
        ...

    def close(self) -> None:
        """End the matcher and free its process; no answer arrives any more."""
        ...
