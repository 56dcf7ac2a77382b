"""Drafting with a draft model: a network that grows a tree level by level, or proposes a block.

After every step the accepted tokens run through the draft model once more, with the target's true
features where it reads any ("draft-extend"), so that its cache never holds anything drafted:
forgetting this costs acceptance silently. From the last of them the tree grows
(speculative/draft_tree.py), all rows of a step in one pass per level, or one pass in all. A step of
a device that can do so extends and drafts by itself (`DraftRequest`); then nothing is left to do.

Of a sequence that nobody wants draft tokens for, what the model would read is only kept ("at zero
the draft costs nothing"); it catches up, in one pass, when draft tokens are asked for again, or
when no more features can be kept. A step without draft tokens is a plain one, also where others
draft by themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.drafters.draft_state import DraftState, Pending, check_finite
from forerun.interface.draft_model import (
    CANDIDATES,
    DraftBlock,
    DraftLevel,
    DraftModel,
    Extension,
)
from forerun.interface.drafter import DrafterTraits
from forerun.interface.executor import ExecutorLimits
from forerun.interface.features import MOST_KEPT, Features
from forerun.interface.next_draft import DraftRequest, draft_sizes
from forerun.interface.plan import Outcome, Plan, Round, SlotInit
from forerun.speculative.draft_tree import DraftTree, TreeShape, block_draft, full_size
from forerun.speculative.tree import NO_DRAFT, Draft, TreeBatch
from forerun.types import AnyArray, Ints

PATIENCE = 1
"""Steps without a budget for draft tokens in which the model is still extended: the last step of an
answer is one, and pages that later requests reuse should hold its entries."""
MOST_BEHIND = MOST_KEPT - 4
"""Tokens a sequence may lag behind with its features kept; then the model reads them, asked or not.
A few less than can be kept: rounds that have begun meanwhile write theirs too."""

Masks = Callable[[int], bytes | None]
"""Of a slot: what a grammar allows to follow; None = everything."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """What became permanent of a row: flat nodes, their tokens, and the token after each."""

    nodes: AnyArray
    tokens: Ints
    next_tokens: Ints


class ModelDrafter:
    """The Drafter contract on a draft model.

    mask  asked for the first level only: further down, masks cost more than they bring
          (docs/log.md)
    """

    def __init__(
        self,
        model: DraftModel,
        limits: ExecutorLimits,
        shape: TreeShape,
        mask: Masks = lambda _: None,
    ) -> None:
        about = model.traits
        depth = min(shape.depth, about.block_size) if about.block_size else shape.depth
        self._reads = about.features.kind != "none"
        self.traits = DrafterTraits(
            about.name,
            depth,
            needs_features=self._reads,
            drafts_on_device=shape.full(bool(about.block_size)),
        )
        self._model, self._about, self._shape, self._mask = model, about, shape, mask
        self._states: list[DraftState | None] = [None] * limits.slots
        # That steps may grow: a device has prepared for these.
        self._levels = [size.depth for size in draft_sizes(depth, depth)]
        # Whether steps have extended the model.
        self._within = False

    def begin(self, slot_init: SlotInit) -> None:
        """Remember the decided tokens of a sequence; features come with the steps."""
        self._states[slot_init.slot] = DraftState(
            slot_init.tokens, slot_init.prompt_len, slot_init.sampling
        )

    def end(self, slot: int) -> None:
        """Forget the slot; its pages are freed by the owner of the target's."""
        self._states[slot] = None

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info: `name`, `width` of the trees, and the model's own."""
        return {"name": self.traits.name, "width": self._shape.width, **self._model.describe()}

    # --- learning what was accepted ------------------------------------------------------

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Extend the model by what became permanent, or keep it for later. EngineError: NaN."""
        drafts, paths = outcome.drafts, outcome.paths
        chains: dict[int, _Chain] = {}
        if drafts is not None:
            first = [full_size(drafts.width, level) for level in range(drafts.levels)]
            check_finite(self._about.name, drafts.value[drafts.rows][:, first].ravel())
        for row in range(plan.rows):
            state = self._state(plan, row)
            state.idle = 0 if plan.max_nodes[row] or not plan.samples[row] else state.idle + 1
            if drafts is not None and drafts.rows[row]:
                self._within = True
                ready = int(plan.kv_len[row] + outcome.n_tokens[row])
                state.draft_extended(ready, drafts, row)
                continue
            chain = self._permanent(plan, trees, outcome, row, paths[row])
            if len(chain.nodes):
                chains[row] = chain
        late = [row for row in chains if self._state(plan, row).behind]
        if any(self._full(self._state(plan, row), chains[row]) for row in late):
            self._catch_up(plan, late, [])
        lazy = [row for row, chain in chains.items() if self._may_wait(plan, row, chain)]
        rows = [row for row in chains if row not in lazy]
        self._keep(plan, lazy, chains, outcome.features)
        if rows:
            parts, features = [chains[row] for row in rows], None
            if self._reads and outcome.features is not None:
                features = outcome.features.select(np.concatenate([each.nodes for each in parts]))
            self._extend(plan, rows, parts, plan.kv_len[rows], features, rows)

    def _permanent(
        self, plan: Plan, trees: TreeBatch, outcome: Outcome, row: int, path: Ints
    ) -> _Chain:
        """What became permanent of `row`, whose accepted draft tokens are `path`."""
        state = self._state(plan, row)
        state.found = state.drafted = None
        emitted = outcome.tokens[row, : outcome.n_tokens[row]]
        nodes = np.arange(trees.start[row], trees.root(row) + 1)
        known = plan.known[row]
        if len(emitted) == 0:
            if plan.samples[row]:  # The row failed: nothing of it matters any more.
                return _Chain(nodes[:0], known[:0], known[:0])
            after = state.tokens[int(plan.kv_len[row]) + len(known)]
            return _Chain(nodes, known, np.append(known[1:], after))
        next_tokens = np.concatenate([known[1:], emitted])
        tokens = np.append(known[:1], next_tokens[:-1])
        return _Chain(np.concatenate([nodes, path]), tokens, next_tokens)

    def _may_wait(self, plan: Plan, row: int, chain: _Chain) -> bool:
        """Whether it is likely that nobody will ask for draft tokens of this row soon.

        A prompt is never put off: its pages are shared. Pages of text that is put off lack the
        draft's entries until it catches up; who reuses them meanwhile is drafted for a bit worse.
        """
        state, short = self._state(plan, row), len(plan.known[row]) == 1
        plain = self._within and not plan.max_nodes.any()
        rests = not state.current or (short and (state.idle > PATIENCE or plain))
        return rests and not self._full(state, chain)

    def _full(self, state: DraftState, chain: _Chain) -> bool:
        """Whether no features of so many more tokens can be kept."""
        return self._reads and state.lag + len(chain.tokens) > MOST_BEHIND

    def _keep(
        self, plan: Plan, rows: list[int], chains: dict[int, _Chain], features: Features | None
    ) -> None:
        """Keep what extending these rows takes."""
        kept, begin = None, 0
        if rows and self._reads and features is not None:
            kept = features.select(np.concatenate([chains[row].nodes for row in rows])).keep()
        for row in rows:
            state, chain = self._state(plan, row), chains[row]
            part = np.arange(begin, begin := begin + len(chain.nodes))
            mine = None if kept is None else kept.select(part)
            state.keep(Pending(chain.tokens, chain.next_tokens, mine), int(plan.kv_len[row]))

    def _catch_up(self, plan: Plan, late: list[int], asked: list[int]) -> None:
        """Extend the rows `late` that lag behind, as many tokens at a time as the model takes;
        asked: those whose candidates are wanted.
        """
        while late := [row for row in late if self._state(plan, row).behind]:
            rows, parts, begins, room = [], [], [], self._about.max_nodes
            for row in late:
                if room:
                    state = self._state(plan, row)
                    rows.append(row)
                    begins.append(state.begin)
                    parts.append(state.take(room))
                    room -= len(parts[-1].tokens)
            kept = [part.features for part in parts if part.features is not None]
            chains = [_Chain(part.tokens, part.tokens, part.next_tokens) for part in parts]
            features = kept[0].joined(kept[1:]) if kept else None
            self._extend(plan, rows, chains, np.array(begins, np.int32), features, asked)

    def _extend(
        self,
        plan: Plan,
        rows: list[int],
        chains: list[_Chain],
        kv_len: Ints,
        features: Features | None,
        asked: list[int],
    ) -> None:
        """Run chains of tokens, one per row, and remember what may follow those that are asked."""
        start = np.zeros(len(rows) + 1, np.int32)
        start[1:] = np.cumsum([len(chain.tokens) for chain in chains])
        sampled = [i for i, row in enumerate(rows) if plan.samples[row]]
        scored = [] if self._about.block_size else [i for i in sampled if rows[i] in asked]
        found = self._model.extend(
            Extension(
                tokens=np.concatenate([chain.tokens for chain in chains]).astype(np.int32),
                next_tokens=np.concatenate([c.next_tokens for c in chains]).astype(np.int32),
                start=start,
                kv_len=kv_len,
                slots=plan.slots[rows],
                pages=plan.page_table[rows],
                scored=start[1:][scored] - np.int32(1),
                candidates=self._wanted(plan, rows),
            ),
            features,
        )
        for which in sampled:
            self._state(plan, rows[which]).ready = int(kv_len[which]) + len(chains[which].tokens)
        check_finite(self._about.name, found.log_probs[: len(scored)])
        for index, which in enumerate(scored):
            ids = self._about.target_ids[found.ids[index]]
            self._state(plan, rows[which]).found = ids, found.log_probs[index]

    # --- proposing -----------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[Draft]:
        """A draft per row, empty where none is allowed or the model lags. Raises as `observe`."""
        late = np.flatnonzero(plan.max_nodes).tolist()
        self._catch_up(plan, late, late)
        drafts = [NO_DRAFT] * plan.rows
        rows: list[int] = []
        for row, nodes in enumerate(plan.max_nodes.tolist()):
            state = self._state(plan, row)
            depth = min(int(plan.max_depth[row]), self.traits.max_depth)
            if state.drafted is not None:  # Deeper than this would take passes of its own.
                depth = min(depth, state.drafted[0].levels)
            if nodes > 0 and depth > 0 and state.ready == plan.kv_len[row]:
                ready = state.draft(depth, nodes, bool(plan.constrained[row]))
                if ready is None:
                    rows.append(row)
                else:
                    drafts[row] = ready
        # What a grammar may choose of a block's first tokens has come with the step.
        grown = [r for r in rows if not self._about.block_size or self._state(plan, r).found]
        others = [row for row in rows if row not in grown]
        proposed = self._trees(plan, grown) + self._blocks(plan, others)
        for row, draft in zip(grown + others, proposed, strict=True):
            drafts[row] = draft
        return drafts

    def draft_request(self, plan: Plan) -> DraftRequest | None:
        """Have the step extend the model and draft, for slots that the model is not behind with;
        else None. As many levels as are wanted now, which mostly holds for the next step too, or
        one: the model keeps up.
        """
        depth = min(int(plan.max_depth.max()), self.traits.max_depth)
        if not self.traits.drafts_on_device:
            return None
        levels = next(levels for levels in self._levels if levels >= depth)
        states = [self._state(plan, row) for row in range(plan.rows)]
        # Of a step without draft tokens prompts are followed, and nothing else.
        prompts = [len(plan.known[row]) > 1 or not plan.samples[row] for row in range(plan.rows)]
        # What begins behind pages that another filled has no root before it was extended once.
        first = self._about.runs_roots
        current = [state.current and (state.ready > 0 or not first) for state in states]
        slots = plan.slots[current & (np.array(prompts) | (depth > 0))]
        return DraftRequest(slots, self._shape.width, levels) if len(slots) else None

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Whether the running round drafts for every row, or both it and the coming one are plain:
        nothing of it is needed on the host.
        """
        plain = not (plan.max_nodes.any() or running.plan.max_nodes.any())
        return (self._within and plain) or bool(np.isin(plan.slots, running.drafting).all())

    def _blocks(self, plan: Plan, rows: list[int]) -> list[Draft]:
        """Drafts of these rows, in one pass."""
        if not rows:
            return []
        depth = min(int(plan.max_depth[rows].max()), self.traits.max_depth)
        found = self._model.block(
            DraftBlock(
                roots=np.array([plan.known[row][-1] for row in rows], np.int32),
                kv_len=plan.kv_len[rows],
                slots=plan.slots[rows],
                pages=plan.page_table[rows],
                depth=depth,
                candidates=self._wanted(plan, rows),
            )
        )
        drafts = []
        for row, ids, log_probs in zip(rows, found.ids, found.log_probs, strict=True):
            state, tree = self._state(plan, row), DraftTree(self._shape.width)
            mask = self._mask(int(plan.slots[row])) if plan.constrained[row] else None
            levels = [
                state.best(
                    (self._about.target_ids[ids[level]], log_probs[level]),
                    self._shape.width,
                    level + 1,
                    mask if level == 0 else None,
                )
                for level in range(min(depth, int(plan.max_depth[row])))
            ]
            drafts.append(_of_levels(tree, levels, int(plan.max_nodes[row])))
        return drafts

    def _trees(self, plan: Plan, rows: list[int]) -> list[Draft]:
        """Grow the trees of these rows from their roots, one pass per level."""
        growing = {row: DraftTree(self._shape.width) for row in rows}
        for row, tree in growing.items():
            mask = self._mask(int(plan.slots[row])) if plan.constrained[row] else None
            tokens, values = self._state(plan, row).children(self._shape.width, mask)
            tree.extend(tokens[None], values[None])
        numbers = dict.fromkeys(rows, np.zeros(0, np.int32))
        run = 0
        for level in range(2, self.traits.max_depth + 1):
            more = [r for r in rows if level <= plan.max_depth[r] and len(growing[r].frontier())]
            wanted = sum(len(growing[row].frontier()) for row in more)
            if not more or run + wanted > self._about.max_nodes:
                break
            self._expand(plan, {row: growing[row] for row in more}, numbers, run)
            run += wanted
        return [tree.draft(int(plan.max_nodes[row])) for row, tree in growing.items()]

    def _expand(
        self, plan: Plan, growing: dict[int, DraftTree], numbers: dict[int, Ints], first: int
    ) -> None:
        """One level of these rows: run the frontier, hang its best children below it.

        numbers[row][i] is the draft node number of draft token i, -1 where it was never run.
        """
        rows, frontiers = list(growing), [tree.frontier() for tree in growing.values()]
        start = np.zeros(len(rows) + 1, np.int32)
        start[1:] = np.cumsum([len(frontier) for frontier in frontiers])
        tokens, parents = [], []
        for (row, tree), frontier in zip(growing.items(), frontiers, strict=True):
            missing = len(tree.tokens) - len(numbers[row])
            numbers[row] = np.append(numbers[row], np.full(missing, -1, np.int32))
            above = tree.parents[frontier]
            parents.append(np.where(above < 0, -1, numbers[row][above]))
            tokens.append(tree.tokens[frontier])
        found = self._model.expand(
            DraftLevel(
                tokens=np.concatenate(tokens).astype(np.int32),
                parents=np.concatenate(parents).astype(np.int32),
                start=start,
                kv_len=plan.kv_len[rows],
                slots=plan.slots[rows],
                pages=plan.page_table[rows],
                first=first,
                candidates=self._wanted(plan, rows),
            )
        )
        check_finite(self._about.name, found.log_probs)
        ids = self._about.target_ids[found.ids]
        for index, ((row, tree), frontier) in enumerate(
            zip(growing.items(), frontiers, strict=True)
        ):
            state = self._state(plan, row)
            span = range(int(start[index]), int(start[index + 1]))
            numbers[row][frontier] = first + np.arange(span.start, span.stop, dtype=np.int32)
            best = [
                state.best((ids[n], found.log_probs[n]), self._shape.width, tree.levels + 1)
                for n in span
            ]
            tree.extend(np.stack([each for each, _ in best]), np.stack([each for _, each in best]))

    def _wanted(self, plan: Plan, rows: list[int]) -> int:
        """Candidates to ask for: more than are hung, where noise or a grammar will choose."""
        hot = any(self._state(plan, row).sampling.temperature > 0 for row in rows)
        width = self._shape.width
        return max(CANDIDATES, width) if hot or plan.constrained[rows].any() else width

    def _state(self, plan: Plan, row: int) -> DraftState:
        state = self._states[int(plan.slots[row])]
        assert state is not None, "a planned slot was begun"
        return state


def _of_levels(tree: DraftTree, levels: list[tuple[Ints, AnyArray]], nodes: int) -> Draft:
    """The draft of a block: candidates of each depth, whatever stands above them."""
    width = min(len(tokens) for tokens, _ in levels)
    tokens, values = (np.stack([part[i][:width] for part in levels]) for i in (0, 1))
    return block_draft(tokens, values, nodes)
