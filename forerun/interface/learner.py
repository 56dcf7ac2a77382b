"""The interface of estimates that are learned while serving and can be saved across restarts."""

from collections.abc import Callable
from typing import Protocol

from forerun.types import Ints


class Learner(Protocol):
    """Estimates of a policy or a drafter. They decide what is drafted and never change a text."""

    def learnt(self) -> bytes:
        """Return the estimates as bytes, a few kilobytes. Call on the engine's thread."""
        ...

    def relearn(self, learnt: bytes) -> bool:
        """Restore what `learnt` returned; call before the engine runs. Returns False, and changes
        nothing, if the bytes are invalid or belong to another configuration.
        """
        ...


class AnswerCounts(Learner, Protocol):
    """N-gram counts of finished answers, and the calibration of an n-gram drafter's scores.

    counted  called at the end of a sequence with its tokens, the index of the first one that was
             counted, and its tenant
    """

    counted: Callable[[Ints, int, int], None]

    def count(self, tokens: Ints, first: int, tenant: int) -> None:
        """Count tokens[first:] after the contexts that precede them in `tokens`, for this tenant
        alone (SlotInit.tenant). Does not call `counted`.
        """
        ...
