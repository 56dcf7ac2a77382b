"""Drafting with a draft model: a network that grows a tree level by level, or proposes a block.

After every step the accepted tokens run through the draft model once more, with the target's true
features where it reads any ("draft-extend"), so that its cache never holds anything drafted:
forgetting this costs acceptance silently. From the last of them the tree grows
(speculative/draft_tree.py), all rows of a step in one pass per level, or one pass in all. A step of
a device that can do so extends and drafts by itself (`DraftRequest`); then nothing is left to do,
and else backlog.py does it, at once or later. A step without draft tokens is a plain one, also
where others draft by themselves.
"""

from array import array
from itertools import compress
from typing import Any

import numpy as np

from forerun.columns import Column, column, consume
from forerun.draft_shape import DraftShape
from forerun.drafters.backlog import Backlog
from forerun.drafters.draft_passes import DraftPasses, Masks
from forerun.drafters.draft_state import DraftState, not_finite
from forerun.interface.draft_model import DraftModel
from forerun.interface.drafter import DrafterTraits
from forerun.interface.executor import ExecutorLimits
from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NO_DRAFT, Draft, TreeBatch, full_size
from forerun.types import Bools

PATIENCE = 1
"""Steps without a budget for draft tokens in which the model is still extended: the last step of an
answer is one, and pages that later requests reuse should hold its entries."""
_tokens_of: Column[DraftState, "array[int]"] = column("tokens")


class ModelDrafter:
    """The Drafter contract on a draft model. mask: see DraftPasses."""

    def __init__(
        self,
        model: DraftModel,
        limits: ExecutorLimits,
        shape: DraftShape,
        mask: Masks = lambda _: None,
    ) -> None:
        about = model.traits
        depth = min(shape.depth, about.block_size) if about.block_size else shape.depth
        self.traits = DrafterTraits(
            about.name,
            depth,
            needs_features=about.features.kind != "none",
            drafts_on_device=shape.full(bool(about.block_size)),
        )
        self._model, self._about, self._width = model, about, shape.width
        self._passes = DraftPasses(model, shape._replace(depth=depth), mask)
        self._states: list[DraftState | None] = [None] * limits.slots
        self._backlog = Backlog(limits.slots, self._passes, about)
        # Steps since draft tokens were asked for, by slot.
        self._idle = np.zeros(limits.slots, np.int32)
        # That steps may grow: a device has prepared for these.
        self._levels = [each.depth for each in DraftShape(depth, 1, depth).declared()]
        # Whether steps have extended the model.
        self._within = False

    def begin(self, slot_init: SlotInit) -> None:
        """Remember the decided tokens of a sequence; features come with the steps."""
        slot, tokens = slot_init.slot, array("i", slot_init.tokens.astype(np.int32).tobytes())
        self._states[slot] = DraftState(tokens, slot_init.prompt_len, slot_init.sampling)
        self._idle[slot], self._backlog.begin[slot] = 0, -1

    def end(self, slot: int) -> None:
        """Forget the slot; its pages are freed by the owner of the target's."""
        self._states[slot] = None

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info: `name`, `width` of the trees, and the model's own."""
        return {"name": self.traits.name, "width": self._width, **self._model.describe()}

    # --- learning what was accepted ------------------------------------------------------

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Extend the model by what became permanent, or keep it for later. EngineError: NaN."""
        states = self._of(plan)
        consume(map(array.extend, _tokens_of(states), outcome.output_tokens))
        plain = not plan.max_nodes.any()
        if plain and self._backlog.keep_one(plan, trees, outcome):
            return
        failed = plan.samples & (outcome.n_tokens == 0)
        active = (plan.max_nodes > 0) | ~plan.samples
        self._idle[plan.slots] = np.where(active, 0, self._idle[plan.slots] + 1)
        left = ~self._drafted(plan, states, outcome)
        for state in compress(states, left.tolist()):
            state.found = state.drafted = None
        left &= ~failed
        if left.any():
            # That nobody will ask for draft tokens of a row soon.
            idle = (self._within and plain) | (self._idle[plan.slots] > PATIENCE)
            self._backlog.extend(plan, states, trees, outcome, left, idle)

    def _drafted(self, plan: Plan, states: list[DraftState], outcome: Outcome) -> Bools:
        """bool[B] the rows that the step has extended the model for, and drafted: remember what."""
        drafts = outcome.drafts
        if drafts is None:
            return np.zeros(plan.rows, np.bool_)
        first = [full_size(drafts.width, level) for level in range(drafts.levels)]
        if not np.isfinite(drafts.value[drafts.rows][:, first]).all():
            raise not_finite(self._about.name)
        self._within = self._within or bool(drafts.rows.any())
        ready = (plan.kv_len + outcome.n_tokens).tolist()
        for row in np.flatnonzero(drafts.rows).tolist():
            state = states[row]
            state.ready, state.found, state.drafted = ready[row], None, (drafts, row)
        return drafts.rows

    # --- proposing -----------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[Draft]:
        """A draft per row, empty where none is allowed or the model lags. Raises as `observe`."""
        drafts, states, left = [NO_DRAFT] * plan.rows, self._of(plan), list[int]()
        self._backlog.catch_up(plan, states, np.flatnonzero(plan.max_nodes), True)
        asked = plan.max_nodes, plan.max_depth, plan.kv_len, plan.constrained
        rows = zip(states, *map(np.ndarray.tolist, asked), strict=True)
        for row, (state, nodes, deepest, kv_len, constrained) in enumerate(rows):
            depth = min(deepest, self.traits.max_depth)
            if state.drafted is not None:  # Deeper than this would take passes of its own.
                depth = min(depth, state.drafted[0].levels)
            if nodes > 0 and depth > 0 and state.ready == kv_len:
                ready = state.draft(depth, nodes, constrained)
                if ready is None:
                    left.append(row)
                else:
                    drafts[row] = ready
        for row, draft in self._passes.drafts(plan, states, left).items():
            drafts[row] = draft
        return drafts

    def draft_request(self, plan: Plan) -> DraftRequest | None:
        """Have the step extend the model and draft, for slots that the model is not behind with;
        else None. As many levels as are wanted now, which mostly holds for the next step too, or
        one: the model keeps up.
        """
        depth = min(int(plan.max_depth.max()), self.traits.max_depth)
        # Of a step without draft tokens prompts are followed, and nothing else.
        wanted = (np.array(plan.known_counts) > 1) | ~plan.samples | (depth > 0)
        if not (self.traits.drafts_on_device and wanted.any()):
            return None
        levels = next(levels for levels in self._levels if levels >= depth)
        wanted &= self._backlog.begin[plan.slots] < 0
        if self._about.runs_roots and wanted.any():
            # What begins behind pages that another filled has no root before it was extended once.
            wanted &= np.array([state.ready > 0 for state in self._of(plan)])
        slots = plan.slots[wanted]
        return DraftRequest(slots, self._width, levels) if len(slots) else None

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Whether nothing of the running round is needed on the host: it drafts for every row, or
        both it and the coming one are plain, and what the model reads of it is only kept.
        """
        plain = not (plan.max_nodes.any() or running.plan.max_nodes.any())
        if plain and (self._within or (self._idle[running.plan.slots] >= PATIENCE).all()):
            return True
        return {*plan.slots.tolist()} <= {*running.drafting.tolist()}

    def _of(self, plan: Plan) -> list[DraftState]:
        """Of each row."""
        states = list(map(self._states.__getitem__, plan.slots.tolist()))
        assert None not in states, "a planned slot was begun"
        return states  # type: ignore[return-value]
