"""Opening and closing a slot with everyone who keeps something by slot."""

from forerun.constrain.grammars import Grammars
from forerun.engine.drafter import Drafter
from forerun.engine.executor import Executor
from forerun.engine.sequence import Sequence
from forerun.spec.policy import Policy


class Seats:
    """Which slots are open to executor, drafter, policy and grammars.

    taken  the open slots; `close` of any other slot does nothing
    """

    def __init__(
        self, executor: Executor, drafter: Drafter, policy: Policy, grammars: Grammars
    ) -> None:
        self._executor = executor
        self._drafter = drafter
        self._policy = policy
        self._grammars = grammars
        self.taken: set[int] = set()

    def open(self, sequence: Sequence) -> None:
        """Open the slot of `sequence` to all. Raises what they raise; then `close` cleans up."""
        opening = sequence.opening()
        self._executor.open(opening)
        self.taken.add(opening.slot)
        self._drafter.begin(opening)
        self._policy.open(opening.slot)
        grammar = sequence.request.grammar
        if grammar is not None:
            self._grammars.open(opening.slot, grammar, sequence.output.tolist())

    def close(self, slot: int) -> None:
        """Close a slot to all that it was opened to."""
        if slot not in self.taken:
            return
        self.taken.remove(slot)
        self._grammars.close(slot)
        self._policy.close(slot)
        self._drafter.end(slot)
        self._executor.close(slot)

    def abandon(self) -> None:
        """Speak to nobody any more: the engine gives up, and another failure would hide why."""
        self.taken.clear()
