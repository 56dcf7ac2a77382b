"""What a head drafter knows of one sequence."""

from dataclasses import dataclass, field

import numpy as np

from forerun.engine.heads import Grown
from forerun.spec.draft import full_draft
from forerun.spec.sampling import Sampling
from forerun.spec.tree import Draft
from forerun.types import AnyArray, Floats, Ints

LOST = -1
"""`Seat.begin` of a sequence that lags too far to be drafted for again."""


@dataclass(slots=True)
class Seat:
    """What the drafter knows of one slot.

    tokens   all tokens decided when it was opened: what follows a prompt chunk
    ready    tokens[:ready] have run through target and head; children belong to the last
    children target ids and log-probabilities after the last extension, best first; None = none
    idle     steps since guesses were asked for
    behind   tokens that the head has not seen, and their features: kept for catching up
    begin    position of the first of them; -1 = it lags too far
    ahead    what the last step grew below the last of `ready`, and the row of it; None = nothing
    """

    tokens: Ints
    prompt_len: int
    sampling: Sampling
    ready: int = 0
    children: tuple[Ints, Floats] | None = None
    idle: int = 0
    behind: list[tuple[Ints, AnyArray]] = field(default_factory=list)
    begin: int = 0
    ahead: tuple[Grown, int] | None = None

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

    def follow(self, ready: int, grown: Grown, row: int) -> None:
        """The step has extended the head to `ready` and grown a tree there."""
        self.ready, self.ahead = ready, (grown, row)
        first = slice(grown.width)
        self.children = (grown.tokens[row, first], grown.value[row, first])

    def draft(self, depth: int, nodes: int) -> Draft | None:
        """What was grown ahead, cut to this; None where it is not so deep."""
        if self.ahead is None or self.ahead[0].levels < depth:
            return None
        grown, row = self.ahead
        found = grown.tokens[row], grown.parents[row], grown.value[row]
        return full_draft(grown.width, depth, nodes, *found)
