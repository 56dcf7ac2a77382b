"""Drafts with a draft model: a network that grows a tree level by level, or proposes a block.

After every step the accepted tokens run through the draft model once more, with the target's true
features if it reads any (SGLang: draft extend), so that its cache never holds a draft token:
without this, acceptance drops and no error shows it. From the last of them the tree grows
(speculative/draft_tree.py), all rows of a step in one pass per level, or a block in one pass. A
step of a capable device extends and drafts by itself (`OnDeviceDraftSpec`), and leaves nothing to
do; else deferred_extend.py extends the model, at once or later.
"""

from itertools import compress
from typing import Any

import numpy as np

from forerun.draft_shape import DraftShape
from forerun.drafters.deferred_extend import DeferredDraftExtend
from forerun.drafters.draft_passes import DraftPasses, Masks
from forerun.drafters.draft_state import DraftState, not_finite
from forerun.drafters.map_coverage import MapCoverage
from forerun.interface.draft_model import DraftModel
from forerun.interface.drafter import DrafterTraits
from forerun.interface.executor import ExecutorLimits
from forerun.interface.next_draft import OnDeviceDraftSpec
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NO_DRAFT, Draft, TreeBatch, full_size
from forerun.types import Bools

PATIENCE = 1
"""Consecutive plain steps in which the model is still extended: the last step of an answer is
plain, and pages that later requests reuse should hold its entries.
"""


