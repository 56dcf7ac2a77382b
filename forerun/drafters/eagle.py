"""EAGLE-family drafting: a head that reads the target's features and draft tokens a tree.

Of a sequence that nobody wants draft tokens for, the features are only kept ("at zero the draft
costs nothing"); the head catches up, in one pass, when draft tokens are asked for again. Otherwise,
after every step the accepted tokens run through the head once more with the target's true
features ("draft-extend"), so that its cache never holds anything drafted: forgetting this costs
acceptance silently. From the last of them the tree grows level by level
(speculative/draft_tree.py), all rows of a step in one pass per level.

Positions (EAGLE, section 4.1): the draft's position q pairs feature f_q with token t_{q+1} and
predicts t_{q+2}; so after n decided tokens, the last not yet run, both caches hold n - 1.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from forerun.drafters.draft_state import LOST, DraftState
from forerun.interface.draft_model import CANDIDATES, DraftForward, DraftModel, DraftRequest
from forerun.interface.drafter import DrafterTraits
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Outcome, Plan, SlotInit
from forerun.speculative.draft_tree import Growth
from forerun.speculative.tree import NO_DRAFT, Draft, TreeBatch
from forerun.types import AnyArray, Floats, Ints

PATIENCE = 1
"""Steps without a wish for draft tokens in which the head goes on following: the last step of an
answer is one, and pages that later requests reuse should hold its entries."""
MOST_BEHIND = 256
"""Tokens a sequence may lag behind; kept in 16 bits, some 3 KB each for a small target. One that
lags further is not drafted for any more."""


class EagleDrafter:
    """Grows trees with a draft head.

    target_ids  int32[Vd] target id of every draft id
    width       children per expanded node, and nodes expanded per level; 1 = chains
    mask        of a slot: what a grammar allows to follow; None = everything. Asked for the first
                level only: further down, masks cost more than they bring (docs/log.md)
    """

    def __init__(
        self,
        device: DraftModel,
        target_ids: Ints,
        limits: ExecutorLimits,
        width: int,
        depth: int,
        mask: Callable[[int], bytes | None] = lambda _: None,
    ) -> None:
        self._mask = mask
        self.traits = DrafterTraits("eagle3", depth, needs_features=True, drafts_on_device=True)
        self._device, self._target_ids, self._width = device, target_ids, width
        self._states: list[DraftState | None] = [None] * limits.slots

    def begin(self, slot_init: SlotInit) -> None:
        """Remember the known tokens; features come with the steps."""
        self._states[slot_init.slot] = DraftState(
            slot_init.tokens, slot_init.prompt_len, slot_init.sampling
        )

    def end(self, slot: int) -> None:
        """Forget the slot."""
        self._states[slot] = None

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {"name": self.traits.name, "width": self._width, **self._device.describe()}

    # --- learning what was accepted ------------------------------------------------------

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Run every permanent position through the head with the target's features, or keep
        them for later.
        """
        grown = self._device.grown()
        chains: dict[int, tuple[AnyArray, AnyArray]] = {}
        rows: list[int] = []
        lazy: list[int] = []
        for row in range(plan.rows):
            if grown is not None and grown.rows[row]:
                ready = int(plan.kv_len[row] + outcome.n_tokens[row])
                self._state(plan, row).draft_extended(ready, grown, row)
                continue
            chains[row] = self._permanent(plan, trees, outcome, row)
            if len(chains[row][0]):
                (lazy if self._may_wait(plan, row) else rows).append(row)
        if lazy:
            self._keep(plan, lazy, chains)
        if not rows:
            return
        nodes = np.concatenate([chains[row][0] for row in rows]).astype(np.int32)
        tokens = [chains[row][1] for row in rows]
        self._extend(plan, rows, tokens, plan.kv_len[rows], sources=nodes, features=None)

    def _may_wait(self, plan: Plan, row: int) -> bool:
        """Whether it is likely that nobody will ask for draft tokens of this row soon.

        A prompt is never put off: its pages are shared. Pages of text that is put off lack the
        head's entries until it catches up; who reuses them meanwhile is drafted for a bit worse.
        """
        state = self._state(plan, row)
        if not state.current:
            return True
        state.idle = 0 if plan.max_nodes[row] or not plan.samples[row] else state.idle + 1
        return state.idle > PATIENCE and len(plan.known[row]) == 1

    def _keep(
        self, plan: Plan, rows: list[int], chains: dict[int, tuple[AnyArray, AnyArray]]
    ) -> None:
        """Keep the features of what became permanent."""
        rows = [row for row in rows if self._state(plan, row).begin != LOST]
        if not rows:
            return
        nodes = np.concatenate([chains[row][0] for row in rows]).astype(np.int32)
        features, begin = self._device.features(nodes).astype(np.float16), 0
        for row in rows:
            state, tokens = self._state(plan, row), chains[row][1].astype(np.int32)
            if not state.behind:
                state.begin = int(plan.kv_len[row])
            state.behind.append((tokens, features[begin : begin + len(tokens)]))
            begin += len(tokens)
            if state.lag > MOST_BEHIND:
                state.behind, state.begin = [], LOST

    def _catch_up(self, plan: Plan) -> None:
        """Extend the rows that are asked for draft tokens and lag behind, as many tokens at a time
        as the head takes.
        """
        late = [row for row in range(plan.rows) if plan.max_nodes[row]]
        while late := [row for row in late if self._state(plan, row).behind]:
            rows, parts, begins, room = [], [], [], self._device.max_nodes
            for row in late:
                if room:
                    state = self._state(plan, row)
                    rows.append(row)
                    begins.append(state.begin)
                    parts.append(state.take(room))
                    room -= len(parts[-1][0])
            features = np.concatenate([kept for _, kept in parts]).astype(np.float32)
            self._extend(
                plan,
                rows,
                [tokens for tokens, _ in parts],
                np.array(begins, np.int32),
                sources=np.zeros(len(features), np.int32),
                features=features,
            )

    def _extend(
        self,
        plan: Plan,
        rows: list[int],
        tokens: list[AnyArray],
        kv_len: Ints,
        sources: Ints,
        features: Floats | None,
    ) -> None:
        """Run chains of tokens, one per row, and remember what may follow the sampled ones."""
        start = np.zeros(len(rows) + 1, np.int32)
        start[1:] = np.cumsum([len(chain) for chain in tokens])
        scored = [i for i, row in enumerate(rows) if plan.samples[row]]
        found = self._device.extend(
            DraftForward(
                tokens=np.concatenate(tokens).astype(np.int32),
                sources=sources,
                parents=np.full(len(sources), -1, np.int32),
                start=start,
                kv_len=kv_len,
                slots=plan.slots[rows],
                pages=plan.page_table[rows],
                first=0,
                scored=start[1:][scored] - 1,
                children=self._wanted(plan, rows),
                features=features,
            )
        )
        for index, which in enumerate(scored):
            state = self._state(plan, rows[which])
            state.ready = int(kv_len[which]) + len(tokens[which])
            state.found = self._target_ids[found.ids[index]], found.log_probs[index]

    def _permanent(
        self, plan: Plan, trees: TreeBatch, outcome: Outcome, row: int
    ) -> tuple[AnyArray, AnyArray]:
        """Nodes of `row` that became permanent, and the token after each."""
        state = self._state(plan, row)
        state.found = state.grown_ahead = None
        emitted = outcome.tokens[row, : outcome.n_tokens[row]]
        chain = np.arange(trees.start[row], trees.root(row) + 1)
        known = plan.known[row]
        if len(emitted) == 0:
            if plan.samples[row]:  # The row failed: nothing of it matters any more.
                return chain[:0], chain[:0]
            after = state.tokens[int(plan.kv_len[row]) + len(known)]
            return chain, np.append(known[1:], after)
        path = accepted_nodes(trees, row, emitted[:-1])
        return np.concatenate([chain, path]), np.concatenate([known[1:], emitted])

    # --- proposing -----------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[Draft]:
        """Grow one tree per row that may draft and whose features are at hand."""
        self._catch_up(plan)
        drafts = [NO_DRAFT] * plan.rows
        growing: dict[int, Growth] = {}
        for row, nodes in enumerate(plan.max_nodes.tolist()):
            depth = min(int(plan.max_depth[row]), self.traits.max_depth)
            state = self._state(plan, row)
            if nodes > 0 and depth > 0 and state.ready == plan.kv_len[row]:
                grown_ahead = state.draft(depth, nodes)
                if grown_ahead is None:
                    growing[row] = Growth(self._width)
                else:
                    drafts[row] = grown_ahead
        self._grow(plan, growing)
        for row, tree in growing.items():
            drafts[row] = tree.draft(int(plan.max_nodes[row]))
        self._draft_request(plan)
        return drafts

    def carry(self, plan: Plan) -> bool:
        """The running step grows the draft tokens where it follows every row; so shall the coming
        one. Without a draft token the features would be kept for later, on the host.
        """
        followed = bool(np.isin(plan.slots, self._device.following()).all())
        if followed and plan.max_depth.any():
            self._draft_request(plan)
            return True
        return False

    def _draft_request(self, plan: Plan) -> None:
        """Let the step do what would come after it, of rows that the head is not behind with.

        As deep as draft tokens are wanted now, which mostly is what will be wanted then; in powers
        of two, because a device prepares for every depth that it meets.
        """
        depth = min(int(plan.max_depth.max()), self.traits.max_depth)
        if depth > 0:
            levels = min(1 << (depth - 1).bit_length(), self.traits.max_depth)
            current = [self._state(plan, row).current for row in range(plan.rows)]
            self._device.draft_request(DraftRequest(plan.slots[current], self._width, levels))

    def _grow(self, plan: Plan, growing: dict[int, Growth]) -> None:
        """Grow the trees of these rows from their roots, one pass per level."""
        for row, tree in growing.items():
            mask = self._mask(int(plan.slots[row])) if plan.constrained[row] else None
            tokens, values = self._state(plan, row).children(self._width, mask)
            tree.extend(tokens[None], values[None])
        numbers = dict.fromkeys(growing, np.zeros(0, np.int32))
        run = 0
        for level in range(2, self.traits.max_depth + 1):
            rows = [r for r in growing if level <= plan.max_depth[r] and len(growing[r].frontier())]
            wanted = sum(len(growing[row].frontier()) for row in rows)
            if not rows or run + wanted > self._device.max_nodes:
                break
            self._expand(plan, growing, numbers, rows, run)
            run += wanted

    def _expand(
        self,
        plan: Plan,
        growing: dict[int, Growth],
        numbers: dict[int, Ints],
        rows: list[int],
        first: int,
    ) -> None:
        """One level of all rows: run the frontier, hang its best children below it.

        numbers[row][i] is the draft node number of draft token i, -1 where it was never run.
        """
        frontiers = [growing[row].frontier() for row in rows]
        start = np.zeros(len(rows) + 1, np.int32)
        start[1:] = np.cumsum([len(frontier) for frontier in frontiers])
        tokens, sources, parents = [], [], []
        for row, frontier in zip(rows, frontiers, strict=True):
            growth = growing[row]
            missing = len(growth.tokens) - len(numbers[row])
            numbers[row] = np.append(numbers[row], np.full(missing, -1, np.int32))
            above = growth.parents[frontier]
            ran = np.where(above < 0, -1, numbers[row][above])
            slot = int(plan.slots[row])
            tokens.append(growth.tokens[frontier])
            sources.append(np.where(ran < 0, -1 - slot, ran))
            parents.append(ran)
        count = int(start[-1])
        children = self._device.expand(
            DraftForward(
                tokens=np.concatenate(tokens).astype(np.int32),
                sources=np.concatenate(sources).astype(np.int32),
                parents=np.concatenate(parents).astype(np.int32),
                start=start,
                kv_len=plan.kv_len[rows],
                slots=plan.slots[rows],
                pages=plan.page_table[rows],
                first=first,
                scored=np.arange(count, dtype=np.int32),
                children=self._wanted(plan, rows),
            )
        )
        ids = self._target_ids[children.ids]
        for index, (row, frontier) in enumerate(zip(rows, frontiers, strict=True)):
            state, growth = self._state(plan, row), growing[row]
            span = range(int(start[index]), int(start[index + 1]))
            numbers[row][frontier] = first + np.arange(span.start, span.stop, dtype=np.int32)
            depths = [_depth(growth, int(node)) for node in frontier]
            found = [
                state.best((ids[node], children.log_probs[node]), self._width, 1 + depth)
                for node, depth in zip(span, depths, strict=True)
            ]
            growth.extend(
                np.stack([ids for ids, _ in found]), np.stack([values for _, values in found])
            )

    def _wanted(self, plan: Plan, rows: list[int]) -> int:
        """Children to ask for: more than are hung, where noise or a grammar will choose."""
        hot = any(self._state(plan, row).sampling.temperature > 0 for row in rows)
        return max(CANDIDATES, self._width) if hot or plan.constrained[rows].any() else self._width

    def _state(self, plan: Plan, row: int) -> DraftState:
        state = self._states[int(plan.slots[row])]
        assert state is not None, "a planned slot was begun"
        return state


def accepted_nodes(trees: TreeBatch, row: int, tokens: Ints) -> AnyArray:
    """int[.] flat nodes of the path below the root that spells `tokens`, first child first."""
    node, path = trees.root(row), []
    end = int(trees.start[row + 1])
    for token in tokens:
        below = slice(node + 1, end)
        hit = np.flatnonzero((trees.parents[below] == node) & (trees.tokens[below] == token))
        node = node + 1 + int(hit[0])
        path.append(node)
    return np.array(path, np.int64)


def _depth(growth: Growth, node: int) -> int:
    """Levels from the root down to `node`: 1 for its children."""
    depth = 0
    while node >= 0:
        node, depth = int(growth.parents[node]), depth + 1
    return depth
