"""An executor and a drafter that count the seconds they take: the step itself stays bare."""

from time import perf_counter
from typing import Any

from forerun.interface.drafter import Drafter
from forerun.interface.executor import Accepted, Executor, Scores
from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import CarriedPlan, Outcome, Plan, SlotInit
from forerun.speculative.tree import Draft, NodeMasks, TreeBatch
from forerun.types import Ints


class TimedExecutor:
    """The Executor contract, passed on; time goes to seconds["verify" | "accept" | "commit"]."""

    def __init__(self, inner: Executor, seconds: dict[str, float]) -> None:
        self._inner = inner
        self._seconds = seconds
        self.limits = inner.limits
        self.name = inner.name

    def open(self, slot_init: SlotInit) -> None:
        """Pass on."""
        self._inner.open(slot_init)

    def close(self, slot: int) -> None:
        """Pass on."""
        self._inner.close(slot)

    def verify(
        self, plan: Plan, trees: TreeBatch, draft_request: DraftRequest | None = None
    ) -> Scores:
        """Pass on and count. A device that works asynchronously shows its time in `accept`."""
        begun = perf_counter()
        result = self._inner.verify(plan, trees, draft_request)
        self._seconds["verify"] += perf_counter() - begun
        return result

    def accept(
        self, plan: Plan, trees: TreeBatch, scores: Scores, masks: NodeMasks | None
    ) -> Accepted:
        """Pass on and count."""
        begun = perf_counter()
        result = self._inner.accept(plan, trees, scores, masks)
        self._seconds["accept"] += perf_counter() - begun
        return result

    def commit(self, plan: Plan, trees: TreeBatch, scores: Scores, accepted: Accepted) -> Outcome:
        """Pass on and count."""
        begun = perf_counter()
        result = self._inner.commit(plan, trees, scores, accepted)
        self._seconds["commit"] += perf_counter() - begun
        return result

    def describe(self) -> dict[str, Any]:
        """Pass on."""
        return self._inner.describe()

    def shutdown(self) -> None:
        """Pass on."""
        self._inner.shutdown()


class TimedDrafter:
    """The Drafter contract, passed on; time goes to seconds["draft"]."""

    def __init__(self, inner: Drafter, seconds: dict[str, float]) -> None:
        self._inner = inner
        self._seconds = seconds
        self.traits = inner.traits

    def begin(self, slot_init: SlotInit) -> None:
        """Pass on and count."""
        begun = perf_counter()
        self._inner.begin(slot_init)
        self._seconds["draft"] += perf_counter() - begun

    def propose(self, plan: Plan) -> list[Draft]:
        """Pass on and count."""
        begun = perf_counter()
        result = self._inner.propose(plan)
        self._seconds["draft"] += perf_counter() - begun
        return result

    def draft_request(self, plan: Plan | CarriedPlan) -> DraftRequest | None:
        """Pass on."""
        return self._inner.draft_request(plan)

    def carry(self, plan: CarriedPlan, drafting: Ints) -> bool:
        """Pass on and count."""
        begun = perf_counter()
        result = self._inner.carry(plan, drafting)
        self._seconds["draft"] += perf_counter() - begun
        return result

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Pass on and count."""
        begun = perf_counter()
        self._inner.observe(plan, trees, outcome)
        self._seconds["draft"] += perf_counter() - begun

    def end(self, slot: int) -> None:
        """Pass on."""
        self._inner.end(slot)

    def describe(self) -> dict[str, Any]:
        """Pass on."""
        return self._inner.describe()
