"""What a model drafter knows of one sequence."""

from dataclasses import dataclass, field

import numpy as np

from forerun.errors import EngineError
from forerun.interface.features import HeldFeatures
from forerun.interface.grammars import Found, allowed
from forerun.interface.next_draft import NextDrafts
from forerun.speculative.draft_tree import full_draft
from forerun.speculative.noise import gumbel_of
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft
from forerun.types import Floats, Ints


@dataclass(frozen=True, slots=True)
class Pending:
    """Tokens that the draft model has not seen: see interface.draft_model.Extension.

    features  of the tokens; None where the model reads none
    """

    tokens: Ints
    next_tokens: Ints
    features: HeldFeatures | None

    def part(self, begin: int, end: int | None) -> "Pending":
        """Tokens `begin` to before `end` (None = to the last) with their features."""
        features = self.features
        if features is not None:
            features = features.select(np.arange(len(self.tokens))[begin:end])
        return Pending(self.tokens[begin:end], self.next_tokens[begin:end], features)


@dataclass(slots=True)
class DraftState:
    """What the drafter knows of one slot.

    tokens   all tokens decided when it was opened: what follows a prompt chunk
    ready    tokens[:ready] have run through target and draft model; candidates belong to the last
    found    what may follow the last of these; None = nobody knows
    idle     steps since draft tokens were asked for
    behind   tokens that the draft model has not seen
    begin    position of the first of them
    drafted  what the last step drafted below the last of `ready`, and the row of it; None =
             nothing
    """

    tokens: Ints
    prompt_len: int
    sampling: Sampling
    ready: int = 0
    found: Found | None = None
    idle: int = 0
    behind: list[Pending] = field(default_factory=list)
    begin: int = 0
    drafted: tuple[NextDrafts, int] | None = None

    @property
    def current(self) -> bool:
        """Whether the draft model has run every token that was decided."""
        return not self.behind

    @property
    def lag(self) -> int:
        """How many decided tokens the draft model has not run."""
        return sum(len(part.tokens) for part in self.behind)

    def keep(self, pending: Pending, begin: int) -> None:
        """Append tokens to those behind; the first of `pending` stands at position `begin`."""
        if not self.behind:
            self.begin = begin
        self.behind.append(pending)

    def take(self, most: int) -> Pending:
        """Remove and return the first `most` tokens behind, all where fewer."""
        kept = [part.features for part in self.behind if part.features is not None]
        whole = Pending(
            np.concatenate([part.tokens for part in self.behind]),
            np.concatenate([part.next_tokens for part in self.behind]),
            kept[0].joined(kept[1:]) if kept else None,
        )
        count = len(whole.tokens)
        self.begin += min(most, count)
        self.behind = [whole.part(most, None)] if count > most else []
        return whole.part(0, most)

    def draft_extended(self, ready: int, drafts: NextDrafts, row: int) -> None:
        """A step ran the draft model up to `ready` and drafted `row` of `drafts` below that."""
        self.ready, self.drafted, self.found = ready, (drafts, row), None
        if drafts.ids is not None and drafts.log_probs is not None:
            real = drafts.log_probs[row] > -np.inf
            self.found = drafts.ids[row][real], drafts.log_probs[row][real]

    def draft(self, depth: int, nodes: int, constrained: bool) -> Draft | None:
        """What the last step drafted, cut to `depth` and `nodes`; None where it is not so deep, or
        where a grammar may choose better ones for the only level.
        """
        if self.drafted is None or self.drafted[0].levels < depth:
            return None
        if constrained and depth == 1 and self.found is not None:
            return None
        drafts, row = self.drafted
        found = drafts.tokens[row], drafts.parents[row], drafts.value[row]
        return full_draft(drafts.width, depth, nodes, *found)

    def children(self, width: int, mask: bytes | None) -> Found:
        """The `width` best next tokens that `mask` allows, with their scores; none where nobody
        knows. Of what the last step drafted the first level as it is, unless a grammar chooses.
        """
        if self.drafted is not None and (mask is None or self.found is None):
            drafts, row = self.drafted
            first = slice(drafts.width)
            return drafts.tokens[row, first], drafts.value[row, first]
        if self.found is None:
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        return self.best(self.found, width, 1, mask)

    def best(self, found: Found, width: int, depth: int, mask: bytes | None = None) -> Found:
        """The `width` best of `found` that `mask` allows, for the token that comes `depth` behind
        the last that is ready. At T > 0 that position's noise, which the target will use, reorders
        the likeliest.
        """
        ids, log_probs = found if mask is None else allowed(found, mask)
        temperature = self.sampling.temperature
        if temperature == 0 or not len(ids):
            return ids[:width], log_probs[:width]
        scores = log_probs / temperature
        position = self.ready + depth - self.prompt_len
        scores += gumbel_of(self.sampling.seed, position, ids)
        scores -= scores.max() + np.log(np.exp(scores - scores.max()).sum())
        order = np.argsort(-scores, kind="stable")[:width]
        return ids[order], scores[order]


def check_finite(draft: str, log_probs: Floats) -> None:
    """Raises EngineError where the best of candidates float32[n,k], or a best float32[n], is not
    finite: such a model would draft nothing for ever, and nobody would know why.
    """
    best = log_probs.max(-1, initial=-np.inf) if log_probs.ndim > 1 else log_probs
    if not np.isfinite(best).all():
        raise EngineError(
            f"the logits of the draft {draft} are not finite; in float16 numbers overflow that "
            "bfloat16 and float32 hold (--dtype), else its weights are damaged"
        )
