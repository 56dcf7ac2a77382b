"""Several drafters, one tree: what they propose is merged, and every node has one calibrated score.

A node is a path of tokens below the root, whoever proposed it. What a drafter says of it, given
the one above, is its *claim*; how often claims like this came true lately, from the same drafter
and at the same depth, is what the node is worth (`Calibration`). The best nodes are kept.

Where Plan.model_depth is 0 only the drafters that cost nothing are asked: the draft model, which
comes last, is not run. Nobody knows then what it would have said, so such trees are calibrated
apart; they are made in other steps too, to tell what they would have been worth (Draft.free).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forerun.interface.drafter import Drafter, DrafterTraits
from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.draft_tree import pruned
from forerun.speculative.tree import NO_DRAFT, Draft, DraftSource, TreeBatch

BINS, DEPTHS = 8, 4
"""Claims and depths that are told apart: claims in so many equal steps, the last depth being all
further ones."""
PRIOR = 1.0
"""Observations that a claim itself counts for. (Served, 12 texts of a tiny model: with 1, 8 and 32
the accepted draft tokens are the same within 2 of 75.)"""
MOST = 1024.0
"""Observations of a bin at most: then both of its counts are halved, so that late ones tell."""


class Calibration:
    """How often claims came true: by who made them (a bit for each drafter, and one more where only
    free ones were asked), depth and size.

    tries, hits  float64[2**(sources+1),DEPTHS,BINS]: claims below a node that was right, and true
                 ones
    """

    def __init__(self, sources: int) -> None:
        self.free_only = 1 << sources
        self.tries = np.zeros((2 * self.free_only, DEPTHS, BINS))
        self.hits = np.zeros_like(self.tries)

    def chance(self, who: int, depth: int, claim: float) -> float:
        """The probability, in (0, 1], that a token is right whose parent is.

        who    its drafters, a bit each, and `free_only` where only free ones were asked
        depth  levels below the root, from 1; those from DEPTHS on are one
        claim  the greatest of the probabilities that its drafters gave it, in [0, 1]

        It is the share of such claims that came true, the claim itself counting as PRIOR
        observations.
        """
        place = _place(who, depth, claim)
        tries, hits = float(self.tries[place]), float(self.hits[place])
        return max((PRIOR * claim + hits) / (PRIOR + tries), 1e-6)

    def learn(self, who: int, depth: int, claim: float, right: bool) -> None:
        """Record whether a node was right whose parent was; who, depth and claim as in `chance`.

        A bin with more than MOST observations is halved first of all, so that recent ones count for
        more.
        """
        place = _place(who, depth, claim)
        self.tries[place] += 1.0
        self.hits[place] += right
        if self.tries[place] > MOST:
            self.tries[place] /= 2.0
            self.hits[place] /= 2.0

    def share(self, who: int) -> dict[str, float]:
        """Of all depths: `proposed`, how many nodes hung below right ones, and `right`, how many of
        those were right themselves; both after halving (`learn`).

        who  a set of drafters as in `chance`; where all of them are free, what they say in every
        step is counted, whoever else says it too
        """
        who |= self.free_only * (who < self.free_only >> 1)
        tries, hits = float(self.tries[who].sum()), float(self.hits[who].sum())
        return {"proposed": round(tries), "right": round(hits)}


def _place(who: int, depth: int, claim: float) -> tuple[int, int, int]:
    return who, min(depth, DEPTHS) - 1, min(int(claim * BINS), BINS - 1)


@dataclass(slots=True)
class _Merged:
    """Nodes, parents before children: all that was proposed for a row.

    asked        the bits that every node's `who` begins with
    who, claims  of the node's drafters, a bit each, and the greatest that one says of it given the
                 node above
    below        by node, -1 = the root: its children by token
    """

    asked: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    who: list[int] = field(default_factory=list)
    claims: list[float] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    below: dict[int, dict[int, int]] = field(default_factory=dict)

    def add(self, draft: Draft, bit: int) -> None:
        """Everything that one drafter proposes."""
        where: list[int] = []
        scores = draft.score.tolist()
        nodes = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.sources(), strict=True)
        for number, (token, above, source) in enumerate(nodes):
            parent = where[above] if above >= 0 else -1
            given = scores[above] if above >= 0 else 1.0
            claim = min(1.0, scores[number] / given) if given > 0 else 0.0
            where.append(self._node(parent, token))
            self._claim(where[-1], bit, claim, source)

    def _node(self, parent: int, token: int) -> int:
        children = self.below.setdefault(parent, {})
        if token not in children:
            children[token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 1)
            self.who.append(self.asked)
            self.claims.append(-1.0)
            self.sources.append(int(DraftSource.UNKNOWN))
        return children[token]

    def _claim(self, node: int, bit: int, claim: float, source: int) -> None:
        """Of what two say, the source of a node is whoever says more."""
        self.who[node] |= bit
        if claim > self.claims[node]:
            self.claims[node], self.sources[node] = claim, source

    def draft(self, calibration: Calibration, nodes: int) -> Draft:
        """The best nodes."""
        if not self.tokens:
            return NO_DRAFT
        scores: list[float] = []
        rows = zip(self.parents, self.who, self.depth, self.claims, strict=True)
        for parent, who, depth, claim in rows:
            above = scores[parent] if parent >= 0 else 1.0
            scores.append(above * calibration.chance(who, depth, claim))
        score = np.array(scores, np.float32)
        keep = np.sort(np.argsort(-score, kind="stable")[:nodes])
        tokens, parents = np.array(self.tokens, np.int32), np.array(self.parents, np.int32)
        return pruned(tokens, parents, score, keep, np.array(self.sources, np.int32))

    def learn(self, calibration: Calibration, tokens: Sequence[int]) -> None:
        """These tokens came: of every node on their way all children are known."""
        node = -1
        for token in tokens:
            for drafted, child in self.below.get(node, {}).items():
                what = self.who[child], self.depth[child], self.claims[child]
                calibration.learn(*what, drafted == token)
            node = self.below.get(node, {}).get(token, len(self.tokens))


def _merged(drafts: Sequence[Draft], asked: int) -> _Merged:
    merged = _Merged(asked)
    for number, draft in enumerate(drafts):
        merged.add(draft, 1 << number)
    return merged


def _for_model(plan: Plan) -> Plan:
    """The plan as a draft model shall see it."""
    if plan.model_depth is None:
        return plan
    nodes = plan.max_nodes * np.sign(plan.model_depth)
    return replace(plan, max_nodes=nodes, max_depth=plan.model_depth)


class CombinedDrafter:
    """The Drafter contract around several others, which all propose for every row.

    drafters  all but the last are free; the last may draft in the target's step, and its limits are
              those of all
    """

    def __init__(self, *drafters: Drafter) -> None:
        self._drafters, self._head = drafters, drafters[-1]
        self.calibration = Calibration(len(drafters))
        # By slot, until it is known what came.
        self._proposed: dict[int, list[_Merged]] = {}
        names = [drafter.traits.name for drafter in reversed(drafters)]
        self.traits = DrafterTraits(
            name="+".join(names),
            max_depth=self._head.traits.max_depth,
            needs_features=any(drafter.traits.needs_features for drafter in drafters),
            merged=True,
        )

    def begin(self, slot_init: SlotInit) -> None:
        """Open the slot for every drafter. Raises what they raise: EngineError where there is no
        such slot.
        """
        for drafter in self._drafters:
            drafter.begin(slot_init)

    def propose(self, plan: Plan) -> list[Draft]:
        """One draft per row: the best plan.max_nodes[b] nodes of what all drafters propose, merged
        by path and scored by `Calibration`. Where the draft model was asked, `Draft.free` is what
        the others would have proposed alone.

        Everything proposed is remembered by slot until `observe`. Raises what the drafters raise.
        """
        proposals = [drafter.propose(plan) for drafter in self._drafters[:-1]]
        model = _for_model(plan)
        proposed = self._head.propose(model)
        drafts = []
        for row, (slot, nodes) in enumerate(
            zip(plan.slots.tolist(), plan.max_nodes.tolist(), strict=True)
        ):
            free = [each[row] for each in proposals]
            alone = _merged(free, self.calibration.free_only)
            self._proposed[slot] = trees = [alone]
            draft = alone.draft(self.calibration, nodes)
            if model.max_nodes[row]:
                trees.append(_merged([*free, proposed[row]], 0))
                draft = replace(trees[-1].draft(self.calibration, nodes), free=draft)
            drafts.append(draft)
        return drafts

    def draft_request(self, plan: Plan) -> DraftRequest | None:
        """The draft model's request, for the rows that it may draft for; None where it has none."""
        return self._head.draft_request(_for_model(plan))

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Whether both rounds are plain, and every drafter says so: lookup needs the text of the
        running round for draft tokens, and the draft model its features until it only keeps them.
        """
        return all(drafter.can_overlap(plan, running) for drafter in self._drafters)

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Compare the emitted tokens with all that was proposed, verified or not, and calibrate by
        that; then have every drafter observe the step.
        """
        for slot, tokens in zip(plan.slots.tolist(), outcome.output_tokens, strict=True):
            for merged in self._proposed.pop(slot, ()):
                merged.learn(self.calibration, tokens)
        for drafter in self._drafters[:-1]:
            drafter.observe(plan, trees, outcome)
        self._head.observe(_for_model(plan), trees, outcome)

    def end(self, slot: int) -> None:
        """Forget the slot, here and in every drafter that is asked."""
        self._proposed.pop(slot, None)
        for drafter in self._drafters:
            drafter.end(slot)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info: `name`; `sources`, by set of drafters, how many nodes that they
        proposed hung below right ones and how many were right; and, by name, each drafter's own
        facts.
        """
        names = [drafter.traits.name for drafter in self._drafters]
        shares = {
            "+".join(name for bit, name in enumerate(names) if who >> bit & 1): (
                self.calibration.share(who)
            )
            for who in range(1, 1 << len(names))
        }
        return {
            "name": self.traits.name,
            "sources": shares,
            **{drafter.traits.name: drafter.describe() for drafter in self._drafters},
        }
