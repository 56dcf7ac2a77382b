"""A drafter whose draft tokens are thinned out by what they cost, before anything verifies them."""

from operator import mul, sub
from time import perf_counter
from typing import Any

from forerun.control.policy import DraftingPolicy
from forerun.interface.drafter import Drafter
from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import CarriedPlan, Outcome, Plan, SlotInit
from forerun.speculative.tree import NO_DRAFT, Draft, TreeBatch
from forerun.types import Ints


class SelectedDrafter:
    """The Drafter contract around another drafter and the policy that chooses among its draft
    tokens.

    It also tells the policy how long each step took, the host's part included, and what came
    of it.
    """

    def __init__(self, inner: Drafter, policy: DraftingPolicy) -> None:
        self.traits = inner.traits
        self._inner = inner
        self._policy = policy
        # Seconds: when the last step ended, drafting in the running one, the pause before it.
        self._ended = self._drafting = self._pause = 0.0
        self._begun = 0.0

    def begin(self, slot_init: SlotInit) -> None:
        """Pass on."""
        self._inner.begin(slot_init)

    def propose(self, plan: Plan) -> list[Draft]:
        """What the other drafter proposes and the policy finds worth its cost."""
        started = perf_counter()
        self._pause = started - self._ended
        drafts = [NO_DRAFT] * plan.rows
        if any(plan.max_nodes.tolist()):
            drafts = self._policy.select(plan.slots, plan.kv_len, self._inner.propose(plan))
        self._begun = perf_counter()
        self._drafting = self._begun - started
        return drafts

    def draft_request(self, plan: Plan | CarriedPlan) -> DraftRequest | None:
        """Pass on."""
        return self._inner.draft_request(plan)

    def carry(self, plan: CarriedPlan, drafting: Ints) -> bool:
        """Pass on. All that is grown within the budget is verified."""
        return self._inner.carry(plan, drafting)

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Pass on, and let the policy learn. Steps with a prefill say nothing of decoding."""
        verified = perf_counter()
        self._inner.observe(plan, trees, outcome)
        if any(plan.max_nodes.tolist()):
            self._learn(plan, outcome)
        self._ended = perf_counter()
        self._time(plan, trees, outcome, verified)
        # A carried step has no beginning of its own: it goes on where this one ends.
        self._begun, self._drafting, self._pause = self._ended, 0.0, 0.0

    def _time(self, plan: Plan, trees: TreeBatch, outcome: Outcome, verified: float) -> None:
        if max(map(len, plan.known)) > 1 or True in plan.constrained.tolist():
            return
        seconds = verified - self._begun
        # A longer pause than the step itself: there was nothing to do.
        seconds += self._pause if self._pause < seconds else 0.0
        start = trees.start.tolist()
        nodes = map(sub, start[1:], start)
        self._policy.slowdown_guard.ran(
            rows=plan.rows,
            nodes=start[-1],
            cached=sum(map(mul, nodes, plan.kv_len.tolist())),
            tokens=sum(outcome.n_tokens.tolist()),
            ms=1000.0 * seconds,
            drafting_ms=1000.0 * (self._drafting + self._ended - verified),
            drafting_allowed=any(plan.max_nodes.tolist()),
        )

    def _learn(self, plan: Plan, outcome: Outcome) -> None:
        for slot, tokens in zip(plan.slots.tolist(), outcome.output_tokens, strict=True):
            if tokens:
                self._policy.learn(slot, tokens)

    def end(self, slot: int) -> None:
        """Pass on."""
        self._inner.end(slot)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return self._inner.describe() | self._policy.describe()
