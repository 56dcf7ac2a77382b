"""The drafter contract: whatever proposes continuations, on host or device.

Lossless acceptance never relies on a drafter: a wrong draft token costs time, not truth.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import Draft, TreeBatch


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """What a drafter needs and costs.

    name              shown in statistics
    max_depth         longest path it can propose
    needs_features    what it keeps in pages pairs a position with the token after it: a page is
                      shared only where that token is the same too (EAGLE family)
    free              proposing takes microseconds and every draft token has an honest score: it is
                      asked for all it knows, and chosen from afterwards
    buys              free, and chooses what pays by itself where `Plan.prices` says what draft
                      tokens cost; it learns by itself how far its scores are to be believed
    merged            free drafters and one that costs time, in one tree, whose scores are how often
                      such nodes were right; the free ones can be asked alone (Plan.model_depth)
    drafts_on_device  its draft tokens for the next step can come of the running one, on the device
    """

    name: str
    max_depth: int
    needs_features: bool = False
    free: bool = False
    buys: bool = False
    merged: bool = False
    drafts_on_device: bool = False


class Drafter(Protocol):
    """Proposes a tree of draft tokens for each row of a plan."""

    traits: DrafterTraits

    def begin(self, slot_init: SlotInit) -> None:
        """A sequence takes slot `slot_init.slot`; `slot_init.tokens` int32[T] is all that is
        decided of it.

        Called once before the slot's first plan; replaces whatever was known of the slot. An
        exception of any method but `describe` ends speculation for the whole engine, and no request
        (engine.parts.Parts).
        """
        ...

    def propose(self, plan: Plan) -> list[Draft]:
        """One draft per row, at most plan.max_nodes[b] draft tokens and plan.max_depth[b] deep, in
        target ids.

        A row with max_nodes 0 gets an empty draft; where no row may draft, there may be no call at
        all, only `observe`. Changes nothing that a rejected draft token would have to undo, or
        undoes it in `observe`.
        """
        ...

    def draft_request(self, plan: Plan) -> DraftRequest | None:
        """What the executor shall do for the draft model at the end of the coming step; None =
        nothing.

        Asked after `propose`, or after `can_overlap`. Changes nothing.
        """
        ...

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Whether the coming step may go on from the running round: then there is no `propose`, and
        it begins before that round is observed. Asked with the running round's own plan first,
        which saves planning in vain, then with the coming one's. Changes nothing.

        False where draft tokens that the plan allows cannot come of the running round, or where
        what `observe` needs of that would be gone: then the step is planned anew, later.
        """
        ...

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Learn the outcome of a step: of each row's tree the known tokens and the accepted path
        became permanent, all other nodes are void.

        Called once per finished step, in order, also for rows without a draft. `outcome.features`
        are valid during the call only, unless they are kept.
        """
        ...

    def end(self, slot: int) -> None:
        """The sequence left its slot: forget what was kept of it. A slot that is not open is no
        error.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info as JSON values; changes nothing."""
        ...