class ModelDrafter:
    """A Drafter that proposes trees with a draft model. mask: see DraftPasses."""

    def __init__(
        self,
        model: DraftModel,
        limits: ExecutorLimits,
        shape: DraftShape,
        mask: Masks = lambda _: None,
    ) -> None:
        traits = model.traits
        depth = min(shape.depth, traits.block_size) if traits.block_size else shape.depth
        self.traits = DrafterTraits(
            traits.name,
            depth,
            needs_features=traits.features.kind != "none" and bool(traits.cache),
            drafts_on_device=shape.full(bool(traits.block_size)),
        )
        self._model, self._traits, self._width = model, traits, shape.width
        self._passes = DraftPasses(model, shape._replace(depth=depth), mask)
        self._states: list[DraftState | None] = [None] * limits.slots
        self._deferred = DeferredDraftExtend(limits.slots, self._passes, traits)
        part = traits.vocab < limits.vocab
        self._coverage = MapCoverage(traits.target_ids, limits.vocab) if part else None
        # Plain steps in a row, by slot.
        self._plain_steps = np.zeros(limits.slots, np.int32)
        # The numbers of levels that a device has prepared for.
        self._levels = [each.depth for each in DraftShape(depth, 1, depth).declared()]
        # Whether steps on the device have extended the model.
        self._extended_on_device = False

    def begin(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot; features come with the steps."""
        slot = slot_init.slot
        self._states[slot] = DraftState(slot_init.text, slot_init.prompt_len, slot_init.sampling)
        self._plain_steps[slot], self._deferred.begin[slot] = 0, -1

    def end(self, slot: int) -> None:
        """Discard the slot's state; its pages belong to the target's page table."""
        self._states[slot] = None

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: `name`, `width` of the trees, and the model's own; for a
        reduced vocabulary, those of MapCoverage; for a model with confidences, how often tokens of
        each were right.
        """
        facts = {"name": self.traits.name, "width": self._width, **self._model.describe()}
        if self._coverage is not None:
            facts["draft_vocabulary"] = self._coverage.describe()
        right = self._passes.confidence.describe()
        return facts | ({"right_by_confidence": right} if right else {})

    # --- learning what was accepted ------------------------------------------------------

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Extend the model by the tokens that became permanent, or store them for later. Raises
        EngineError if the model's logits are not finite.
        """
        states = self._states_of(plan)
        if self._coverage is not None and outcome.drafts is None:
            self._coverage.count(outcome)
        if self._traits.confident:
            self._passes.learn(states, outcome)
        plain = not any(plan.max_nodes.tolist())
        if plain and self._deferred.defer_step(plan, trees, outcome):
            return
        failed = plan.samples & (outcome.n_tokens == 0)
        active = (plan.max_nodes > 0) | ~plan.samples
        self._plain_steps[plan.slots] = np.where(active, 0, self._plain_steps[plan.slots] + 1)
        pending = ~self._store_drafts(plan, states, outcome)
        for state in compress(states, pending.tolist()):
            state.next_candidates = state.drafted = None
        pending &= ~failed
        if pending.any():
            # Rows that will probably not draft soon.
            idle = (self._extended_on_device and plain) | (self._plain_steps[plan.slots] > PATIENCE)
            self._deferred.extend(plan, states, trees, outcome, pending, idle)

    def _store_drafts(self, plan: Plan, states: list[DraftState], outcome: Outcome) -> Bools:
        """Store what the step drafted. Returns bool[B], the rows that it extended the model for."""
        drafts = outcome.drafts
        if drafts is None:
            return np.zeros(plan.rows, np.bool_)
        first = [full_size(drafts.width, level) for level in range(drafts.levels)]
        if not np.isfinite(drafts.value[drafts.rows][:, first]).all():
            raise not_finite(self._traits.name)
        self._extended_on_device = self._extended_on_device or bool(drafts.rows.any())
        ready = (plan.kv_len + outcome.n_tokens).tolist()
        for row in np.flatnonzero(drafts.rows).tolist():
            state = states[row]
            state.ready, state.next_candidates, state.drafted = ready[row], None, (drafts, row)
        return drafts.rows

    # --- proposing -----------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[Draft]:
        """Return a draft per row, empty if none is allowed or the model lags. Raises as
        `observe`.
        """
        drafts, states, undrafted = [NO_DRAFT] * plan.rows, self._states_of(plan), list[int]()
        self._deferred.catch_up(plan, states, np.flatnonzero(plan.max_nodes), True)
        arrays = plan.max_nodes, plan.max_depth, plan.kv_len, plan.constrained
        rows = zip(states, *map(np.ndarray.tolist, arrays), strict=True)
        for row, (state, nodes, deepest, kv_len, constrained) in enumerate(rows):
            depth = min(deepest, self.traits.max_depth)
            if state.drafted is not None:  # More levels would take passes of their own.
                depth = min(depth, state.drafted[0].levels)
            if nodes > 0 and depth > 0 and state.ready == kv_len:
                ready = state.draft(depth, nodes, constrained)
                if ready is None:
                    undrafted.append(row)
                else:
                    drafts[row] = ready
        for row, draft in self._passes.drafts(plan, states, undrafted).items():
            drafts[row] = draft
        return drafts

    def on_device_draft(self, plan: Plan) -> OnDeviceDraftSpec | None:
        """Return the request that the step extends the model and drafts, for slots that have no
        deferred tokens; None if there are none. It requests as many levels as this plan allows,
        since the next step mostly allows the same; for at least one, so that no tokens are
        deferred.
        """
        if not self.traits.drafts_on_device:
            return None
        depth = min(int(plan.max_depth.max()), self.traits.max_depth)
        # In a step without draft tokens the model is extended by prompts only.
        follows = (np.array(plan.known_counts) > 1) | ~plan.samples | (depth > 0)
        if not follows.any():
            return None
        levels = next(levels for levels in self._levels if levels >= depth)
        follows &= self._deferred.begin[plan.slots] < 0
        if self._traits.runs_roots and follows.any():
            # A sequence that begins after shared pages has no root before its first extension.
            follows &= np.array([state.ready > 0 for state in self._states_of(plan)])
        slots, sure = plan.slots[follows], self._passes.confidence
        chances = sure.chances(self.traits.max_depth) if self._traits.confident else None
        return OnDeviceDraftSpec(slots, self._width, levels, chances) if len(slots) else None

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Return whether the host needs nothing of the running round: either it drafts for every
        row, or both it and the coming one are plain and the model's input is only stored.
        """
        plain = not (plan.max_nodes.any() or running.plan.max_nodes.any())
        if plain and (
            self._extended_on_device or (self._plain_steps[running.plan.slots] >= PATIENCE).all()
        ):
            return True
        return {*plan.slots.tolist()} <= {*running.drafting.tolist()}

    def _states_of(self, plan: Plan) -> list[DraftState]:
        """Return the state of each row."""
        states = list(map(self._states.__getitem__, plan.slots.tolist()))
        assert None not in states, "a planned slot was begun"
        return states  # type: ignore[return-value]
