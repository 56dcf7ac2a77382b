"""The interface of structured output: the grammars of all running sequences, by slot."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from forerun.speculative.tree import Draft, NodeMasks, TreeBatch
from forerun.types import Floats, Ints

MIN_LEGAL_MASS = 0.05
"""Lower bound for the probability mass that a draft model gives to legal tokens: less is rounding
error.
"""

CandidateTokens = tuple[Ints, Floats]
"""Candidates of one node: target ids int32[n] and log-probabilities float32[n], best first."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The extent to which emitted tokens agree with a grammar.

    valid        how many of them count; the rest, and all later ones, do not
    complete     the text is complete and ends after these
    error        why no text can follow, if the matcher failed; else empty
    worker_lost  the matcher failed for a reason outside the grammar: its process was ended or
                 stopped
    must_reopen  the rest must be decided again: close the sequence and open it anew; the new
                 matcher gets further
    unconstrained_from_here  nothing that follows is constrained: close the slot's matcher
    """

    valid: int
    complete: bool = False
    error: str = ""
    worker_lost: bool = False
    must_reopen: bool = False
    unconstrained_from_here: bool = False

    @property
    def ends(self) -> bool:
        """Whether the sequence cannot go on as it is: its text is complete, its matcher failed, or
        it must be closed and opened anew.
        """
        return self.complete or self.must_reopen or bool(self.error)


class Grammars(Protocol):
    """Holds one matcher per constrained slot. Unconstrained slots cost nothing."""

    def open(self, slot: int, grammar: object, output: Iterable[int], tenant: int = 0) -> None:
        """Start a fresh matcher of `grammar` in `slot` and advance it over `output`, the target ids
        that the sequence has emitted so far (some after a preemption).

        grammar  what `forerun.constrain` compiled for the request
        tenant   as of SlotInit

        Raises RequestError if the grammar is not a compiled one, NotImplementedError if the engine
        has no structured output; the slot then stays unconstrained.
        """
        ...

    def close(self, slot: int) -> None:
        """Discard the slot's matcher, and end its process if it has one. Does nothing for a slot
        without a matcher.
        """
        ...

    def ready(self, slot: int, grammar: object) -> bool:
        """Return whether the sequence in `slot` may take part in a step: the allowed next tokens
        are known, or will be without delay. Changes nothing.

        If the slot is not open yet, `grammar` alone decides.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Block the engine's thread until a sequence that was not ready may be, for at most
        `seconds`.
        """
        ...

    def filter_and_extend_drafts(
        self, slots: Ints, drafts: list[Draft], nodes: Ints, depth: Ints
    ) -> list[Draft]:
        """Return drafts that obey the grammars: without illegal draft tokens and all nodes below
        them, and with added tokens that the grammar forces or makes likely.

        slots   int32[B]
        drafts  B drafts, left unchanged
        nodes   int32[B]  most draft tokens of each row
        depth   int32[B]  longest path of each row

        Returns B drafts; those of unconstrained rows are unchanged. Changes no matcher.
        """
        ...

    def masks(self, slots: Ints, trees: TreeBatch) -> NodeMasks | None:
        """Return masks for the reachable nodes of every constrained row; None if no row is
        constrained.

        slots int32[B] of the rows of `trees`. A node below an illegal token, or after a complete
        text, has no mask (row -1). The matchers' states are unchanged afterwards.
        """
        ...

    def commit(self, slot: int, tokens: Sequence[int]) -> Committed:
        """Advance the slot's matcher over emitted tokens, as far as they count (see `Committed`).
        Raises KeyError for a slot without a matcher.
        """
        ...


class NoGrammars:
    """The Grammars of an engine without structured output."""

    def open(self, slot: int, grammar: object, output: Iterable[int], tenant: int = 0) -> None:
        """Raise NotImplementedError: an engine without structured output can hold no grammar."""
        raise NotImplementedError("this engine was built without structured output")

    def close(self, slot: int) -> None:
        """Do nothing: no slot has a matcher."""

    def ready(self, slot: int, grammar: object) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def wait(self, seconds: float) -> None:
        """Return at once."""

    def filter_and_extend_drafts(
        self, slots: Ints, drafts: list[Draft], nodes: Ints, depth: Ints
    ) -> list[Draft]:
        """Return the same list, unchanged: no row is constrained."""
        return drafts

    def masks(self, slots: Ints, trees: TreeBatch) -> NodeMasks | None:
        """Return None: no row is constrained."""
        return None

    def commit(self, slot: int, tokens: Sequence[int]) -> Committed:
        """Count all tokens; the text is never complete."""
        return Committed(len(tokens))


def legal(mask: bytes | None, token: int) -> bool:
    """Return whether a mask allows a token id. Bit i of byte t (from the least significant) stands
    for token 8 t + i; ids below 0 or beyond the mask are not allowed. None allows every id.
    """
    if mask is None:
        return True
    return 0 <= token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def allowed(candidates: CandidateTokens, mask: bytes) -> CandidateTokens:
    """Return the candidates that a mask allows, in their order, with log-probabilities given that
    the next token is legal.

    candidates  int32[n] target ids, float32[n] log-probabilities in nats
    mask        as in `legal`

    Divides by the mass of legal tokens: one minus that of the illegal candidates, at least
    MIN_LEGAL_MASS; no result is above 0 nats. May return no candidates. The inputs stay unchanged.
    """
    ids, log_probs = candidates
    keep = np.array([legal(mask, token) for token in ids.tolist()], bool)
    illegal_mass = float(np.exp(log_probs[~keep]).sum())
    log_legal_mass = np.float32(np.log(max(1.0 - illegal_mass, MIN_LEGAL_MASS)))
    return ids[keep], np.minimum(log_probs[keep] - log_legal_mass, 0)
