"""A drafter whose guesses are thinned out by what they cost, before anything verifies them."""

from time import perf_counter
from typing import Any

from forerun.engine.drafter import Drafter
from forerun.engine.plan import Opening, Outcome, Plan
from forerun.spec.select import SelectivePolicy
from forerun.spec.tree import Draft, TreeBatch


class SelectedDrafter:
    """The Drafter contract around another drafter and the policy that chooses among its guesses.

    It also tells the policy how long each step took, from the proposal to the outcome, and what
    came of it.
    """

    def __init__(self, inner: Drafter, policy: SelectivePolicy) -> None:
        self.traits = inner.traits
        self._inner = inner
        self._policy = policy
        self._begun = 0.0

    def begin(self, opening: Opening) -> None:
        """Pass on."""
        self._inner.begin(opening)

    def propose(self, plan: Plan) -> list[Draft]:
        """What the other drafter proposes and the policy finds worth its cost."""
        drafts = self._inner.propose(plan)
        self._begun = perf_counter()
        return self._policy.select(plan.slots, plan.kv_len, drafts)

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Pass on, and let the policy learn. Steps with a prefill say nothing of decoding."""
        seconds = perf_counter() - self._begun
        self._inner.observe(plan, trees, outcome)
        counts = outcome.n_tokens.tolist()
        for row, slot in enumerate(plan.slots.tolist()):
            if counts[row]:
                self._policy.learn(slot, outcome.tokens[row, : counts[row]].tolist())
        if trees.known.max() == 1:
            nodes = trees.start[1:] - trees.start[:-1]
            cached = int((nodes * plan.kv_len).sum())
            self._policy.costs.learn(len(trees.tokens), cached, 1000.0 * seconds)

    def end(self, slot: int) -> None:
        """Pass on."""
        self._inner.end(slot)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return self._inner.describe() | self._policy.describe()
