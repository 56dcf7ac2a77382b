"""What learns while serving, and can go on after a restart from what it knew."""

from collections.abc import Callable
from typing import Protocol

from forerun.types import Ints


class Learner(Protocol):
    """Estimates of a policy or a drafter. They decide what is drafted, never what a text is."""

    def learnt(self) -> bytes:
        """Return what it knows now, a few kilobytes. On the engine's thread."""
        ...

    def relearn(self, learnt: bytes) -> bool:
        """Go on from what `learnt` returned, in an engine that does not run yet. Returns False, and
        changes nothing, if that is of something else.
        """
        ...


class AnswerCounts(Learner, Protocol):
    """What an n-gram drafter counts in finished answers, and learns of its scores.

    counted  called at the end of a sequence with its tokens, where in them those that were counted
             begin, and its tenant
    """

    counted: Callable[[Ints, int, int], None]

    def count(self, tokens: Ints, first: int, tenant: int) -> None:
        """Count tokens[first:] after the contexts that they follow in `tokens`, for this tenant
        alone (SlotInit.tenant), without a call of `counted`.
        """
        ...
