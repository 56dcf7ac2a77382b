"""Merges the proposals of several drafters into one tree, in which every node has one calibrated
score.

A node is a path of tokens below the root, from any drafter. The probability that a drafter gives
it, given the node above, is its `drafter_prob`; how often nodes of such a probability, from that
drafter and at that depth, were right recently is the node's value (`Calibration`). The best nodes
are verified.

If Plan.model_depth is 0 the draft model, which comes last, does not run, and only the others
propose. Its probabilities are then unknown, so such trees are calibrated separately; they are built
in other steps too, to measure what they would have gained (Draft.free). A drafter that selects by
cost (DrafterTraits) needs no tree of this module in such steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forerun.interface.drafter import Drafter, DrafterTraits
from forerun.interface.next_draft import OnDeviceDraftSpec
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.draft_tree import pruned
from forerun.speculative.tree import NO_DRAFT, Draft, DraftSource, TreeBatch

BINS, DEPTHS = 8, 4
"""Resolution: equal intervals of probability, and depths, the last for all deeper ones."""
PRIOR = 1.0
"""Weight of a drafter's probability itself, in observations. (Served, 12 texts of a tiny model:
with 1, 8 and 32 the accepted draft tokens are the same within 2 of 75.)
"""
MOST = 1024.0
"""Most observations of a bin. Beyond, both of its counts are halved, so that recent ones weigh
more.
"""


class Calibration:
    """Counts how often nodes were right, by the set of drafters that proposed them, depth and
    probability. A set has a bit per drafter, and one more if the draft model did not propose.

    tries, hits  float64[2**(sources+1),DEPTHS,BINS]: nodes below one that was right, and those of
                 them that were right
    """

    def __init__(self, sources: int) -> None:
        self.no_model = 1 << sources
        self.tries = np.zeros((2 * self.no_model, DEPTHS, BINS))
        self.hits = np.zeros_like(self.tries)

    def calibrated_prob(self, source_mask: int, depth: int, drafter_prob: float) -> float:
        """Return the probability, in (0, 1], that a token is right if its parent is.

        source_mask   its drafters, a bit each, and `no_model` if the draft model did not propose
        depth         levels below the root, from 1; those from DEPTHS on are one
        drafter_prob  the greatest of the probabilities that its drafters gave it, in [0, 1]

        The share of such nodes that were right, `drafter_prob` counting as PRIOR observations.
        """
        place = _place(source_mask, depth, drafter_prob)
        tries, hits = float(self.tries[place]), float(self.hits[place])
        return max((PRIOR * drafter_prob + hits) / (PRIOR + tries), 1e-6)

    def learn(self, source_mask: int, depth: int, drafter_prob: float, right: bool) -> None:
        """Record whether a node was right if its parent was; parameters as in `calibrated_prob`.

        A bin with more than MOST observations is halved, so that recent ones weigh more.
        """
        place = _place(source_mask, depth, drafter_prob)
        self.tries[place] += 1.0
        self.hits[place] += right
        if self.tries[place] > MOST:
            self.tries[place] /= 2.0
            self.hits[place] /= 2.0

    def learnt(self) -> bytes:
        """Implement Learner.learnt."""
        return self.tries.tobytes() + self.hits.tobytes()

    def relearn(self, learnt: bytes) -> bool:
        """Implement Learner.relearn."""
        sound = len(learnt) == 2 * self.tries.nbytes
        if sound:
            both = np.frombuffer(learnt).reshape(2, *self.tries.shape)
            self.tries[:], self.hits[:] = both
        return sound

    def share(self, source_mask: int) -> dict[str, float]:
        """Return, over all depths, `proposed`, how many nodes were below right ones, and `right`,
        how many of those were right; both after halving (`learn`).

        source_mask  a set of drafters as in `calibrated_prob`; without the draft model, their
                     trees of every step count, also of steps in which it proposed
        """
        source_mask |= self.no_model * (source_mask < self.no_model >> 1)
        tries, hits = float(self.tries[source_mask].sum()), float(self.hits[source_mask].sum())
        return {"proposed": round(tries), "right": round(hits)}


def _place(source_mask: int, depth: int, drafter_prob: float) -> tuple[int, int, int]:
    return source_mask, min(depth, DEPTHS) - 1, min(int(drafter_prob * BINS), BINS - 1)


@dataclass(slots=True)
class _MergedTree:
    """All nodes proposed for a row, parents before children. A list has an entry per node.

    first_mask    the initial bits of every node's `source_mask`
    parents       number of the node above; -1 = the root
    depth         1 below the root
    source_mask   the drafters that proposed it: bit i = drafter i
    drafter_probs  the greatest probability, given the node above, that a drafter assigns to it
    sources       the DraftSource of that drafter's proposal
    below         by node, -1 = the root: its children by token
    """

    first_mask: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    source_mask: list[int] = field(default_factory=list)
    drafter_probs: list[float] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    below: dict[int, dict[int, int]] = field(default_factory=dict)

    def add(self, draft: Draft, bit: int) -> None:
        """Add all proposals of one drafter, whose bit of `source_mask` is set in `bit`."""
        node_of: list[int] = []
        scores = draft.score.tolist()
        nodes = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.sources(), strict=True)
        for number, (token, above, source) in enumerate(nodes):
            parent = node_of[above] if above >= 0 else -1
            given = scores[above] if above >= 0 else 1.0
            drafter_prob = min(1.0, scores[number] / given) if given > 0 else 0.0
            node_of.append(self._node(parent, token))
            self._add_source(node_of[-1], bit, drafter_prob, source)

    def _node(self, parent: int, token: int) -> int:
        children = self.below.setdefault(parent, {})
        if token not in children:
            children[token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 1)
            self.source_mask.append(self.first_mask)
            self.drafter_probs.append(-1.0)
            self.sources.append(int(DraftSource.UNKNOWN))
        return children[token]

    def _add_source(self, node: int, bit: int, drafter_prob: float, source: int) -> None:
        """Add a drafter to a node; if its probability is the highest so far, record it as
        the node's source.
        """
        self.source_mask[node] |= bit
        if drafter_prob > self.drafter_probs[node]:
            self.drafter_probs[node], self.sources[node] = drafter_prob, source

    def draft(self, calibration: Calibration, nodes: int) -> Draft:
        """Return the best nodes."""
        if not self.tokens:
            return NO_DRAFT
        scores: list[float] = []
        rows = zip(self.parents, self.source_mask, self.depth, self.drafter_probs, strict=True)
        for parent, source_mask, depth, drafter_prob in rows:
            above = scores[parent] if parent >= 0 else 1.0
            scores.append(above * calibration.calibrated_prob(source_mask, depth, drafter_prob))
        score = np.array(scores, np.float32)
        keep = np.sort(np.argsort(-score, kind="stable")[:nodes])
        tokens, parents = np.array(self.tokens, np.int32), np.array(self.parents, np.int32)
        return pruned(tokens, parents, score, keep, np.array(self.sources, np.int32))

    def learn(self, calibration: Calibration, tokens: Sequence[int]) -> None:
        """Update the calibration with the emitted tokens: they decide all children of every node on
        their path.
        """
        node = -1
        for token in tokens:
            for drafted, child in self.below.get(node, {}).items():
                what = self.source_mask[child], self.depth[child], self.drafter_probs[child]
                calibration.learn(*what, drafted == token)
            node = self.below.get(node, {}).get(token, len(self.tokens))


def _merge(drafts: Sequence[Draft], first_mask: int) -> _MergedTree:
    merged = _MergedTree(first_mask)
    for number, draft in enumerate(drafts):
        merged.add(draft, 1 << number)
    return merged


class CombinedDrafter:
    """A Drafter that combines several others, which all propose for every row.

    drafters  all but the last have no draft model; the last may draft in the target's step, and
              its limits are those of all
    """

    def __init__(self, *drafters: Drafter) -> None:
        self._drafters, self._model = drafters, drafters[-1]
        self.calibration = Calibration(len(drafters))
        # The last plan, and what it is for the draft model.
        self._planned: tuple[Plan, Plan] | None = None
        # By slot, until the step is observed.
        self._proposed: dict[int, list[_MergedTree]] = {}
        names = [drafter.traits.name for drafter in reversed(drafters)]
        self.traits = DrafterTraits(
            name="+".join(names),
            max_depth=self._model.traits.max_depth,
            needs_features=any(drafter.traits.needs_features for drafter in drafters),
            merged=True,
            selects_by_cost=len(drafters) == 2 and drafters[0].traits.selects_by_cost,
        )

    def begin(self, slot_init: SlotInit) -> None:
        """Open the slot in every drafter. Raises EngineError if there is no such slot."""
        for drafter in self._drafters:
            drafter.begin(slot_init)

    def propose(self, plan: Plan) -> list[Draft]:
        """Return one draft per row: the best plan.max_nodes[b] nodes of all drafters' proposals,
        merged by path and scored by `Calibration`. If the draft model proposed, `Draft.free` is the
        draft of the others alone.

        Stores all proposals by slot until `observe`, except with `node_costs`: then the first
        drafter selects alone, as without a draft model. Raises what the drafters raise.
        """
        if plan.node_costs is not None:
            return self._drafters[0].propose(plan)
        proposals = [drafter.propose(plan) for drafter in self._drafters[:-1]]
        model_plan = self._for_model(plan)
        proposed = self._model.propose(model_plan)
        drafts = []
        for row, (slot, nodes) in enumerate(
            zip(plan.slots.tolist(), plan.max_nodes.tolist(), strict=True)
        ):
            others = [each[row] for each in proposals]
            lookup_tree = _merge(others, self.calibration.no_model)
            self._proposed[slot] = trees = [lookup_tree]
            draft = lookup_tree.draft(self.calibration, nodes)
            if model_plan.max_nodes[row]:
                trees.append(_merge([*others, proposed[row]], 0))
                draft = replace(trees[-1].draft(self.calibration, nodes), free=draft)
            drafts.append(draft)
        return drafts

    def _for_model(self, plan: Plan) -> Plan:
        """Return the plan for the draft model, computed once per step."""
        if self._planned is not None and plan is self._planned[0]:
            return self._planned[1]
        limits, model_plan = plan.model_depth, plan
        if limits is not None and any(plan.max_nodes.tolist()):
            runs = any(limits.tolist())
            nodes = plan.max_nodes * np.sign(limits) if runs else limits
            model_plan = replace(plan, max_nodes=nodes, max_depth=limits)
        self._planned = plan, model_plan
        return model_plan

    def on_device_draft(self, plan: Plan) -> OnDeviceDraftSpec | None:
        """Return the draft model's request, for the rows that it may draft for; None if it has
        none.
        """
        return self._model.on_device_draft(self._for_model(plan))

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Return whether both rounds are plain and every drafter agrees: for draft tokens, lookup
        needs the text of the running round, and the draft model its features, unless it only stores
        them.
        """
        return all(drafter.can_overlap(plan, running) for drafter in self._drafters)

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Calibrate by comparing the emitted tokens with all proposals, verified or not; then have
        every drafter observe the step.
        """
        for slot, tokens in zip(plan.slots.tolist(), outcome.output_tokens, strict=True):
            for merged in self._proposed.pop(slot, ()):
                merged.learn(self.calibration, tokens)
        for drafter in self._drafters[:-1]:
            drafter.observe(plan, trees, outcome)
        self._model.observe(self._for_model(plan), trees, outcome)

    def end(self, slot: int) -> None:
        """Discard the slot's state, here and in every drafter."""
        self._proposed.pop(slot, None)
        for drafter in self._drafters:
            drafter.end(slot)

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: `name`; `sources`, by set of drafters, how many of their
        nodes were below right ones and how many were right; and each drafter's own facts by name.
        """
        names = [drafter.traits.name for drafter in self._drafters]
        shares = {
            "+".join(name for bit, name in enumerate(names) if source_mask >> bit & 1): (
                self.calibration.share(source_mask)
            )
            for source_mask in range(1, 1 << len(names))
        }
        return {
            "name": self.traits.name,
            "sources": shares,
            **{drafter.traits.name: drafter.describe() for drafter in self._drafters},
        }
