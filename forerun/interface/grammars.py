"""The contract of structured output: the grammars of all running sequences, by slot."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from forerun.speculative.tree import Draft, NodeMasks, TreeBatch
from forerun.types import Floats, Ints

MIN_LEGAL_MASS = 0.05
"""Chance that a draft model leaves to legal tokens at least: what is smaller is rounding."""

Found = tuple[Ints, Floats]
"""Candidates: target ids and log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of emitted tokens.

    kept      how many of them count; the others, and whatever may come, do not
    complete  the text is whole and ends behind these
    error     why nothing can follow these, where a matcher failed; empty while none has
    lost      it failed through no fault of the grammar's: its process was ended or stopped
    again     the others are to be decided again: the sequence must be closed and opened anew, and
              its matcher will get further
    """

    kept: int
    complete: bool = False
    error: str = ""
    lost: bool = False
    again: bool = False

    @property
    def ends(self) -> bool:
        """Whether the sequence cannot simply go on behind these."""
        return self.complete or self.again or bool(self.error)


class Grammars(Protocol):
    """Holds one matcher per constrained slot. Unconstrained slots cost nothing."""

    def open(self, slot: int, grammar: object, output: Iterable[int]) -> None:
        """Start a fresh matcher in `slot` and advance it over the output so far."""
        ...

    def close(self, slot: int) -> None:
        """Forget the slot's matcher, if it has one."""
        ...

    def ready(self, slot: int, grammar: object) -> bool:
        """Whether the sequence in `slot` may take part in a step: what may follow is known, or will
        be without delay. The slot may not be open yet.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Return as soon as a sequence that was not ready may be, or after that time."""
        ...

    def guide(self, slots: Ints, drafts: list[Draft], nodes: Ints, depth: Ints) -> list[Draft]:
        """Drafts without illegal draft tokens, with forced and likely tokens; others pass
        unchanged.
        """
        ...

    def masks(self, slots: Ints, trees: TreeBatch) -> NodeMasks | None:
        """One mask per reachable node of every constrained row; None when none is."""
        ...

    def commit(self, slot: int, tokens: Sequence[int]) -> Committed:
        """Advance over emitted tokens, as far as they count."""
        ...


class NoGrammars:
    """The Grammars of an engine without structured output."""

    def open(self, slot: int, grammar: object, output: Iterable[int]) -> None:
        """Refuse: nothing here can hold a grammar."""
        raise NotImplementedError("this engine was built without structured output")

    def close(self, slot: int) -> None:
        """Nothing to forget."""

    def ready(self, slot: int, grammar: object) -> bool:
        """Always."""
        return True

    def wait(self, seconds: float) -> None:
        """For nothing."""

    def guide(self, slots: Ints, drafts: list[Draft], nodes: Ints, depth: Ints) -> list[Draft]:
        """Unchanged."""
        return drafts

    def masks(self, slots: Ints, trees: TreeBatch) -> NodeMasks | None:
        """No row is constrained."""
        return None

    def commit(self, slot: int, tokens: Sequence[int]) -> Committed:
        """Never complete."""
        return Committed(len(tokens))


def legal(mask: bytes | None, token: int) -> bool:
    """Whether a mask (bit i of byte t is token 8 t + i) allows a token; None allows all."""
    if mask is None:
        return True
    return 0 <= token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def allowed(found: Found, mask: bytes) -> Found:
    """Those candidates that a mask allows; among them the chance of the others is divided, of
    which it is certain that they are wrong.
    """
    ids, log_probs = found
    keep = np.array([legal(mask, token) for token in ids.tolist()], bool)
    wrong = float(np.exp(log_probs[~keep]).sum())
    log_legal_mass = np.float32(np.log(max(1.0 - wrong, MIN_LEGAL_MASS)))
    return ids[keep], np.minimum(log_probs[keep] - log_legal_mass, 0)
