"""Runs the passes of a draft model from the host: over permanent tokens; to grow trees, one pass
per level for all rows; or to propose blocks, one pass for all rows.
"""

from collections.abc import Callable

import numpy as np

from forerun.draft_shape import DraftShape
from forerun.drafters.confidence import Confidence, scaled
from forerun.drafters.draft_state import DraftState, not_finite
from forerun.interface.draft_model import (
    CANDIDATES,
    DraftBlock,
    DraftExtension,
    DraftLevel,
    DraftModel,
    PairCandidates,
)
from forerun.interface.features import Features
from forerun.interface.plan import Outcome, Plan
from forerun.speculative.draft_tree import DraftTree, Path, Ranked, block_draft, path_draft
from forerun.speculative.tree import Draft
from forerun.types import AnyArray, Floats, Ints

Masks = Callable[[int], bytes | None]
"""Slot -> mask of the tokens that its grammar allows next; None = every token."""


class DraftPasses:
    """Runs a draft model's passes. `states` are those of all rows of a plan, `rows` the rows that a
    pass is for. Every method raises EngineError if the model's logits are not finite.

    mask  called for the first level only: for deeper ones masks cost more than they bring
          (docs/results/not-taken.md)
    """

    def __init__(self, model: DraftModel, shape: DraftShape, mask: Masks) -> None:
        self._model, self._traits, self._shape, self._mask = model, model.traits, shape, mask
        self.confidence = Confidence()

    def extend(
        self,
        plan: Plan,
        states: list[DraftState],
        rows: AnyArray,
        kv_len: Ints,
        counts: Ints,
        features: Features | None,
        wants_candidates: bool,
    ) -> None:
        """Run `counts` int32[n] tokens of each of the rows int[n], from position kv_len int32[n]
        on, with features [sum of counts, .]. If `wants_candidates`, store the candidates of rows
        that sample.
        """
        row_states = list(map(states.__getitem__, rows.tolist()))
        spans = list(map(DraftState.span, row_states, kv_len.tolist(), counts.tolist()))
        start = np.zeros(len(rows) + 1, np.int32)
        start[1:] = np.cumsum(counts)
        sampled = np.flatnonzero(plan.samples[rows])
        scored = sampled if wants_candidates and not self._traits.block_size else sampled[:0]
        result = self._model.extend(
            DraftExtension(
                tokens=np.concatenate([span[:-1] for span in spans]),
                next_tokens=np.concatenate([span[1:] for span in spans]),
                start=start,
                kv_len=kv_len,
                slots=plan.slots[rows],
                pages=plan.page_table[rows],
                scored=start[1:][scored] - np.int32(1),
                candidates=self._candidate_count(plan, states, rows.tolist()),
            ),
            features,
        )
        for place in sampled.tolist():
            row_states[place].ready = int(kv_len[place] + counts[place])
        self._check(result.log_probs[: len(scored)])
        for index, place in enumerate(scored.tolist()):
            ids = self._traits.target_ids[result.ids[index]]
            row_states[place].next_candidates = ids, result.log_probs[index]

    def drafts(self, plan: Plan, states: list[DraftState], rows: list[int]) -> dict[int, Draft]:
        """Return a draft by row for each of these rows, which are ready: trees as deep and large as
        the plan allows, or one block's best paths.
        """
        # The step has brought candidates for a block's first token if a grammar needs them.
        grown = [r for r in rows if not self._traits.block_size or states[r].candidates()]
        others = [row for row in rows if row not in grown]
        return self._trees(plan, states, grown) | self._blocks(plan, states, others)

    def _blocks(self, plan: Plan, states: list[DraftState], rows: list[int]) -> dict[int, Draft]:
        if not rows:
            return {}
        depth = min(int(plan.max_depth[rows].max()), self._shape.depth)
        result = self._model.block(
            DraftBlock(
                roots=np.array([plan.known[row][-1] for row in rows], np.int32),
                kv_len=plan.kv_len[rows],
                slots=plan.slots[rows],
                pages=plan.page_table[rows],
                depth=depth,
                candidates=self._candidate_count(plan, states, rows),
            )
        )
        drafts = {}
        for place, row in enumerate(rows):
            levels, nodes = min(depth, int(plan.max_depth[row])), int(plan.max_nodes[row])
            mask = self._mask_of(plan, row)
            if result.pairs is not None:
                below = self._below(states[row], result.pairs, place, mask)
                drafts[row] = path_draft(levels, below, nodes)
                continue
            ids, log_probs = self._traits.target_ids[result.ids[place]], result.log_probs[place]
            best = [
                states[row].best(
                    (ids[level], log_probs[level]),
                    self._shape.width,
                    level + 1,
                    mask if level == 0 else None,
                )
                for level in range(levels)
            ]
            fewest = min(len(tokens) for tokens, _ in best)
            tokens = np.stack([tokens[:fewest] for tokens, _ in best])
            values = np.stack([values[:fewest] for _, values in best])
            drafts[row] = block_draft(tokens, values, nodes)
        return drafts

    def _below(
        self, state: DraftState, pairs: PairCandidates, place: int, mask: bytes | None
    ) -> Callable[[Path], Ranked]:
        """Return a function from a path of one row to its candidates, which also stores the model's
        confidence in the best one.
        """
        state.confident.clear()
        sampled = state.sampling.temperature > 0

        def below(path: Path) -> Ranked:
            found, depth = pairs.below(place, path), len(path)
            choices = self._traits.target_ids[found.ids], found.log_probs
            tokens, values = state.best(
                choices, self._shape.width, depth + 1, mask if depth == 0 else None
            )
            if found.confidence is None or not len(tokens):
                return tokens.tolist(), np.exp(values).tolist()
            state.confident[path] = found.confidence, int(tokens[0])
            rate = self.confidence.rate(sampled, depth, found.confidence)
            return tokens.tolist(), scaled(values, rate)

        return below

    def learn(self, states: list[DraftState], outcome: Outcome) -> None:
        """Count the outcomes of nodes with a confidence along the tokens that each row emitted."""
        for state, tokens in zip(states, outcome.output_tokens, strict=True):
            sampled = state.sampling.temperature > 0
            for depth, (confidence, best) in enumerate(state.confidences(tokens)):
                self.confidence.learn(sampled, depth, confidence, best == tokens[depth])

    def _trees(self, plan: Plan, states: list[DraftState], rows: list[int]) -> dict[int, Draft]:
        """Grow trees from the rows' roots, one pass per level, until no path is as probable as
        Plan.pass_prob.
        """
        growing = {row: DraftTree(self._shape.width) for row in rows}
        for row, tree in growing.items():
            tokens, values = states[row].children(self._shape.width, self._mask_of(plan, row))
            tree.extend(tokens[None], values[None])
        numbers = dict.fromkeys(rows, np.zeros(0, np.int32))
        run = 0
        for level in range(2, self._shape.depth + 1):
            deeper = [row for row in rows if level <= plan.max_depth[row]]
            more = [row for row in deeper if growing[row].best() >= plan.pass_prob]
            needed = sum(len(growing[row].frontier()) for row in more)
            if not more or run + needed > self._traits.max_nodes:
                break
            self._expand(plan, states, {row: growing[row] for row in more}, numbers, run)
            run += needed
        return {row: tree.draft(int(plan.max_nodes[row])) for row, tree in growing.items()}

    def _expand(
        self,
        plan: Plan,
        states: list[DraftState],
        growing: dict[int, DraftTree],
        numbers: dict[int, Ints],
        first: int,
    ) -> None:
        """Grow one level of these rows: run the frontier and append its best children.

        numbers[row][i] is the draft node number of draft token i, -1 if it has not run.
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
        result = self._model.expand(
            DraftLevel(
                tokens=np.concatenate(tokens).astype(np.int32),
                parents=np.concatenate(parents).astype(np.int32),
                start=start,
                kv_len=plan.kv_len[rows],
                slots=plan.slots[rows],
                pages=plan.page_table[rows],
                first=first,
                candidates=self._candidate_count(plan, states, rows),
            )
        )
        self._check(result.log_probs)
        ids = self._traits.target_ids[result.ids]
        for index, ((row, tree), frontier) in enumerate(
            zip(growing.items(), frontiers, strict=True)
        ):
            span = range(int(start[index]), int(start[index + 1]))
            numbers[row][frontier] = first + np.arange(span.start, span.stop, dtype=np.int32)
            best = [
                states[row].best((ids[n], result.log_probs[n]), self._shape.width, tree.levels + 1)
                for n in span
            ]
            tree.extend(np.stack([each for each, _ in best]), np.stack([each for _, each in best]))

    def _check(self, log_probs: Floats) -> None:
        if not np.isfinite(log_probs.max(-1, initial=-np.inf)).all():
            raise not_finite(self._traits.name)

    def _mask_of(self, plan: Plan, row: int) -> bytes | None:
        return self._mask(int(plan.slots[row])) if plan.constrained[row] else None

    def _candidate_count(self, plan: Plan, states: list[DraftState], rows: list[int]) -> int:
        """Return how many candidates to request: more than the tree takes if noise or a grammar
        chooses.
        """
        hot = any(states[row].sampling.temperature > 0 for row in rows)
        width = self._shape.width
        return max(CANDIDATES, width) if hot or plan.constrained[rows].any() else width
