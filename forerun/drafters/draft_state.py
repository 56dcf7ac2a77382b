"""A model drafter's state of one sequence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.errors import EngineError
from forerun.interface.grammars import CandidateTokens, allowed
from forerun.interface.next_draft import NextDrafts
from forerun.interface.slot_init import SequenceText
from forerun.speculative.draft_tree import full_draft
from forerun.speculative.noise import gumbel_of
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft
from forerun.types import Ints


@dataclass(slots=True)
class DraftState:
    """A model drafter's state of one slot.

    text     the sequence's decided tokens
    ready    how many of its tokens have run through target and draft model; candidates follow the
             last of them
    next_candidates  None = unknown, or in `drafted`
    drafted  what the last step drafted after these tokens, and its row; None = nothing
    confident  by path of draft tokens in the last draft: the model's confidence in its best next
             token, and that token
    """

    text: SequenceText
    prompt_len: int
    sampling: Sampling
    ready: int = 0
    next_candidates: CandidateTokens | None = None
    drafted: tuple[NextDrafts, int] | None = None
    confident: dict[tuple[int, ...], tuple[float, int]] = field(default_factory=dict)

    def span(self, begin: int, count: int) -> Ints:
        """Return int32[count+1], tokens from position `begin` on, and the one after them."""
        return self.text.tokens[begin : begin + count + 1]

    def candidates(self) -> CandidateTokens | None:
        """Return the candidates that follow the `ready` tokens; None = unknown."""
        if self.next_candidates is None and self.drafted is not None:
            drafts, row = self.drafted
            if drafts.ids is not None and drafts.log_probs is not None:
                real = drafts.log_probs[row] > -np.inf
                self.next_candidates = drafts.ids[row][real], drafts.log_probs[row][real]
        return self.next_candidates

    def confidences(self, tokens: Sequence[int]) -> Iterator[tuple[float, int]]:
        """Yield (confidence in the best token, that token) along emitted tokens as far as the last
        draft reaches. Clears `confident`.
        """
        confident, self.confident = self.confident, {}
        if self.drafted is not None and self.drafted[0].confident is not None:
            yield from self.drafted[0].confidences(self.drafted[1], tokens)
            return
        for depth in range(len(tokens)):
            stored = confident.get(tuple(tokens[:depth]))
            if stored is None:
                return
            yield stored

    def draft(self, depth: int, nodes: int, constrained: bool) -> Draft | None:
        """Return what the last step drafted, cut to `depth` levels and `nodes` tokens; None if it
        is not as deep, or if a grammar may choose better tokens for the only level.
        """
        if self.drafted is None or self.drafted[0].levels < depth:
            return None
        if constrained and depth == 1 and self.candidates() is not None:
            return None
        drafts, row = self.drafted
        tree = drafts.tokens[row], drafts.parents[row], drafts.value[row]
        return full_draft(drafts.width, depth, nodes, *tree)

    def children(self, width: int, mask: bytes | None) -> CandidateTokens:
        """Return the `width` best next tokens that `mask` allows, with their scores; empty if
        unknown. If the last step drafted, its first level is returned unchanged, unless a grammar
        chooses.
        """
        after = self.candidates()
        if self.drafted is not None and (mask is None or after is None):
            drafts, row = self.drafted
            first = slice(drafts.width)
            return drafts.tokens[row, first], drafts.value[row, first]
        if after is None:
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        return self.best(after, width, 1, mask)

    def best(
        self, choices: CandidateTokens, width: int, depth: int, mask: bytes | None = None
    ) -> CandidateTokens:
        """Return the `width` best candidates that `mask` allows, for the token `depth` after the
        last one that is ready. At T > 0 that position's noise, which the target will use, reorders
        them.
        """
        ids, log_probs = choices if mask is None else allowed(choices, mask)
        temperature = self.sampling.temperature
        if temperature == 0 or not len(ids):
            return ids[:width], log_probs[:width]
        scores = log_probs / temperature
        position = self.ready + depth - self.prompt_len
        scores += gumbel_of(self.sampling.seed, position, ids)
        scores -= scores.max() + np.log(np.exp(scores - scores.max()).sum())
        order = np.argsort(-scores, kind="stable")[:width]
        return ids[order], scores[order]


def not_finite(draft: str) -> EngineError:
    """Return the error for log-probabilities of which not even the largest is finite: such a model
    would draft nothing, without a message.
    """
    return EngineError(
        f"the logits of the draft {draft} are not finite; in float16 numbers overflow that "
        "bfloat16 and float32 hold (--dtype), else its weights are damaged"
    )
