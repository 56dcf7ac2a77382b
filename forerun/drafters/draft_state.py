"""What a head drafter knows of one sequence."""

from dataclasses import dataclass, field

import numpy as np

from forerun.constrain.token_prior import legal
from forerun.interface.draft_model import GrownDrafts
from forerun.speculative.draft_tree import full_draft
from forerun.speculative.noise import gumbel_of
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft
from forerun.types import AnyArray, Floats, Ints

LOST = -1
MIN_LEGAL_MASS = 0.05
"""Chance that a head leaves to legal tokens at least: what is smaller is rounding."""

Candidates = tuple[Ints, Floats]
"""Target ids and log-probabilities, best first."""


@dataclass(slots=True)
class DraftState:
    """What the drafter knows of one slot.

    tokens   all tokens decided when it was opened: what follows a prompt chunk
    ready    tokens[:ready] have run through target and head; children belong to the last
    found    what may follow the last of these; None = nobody knows
    idle     steps since draft tokens were asked for
    behind   tokens that the head has not seen, and their features: kept for catching up
    begin    position of the first of them; -1 = it lags too far
    grown_ahead  what the last step grew below the last of `ready`, and the row of it; None =
                 nothing
    """

    tokens: Ints
    prompt_len: int
    sampling: Sampling
    ready: int = 0
    found: Candidates | None = None
    idle: int = 0
    behind: list[tuple[Ints, AnyArray]] = field(default_factory=list)
    begin: int = 0
    grown_ahead: tuple[GrownDrafts, int] | None = None

    @property
    def current(self) -> bool:
        """Whether the head has seen all that was decided."""
        return not self.behind and self.begin != LOST

    @property
    def lag(self) -> int:
        """How many tokens the head is behind."""
        return sum(len(tokens) for tokens, _ in self.behind)

    def take(self, most: int) -> tuple[Ints, AnyArray]:
        """The first `most` of the tokens behind, and their features, which are forgotten here."""
        tokens = np.concatenate([part for part, _ in self.behind])
        features = np.concatenate([part for _, part in self.behind])
        self.begin += min(most, len(tokens))
        self.idle = 0
        self.behind = [(tokens[most:], features[most:])] if len(tokens) > most else []
        return tokens[:most], features[:most]

    def draft_extended(self, ready: int, grown: GrownDrafts, row: int) -> None:
        """The step has extended the head to `ready` and grown a tree there."""
        self.ready, self.grown_ahead, self.found = ready, (grown, row), None

    def draft(self, depth: int, nodes: int) -> Draft | None:
        """What was grown ahead, cut to this; None where it is not so deep."""
        if self.grown_ahead is None or self.grown_ahead[0].levels < depth:
            return None
        grown, row = self.grown_ahead
        found = grown.tokens[row], grown.parents[row], grown.value[row]
        return full_draft(grown.width, depth, nodes, *found)

    def children(self, width: int, mask: bytes | None) -> Candidates:
        """The `width` best tokens that may follow, of those that `mask` allows; none where nobody
        knows. Of what was grown ahead, the first level as it is.
        """
        if self.grown_ahead is not None:
            grown, row = self.grown_ahead
            first = slice(grown.width)
            return grown.tokens[row, first], grown.value[row, first]
        if self.found is None:
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        return self.best(self.found if mask is None else allowed(self.found, mask), width, 1)

    def best(self, found: Candidates, width: int, depth: int) -> Candidates:
        """The `width` best for the token that comes `depth` behind the last that is ready.

        At T > 0 the noise of that position, which the target will use, reorders the likeliest.
        """
        ids, log_probs = found
        temperature = self.sampling.temperature
        if temperature == 0 or not len(ids):
            return ids[:width], log_probs[:width]
        scores = log_probs / temperature
        position = self.ready + depth - self.prompt_len
        scores += gumbel_of(self.sampling.seed, position, ids)
        scores -= scores.max() + np.log(np.exp(scores - scores.max()).sum())
        order = np.argsort(-scores, kind="stable")[:width]
        return ids[order], scores[order]


def allowed(found: Candidates, mask: bytes) -> Candidates:
    """Those candidates that a mask allows; among them the chance of the others is divided, of
    which it is certain that they are wrong.
    """
    ids, log_probs = found
    keep = np.array([legal(mask, token) for token in ids.tolist()], bool)
    wrong = float(np.exp(log_probs[~keep]).sum())
    log_legal_mass = np.float32(np.log(max(1.0 - wrong, MIN_LEGAL_MASS)))
    return ids[keep], np.minimum(log_probs[keep] - log_legal_mass, 0)
