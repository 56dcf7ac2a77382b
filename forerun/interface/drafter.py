"""The interface of drafters: a drafter proposes continuations, on the host or on a device.

Lossless acceptance never relies on a drafter: a wrong draft token costs time and never changes the
text.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from forerun.drafts.ngram_table import NgramTable
from forerun.interface.learner import AnswerCounts
from forerun.interface.next_draft import OnDeviceDraftSpec
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import Draft, TreeBatch


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """The needs and costs of a drafter.

    name              shown in statistics
    max_depth         longest path it can propose
    needs_features    its cache pairs a position with the token after it (EAGLE family), so two
                      sequences share a page only if that token is the same too
    no_draft_model    proposing takes microseconds, and the score of a draft token is an estimate of
                      its acceptance: the drafter proposes everything, and the policy selects
    selects_by_cost   no_draft_model, and selects by itself the draft tokens worth the costs in
                      `Plan.node_costs`; it also calibrates its own scores. If merged, only the
                      part without a draft model does so
    merged            drafters without a draft model and a draft model in one tree; scores are
                      observed acceptance rates. The former can run alone (Plan.model_depth)
    drafts_on_device  the running step can make its draft tokens for the next step, on the device
    """

    name: str
    max_depth: int
    needs_features: bool = False
    no_draft_model: bool = False
    selects_by_cost: bool = False
    merged: bool = False
    drafts_on_device: bool = False


class Drafter(Protocol):
    """Proposes a tree of draft tokens for each row of a plan."""

    traits: DrafterTraits

    def begin(self, slot_init: SlotInit) -> None:
        """Start a sequence in slot `slot_init.slot`; read its decided tokens in
        `slot_init.text`.

        Called once before the slot's first plan; replaces all state of the slot. An exception of
        any method but `describe` ends speculation for the whole engine, and fails no request
        (engine.parts.GuardedDrafter).
        """
        ...

    def propose(self, plan: Plan) -> list[Draft]:
        """Return one draft per row in target ids, with at most plan.max_nodes[b] draft tokens and
        plan.max_depth[b] levels.

        A row with max_nodes 0 gets an empty draft. If no row may draft, the engine may skip this
        call and only call `observe`. Changes nothing that a rejected draft token would have to
        undo, or undoes it in `observe`.
        """
        ...

    def on_device_draft(self, plan: Plan) -> OnDeviceDraftSpec | None:
        """Return what the executor must do for the draft model at the end of the coming step; None
        = nothing.

        Called after `propose` or `can_overlap`. Changes nothing.
        """
        ...

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Return whether the coming step may begin from the running round. If so, it begins before
        that round is observed, and there is no `propose`. Called with the running round's own plan
        first, which saves needless planning, then with the coming one's. Changes nothing.

        False if the running round cannot make the draft tokens that the plan allows, or if
        something that `observe` needs of that round would be lost: then the step is planned again,
        later.
        """
        ...

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Learn the outcome of a step: the known tokens and the accepted path of each row's tree
        became permanent, all other nodes are discarded.

        Called once per finished step, in order, also for rows without a draft. `outcome.features`
        are valid during the call only, unless `StepFeatures.store` copies them.
        """
        ...

    def end(self, slot: int) -> None:
        """Discard the state of a slot whose sequence ended. Does nothing if the slot is not
        open.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info as JSON values."""
        ...


class TableDrafter(Drafter, Protocol):
    """A drafter that proposes from an n-gram table and from n-gram counts of finished answers."""

    @property
    def counts(self) -> AnswerCounts:
        """The n-gram counts of finished answers."""
        ...

    def use(self, table: NgramTable) -> None:
        """Replace the n-gram table, from the next `propose` on. The table must outlive its use."""
        ...
