"""The contract of structured output: the grammars of all running sequences, by slot."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from forerun.speculative.tree import Draft, NodeMasks, TreeBatch
from forerun.types import Floats, Ints

MIN_LEGAL_MASS = 0.05
"""Chance that a draft model leaves to legal tokens at least: what is smaller is rounding."""

CandidateTokens = tuple[Ints, Floats]
"""Of one place: target ids int32[n] and log-probabilities float32[n], best first."""


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
        """Whether the sequence cannot go on as it is: its text is complete, its matcher failed, or
        it must be closed and opened anew.
        """
        return self.complete or self.again or bool(self.error)


class Grammars(Protocol):
    """Holds one matcher per constrained slot. Unconstrained slots cost nothing."""

    def open(self, slot: int, grammar: object, output: Iterable[int]) -> None:
        """Start a fresh matcher of `grammar` in `slot` and advance it over `output`, the target ids
        that the sequence has emitted so far (some after a preemption).

        grammar  what `forerun.constrain` compiled for the request

        Raises RequestError where the grammar is not a compiled one, NotImplementedError where the
        engine has no structured output; the slot then stays unconstrained.
        """
        ...

    def close(self, slot: int) -> None:
        """Forget the slot's matcher, and end its process where it has one. Without a matcher,
        nothing happens.
        """
        ...

    def ready(self, slot: int, grammar: object) -> bool:
        """Whether the sequence in `slot` may take part in a step: what may follow is known, or will
        be without delay. Changes nothing.

        The slot may not be open yet: then `grammar` alone decides.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Block the engine's thread until a sequence that was not ready may be, or for `seconds` at
        most.
        """
        ...

    def guide(self, slots: Ints, drafts: list[Draft], nodes: Ints, depth: Ints) -> list[Draft]:
        """Drafts that obey the grammars: illegal draft tokens are removed together with what hangs
        below them, tokens that alone can follow and likely ones are added.

        slots   int32[B]
        drafts  B drafts, left unchanged
        nodes   int32[B]  draft tokens of each row at most
        depth   int32[B]  longest path of each row

        Returns B drafts; rows that no grammar holds pass unchanged. Changes no matcher.
        """
        ...

    def masks(self, slots: Ints, trees: TreeBatch) -> NodeMasks | None:
        """Masks for the nodes of every constrained row that can be accepted; None where no row is
        constrained.

        slots int32[B] of the rows of `trees`. A node below an illegal token, or behind a complete
        text, has no mask (row -1): it cannot be reached. Leaves every matcher where it was.
        """
        ...

    def commit(self, slot: int, tokens: Sequence[int]) -> Committed:
        """Advance the slot's matcher over emitted tokens, as far as they count: `Committed` says
        how many do, and whether the text is complete or cannot go on. Raises KeyError for a slot
        without a matcher.
        """
        ...


class NoGrammars:
    """The Grammars of an engine without structured output."""

    def open(self, slot: int, grammar: object, output: Iterable[int]) -> None:
        """Raises NotImplementedError: an engine without structured output can hold no grammar."""
        raise NotImplementedError("this engine was built without structured output")

    def close(self, slot: int) -> None:
        """Does nothing: no slot has a matcher."""

    def ready(self, slot: int, grammar: object) -> bool:
        """True: nothing has to be waited for."""
        return True

    def wait(self, seconds: float) -> None:
        """Returns at once."""

    def guide(self, slots: Ints, drafts: list[Draft], nodes: Ints, depth: Ints) -> list[Draft]:
        """The same list, unchanged: no row is constrained."""
        return drafts

    def masks(self, slots: Ints, trees: TreeBatch) -> NodeMasks | None:
        """None: no row is constrained."""
        return None

    def commit(self, slot: int, tokens: Sequence[int]) -> Committed:
        """All tokens count and the text is never complete."""
        return Committed(len(tokens))


def legal(mask: bytes | None, token: int) -> bool:
    """Whether a mask allows a token id. In byte t, bit i (counted from the least) stands for token
    8 t + i; ids beyond its end and below 0 are not allowed. None allows every id.
    """
    if mask is None:
        return True
    return 0 <= token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def allowed(candidates: CandidateTokens, mask: bytes) -> CandidateTokens:
    """The candidates that a mask allows, in their order, with log-probabilities given that the next
    token is legal.

    candidates  int32[n] target ids, float32[n] log-probabilities in nats
    mask        as in `legal`

    The probability of the illegal ones is taken out of the total, which counts as MIN_LEGAL_MASS at
    least; no result is above 0 nats. May return no candidates. The inputs stay unchanged.
    """
    ids, log_probs = candidates
    keep = np.array([legal(mask, token) for token in ids.tolist()], bool)
    wrong = float(np.exp(log_probs[~keep]).sum())
    log_legal_mass = np.float32(np.log(max(1.0 - wrong, MIN_LEGAL_MASS)))
    return ids[keep], np.minimum(log_probs[keep] - log_legal_mass, 0)
