"""Free n-grams and a head that costs time in one tree: both, the n-grams alone, or none of them, by
what steps cost and what each brings. No clock: a step takes what its table says.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from forerun.control.adaptive import AdaptivePolicy
from forerun.control.policy import FixedPolicy
from forerun.control.step_costs import StepCosts
from forerun.drafters.combined import CombinedDrafter
from forerun.drafters.none import NoDrafter
from forerun.interface.drafter import DrafterTraits
from forerun.interface.plan import Outcome
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NO_DRAFT, Draft, DraftSource
from tests.control.steps import plan_of, report_of, seen, slots_of
from tests.covering import every, rarely, values

NODES, DEPTH = 3, 3

CORE = StepCosts(
    (1, 2, 4, 8, 16, 64), (2.9, 3.1, 3.4, 5.8, 11.5, 44.0), draft_ms=0.6, follow_ms=0.6
)
"""A small model on a CPU: a head's token costs a fifth of a step."""
TINY = StepCosts(
    (1, 2, 4, 8, 16, 64), (0.5, 0.52, 0.55, 0.62, 0.8, 1.8), draft_ms=0.25, follow_ms=0.25
)
"""Six layers of 96: a head's token costs half a step, so that trying one uses up the credit."""
DEVICE = StepCosts((1, 8, 64, 256), (10.0, 10.5, 12.0, 20.0), draft_ms=0.2, follow_ms=0.2)
"""Nodes are nearly free, and so is a head."""


class Source(NoDrafter):
    """Chains at a share `coverage` of the places, right at each depth with chance `right`, which
    is what is claimed.
    """

    def __init__(self, truths, source, coverage, right, free):
        name = source.name.lower()
        self.traits = DrafterTraits(name, 8, no_draft_model=free)
        self.truths, self.source, self.coverage, self.right = truths, source, coverage, right
        self.random = np.random.default_rng(int(source))
        self.levels_drafted = 0

    def propose(self, plan):
        drafts = []
        for slot, depth in zip(plan.slots.tolist(), plan.max_depth.tolist(), strict=True):
            worth = (n for n in range(1, depth) if self.right**n < plan.pass_prob)
            depth = next(worth, depth)  # noqa: PLW2901 - a path ends where a pass does not pay.
            self.levels_drafted += depth
            chances = self.random.random(1 + depth)
            if not depth or chances[0] >= self.coverage:
                drafts.append(NO_DRAFT)
                continue
            right = chances[1:] < self.right
            truth = np.array(self.truths[slot][:depth])
            tokens = np.where(right, truth, 10_000 * int(self.source) + truth)
            scores = self.right ** np.arange(1, depth + 1)
            parents = np.arange(-1, depth - 1, dtype=np.int32)
            drafts.append(
                Draft(tokens.astype(np.int32), parents, scores.astype(np.float32), self.source)
            )
        return drafts


class World:
    """Rows of text; `ngrams` and `head` are (how often something is found, how often it is right),
    the head None where there is none.
    """

    def __init__(self, costs, rows, ngrams, head, believed=None):
        self.costs, self.rows = costs, rows
        self.truths: dict[int, list[int]] = {}
        lookup = Source(self.truths, DraftSource.NGRAM, *ngrams, free=True)
        self.drafter, self.head = lookup, None
        if head is not None:
            self.head = Source(self.truths, DraftSource.DRAFT_MODEL, *head, free=False)
            self.drafter = CombinedDrafter(lookup, self.head)
        traits = self.drafter.traits
        self.policy = AdaptivePolicy(believed or costs, NODES, DEPTH, traits)
        self.random = np.random.default_rng(7)
        self.slowness = lambda: 1.0

    def run(self, steps, length=100):
        """(speed over plain, share of rows' steps in which the head drafted, draft tokens a row) of
        the last three quarters.
        """
        tokens = ms = levels = verified = 0.0
        for step in range(steps):
            for slot in range(self.rows):
                if step == 0 or (step + 7 * slot) % length == 0:
                    self.drafter.begin(SlotInit(slot, TokenText([0]), 1, Sampling()))
            done = self.step()
            if step >= steps // 4:
                tokens, ms, levels, verified = np.add((tokens, ms, levels, verified), done)
        plain = self.rows / float(self.costs.verify(np.array(self.rows)))
        counted = self.rows * (steps - steps // 4)
        return tokens / ms / plain, levels / counted, verified / counted

    def step(self):
        for slot in range(self.rows):
            self.truths[slot] = self.random.integers(1, 9_000, DEPTH + 1).tolist()
        cached = np.full(self.rows, 64, np.int32)
        decision = self.policy.decide(slots_of(self.rows), cached)
        budgets = decision.rows
        nodes, depth, modelled = (
            np.array([getattr(budget, name) for budget in budgets], np.int32)
            for name in ("nodes", "depth", "model_depth")
        )
        least = max(budget.pass_prob for budget in budgets)
        plan = replace(
            plan_of(self.rows, nodes), max_depth=depth, model_depth=modelled, pass_prob=least
        )
        before = self.head.levels_drafted if self.head else 0
        drafts, proposed = [NO_DRAFT] * self.rows, []
        if nodes.any():
            proposed = self.drafter.propose(plan)
            drafts = decision.select(proposed)
        said = [self.accepted(slot, draft) for slot, draft in enumerate(drafts)]
        sizes = np.array(list(map(len, drafts)), np.int32)
        counts = np.array(list(map(len, said)), np.int32)
        emitted = np.full((self.rows, counts.max()), -1, np.int32)
        for row, each in enumerate(said):
            emitted[row, : len(each)] = each
        self.drafter.observe(plan, None, Outcome(counts, emitted, sizes, np.ones(self.rows, bool)))
        taken = float(self.costs.verify(np.array(self.rows + sizes.sum())))
        levels = (self.head.levels_drafted if self.head else 0) - before
        drafting = (self.costs.follow_ms + self.costs.draft_ms * levels) * (levels > 0)
        slow = self.slowness()
        facts = {"draft_ms": slow * drafting, "allowed": nodes.tolist(), "proposed": proposed}
        facts |= {"reason": decision.reason, "used_draft_model": bool(modelled.any())}
        self.policy.observe(report_of(said, sizes.tolist(), slow * taken, **facts))
        return counts.sum(), taken + drafting, np.count_nonzero(modelled), sizes.sum()

    def accepted(self, slot, draft):
        """What comes: the longest right path, and one token more."""
        node, path = -1, []
        for token in self.truths[slot]:
            below = [
                n for n in range(len(draft))
                if draft.parents[n] == node and draft.tokens[n] == token
            ]  # fmt: skip
            path.append(token)
            if not below:
                return path
            node = below[0]
        return path


LARGE = StepCosts(
    (1, 2, 4, 8, 16, 64), (100.0, 101.0, 104.0, 130.0, 260.0, 990.0), draft_ms=6.0, follow_ms=7.0
)
"""A model of some gigabytes on two cores, and a small one that drafts for it."""


SOME, NONE = (0.4, 0.75), (0.4, 0.0)
"""N-grams that pay where they are found, and some that are always wrong."""

POOR, GOOD = (1.0, 0.3), (1.0, 0.85)
"""A head that is too seldom right for its price, and one that is right mostly."""
STEPS = {1: 1200, 4: 800, 16: 600, 64: 300}


@cache
def ran(costs, rows, ngrams, head):
    return World(costs, rows, ngrams, head).run(STEPS[rows])


@pytest.mark.parametrize(
    ("costs", "rows"),
    [
        (CORE, 1),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in ((DEVICE, 1), *every([CORE, DEVICE], [16, 64]))
        ),
    ],
)
def test_beside_a_head_that_does_not_pay_it_is_as_fast_as_the_ngrams_alone(costs, rows):
    head = (1.0, 0.05) if costs is DEVICE else POOR
    alone, _, drafted = ran(costs, rows, SOME, None)
    merged, levels, verified = ran(costs, rows, SOME, head)
    assert merged > 0.98 * alone
    assert levels < 0.15 and verified == pytest.approx(drafted, abs=0.15)
    assert alone > 1.3 or (costs is CORE and rows > 1), "n-grams pay, but beside many rows"


@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_head_that_pays_drafts_with_the_ngrams(rows):
    alone, _, _ = ran(DEVICE, rows, SOME, None)
    head, _, _ = ran(DEVICE, rows, (0.0, 0.0), GOOD)
    merged, levels, _ = ran(DEVICE, rows, SOME, GOOD)
    assert levels > 0.9
    assert merged > 1.3 * alone and merged > 0.98 * head


@pytest.mark.parametrize(("costs", "rows"), rarely([(CORE, 1), (DEVICE, 16)], [(DEVICE, 4)], None))
def test_a_head_that_pays_beside_ngrams_that_do_not(costs, rows):
    merged, levels, _ = ran(costs, rows, NONE, GOOD)
    assert levels > 0.7 and merged > 1.45


CALM = [(CORE, 1), (DEVICE, 16)]


@pytest.mark.parametrize(
    ("costs", "rows"),
    rarely([(CORE, 1), (CORE, 16), (CORE, 64), (DEVICE, 16), (DEVICE, 64)], CALM, values),
)
def test_where_neither_pays_it_is_plain(costs, rows):
    merged, levels, verified = ran(costs, rows, NONE, (1.0, 0.05))
    assert verified < 0.1 and levels < 0.1 and merged > 0.975


class VerifyAll(FixedPolicy):
    """Has three draft tokens of both sources verified in every step."""

    def decide(self, slots, kv_len, constrained=False):
        return replace(super().decide(slots, kv_len), select=list)


SPARSE = (0.2, 0.6)
"""N-grams that bring a fifth of a step."""
MANY = (0.6, 0.85)
"""N-grams that double the speed."""


@pytest.mark.parametrize(
    ("costs", "ngrams", "head"),
    rarely(
        every((TINY, CORE, DEVICE), (SPARSE, MANY), ((1.0, 0.05), POOR, GOOD)),
        [(TINY, SPARSE, POOR)],
        values,
    ),
)
def test_sources_are_bought_apart(costs, ngrams, head):
    """N-grams alone, the head alone, both or nothing: what is reached is close to the best of them,
    whatever the other source costs.
    """
    alone, _, _ = ran(costs, 1, ngrams, None)
    modelled, _, _ = ran(costs, 1, (0.0, 0.0), head)
    both = World(costs, 1, ngrams, head)
    both.policy = VerifyAll(DEPTH, DEPTH)
    reached, _, _ = ran(costs, 1, ngrams, head)
    assert reached >= 0.97 * max(1.0, alone, modelled, both.run(600)[0])


def test_a_head_that_loses_does_not_disable_the_ngrams():
    """Its trials use up a credit of their own."""
    world = World(CORE, 1, SPARSE, (1.0, 0.05))
    searched = []
    for _ in range(600):
        world.run(1)
        searched.append(world.policy.account.main.empty)
    assert not any(searched) and world.head.levels_drafted > 5


def test_what_a_head_costs_where_it_rests_is_not_the_ngrams_loss():
    """Neither what it stores in every step, plain ones too, nor what it reads behind its last
    draft.
    """
    saved = []
    for rest, after in ((0.0, 0.0), (0.5, 0.0), (0.5, 1.0)):
        account = seen(World(CORE, 1, SOME, GOOD).policy).account
        for _ in range(8):
            account.observe(report_of([[1]], [0], 2.9, draft_ms=rest))
        account.observe(report_of([[1, 1]], [1], 3.1, draft_ms=rest + 1))
        of_the_head = account.model.saved
        for extension in (after, 0.0, 0.0):
            took = {"draft_ms": rest + extension, "used_draft_model": False}
            account.observe(report_of([[1, 1]], [1], 3.1, **took))
        saved.append((account.main.saved, account.model.saved - of_the_head))
    assert saved[0][0] > 1.5
    assert saved[1] == pytest.approx(saved[0], abs=0.01)
    assert saved[2] == pytest.approx((saved[0][0], saved[0][1] - 1 / 2.9), abs=0.05)


def test_a_text_whose_ngrams_stop_paying_gets_the_head_and_back():
    world = World(DEVICE, 1, SOME, POOR)
    world.run(400)
    lookup, head = world.drafter._drafters
    lookup.right, head.right = 0.0, 0.85
    _, levels, _ = world.run(1200)
    assert levels > 0.7
    lookup.right, head.right = 0.9, 0.05
    _, levels, verified = world.run(1200)
    assert levels < 0.2 and verified > 0.8


@pytest.mark.parametrize("seed", [12, *(pytest.param(n, marks=pytest.mark.slow) for n in range(9))])
def test_what_a_draft_model_proposes_is_verified_on_a_busy_machine(seed):
    """Of eight steps one takes up to three times as long. Where the first two that verified draft
    tokens did, the draft model ran and nothing of it was verified any more.
    """
    noise = np.random.default_rng(seed)

    def slowness():
        drift = float(np.exp(0.05 * noise.standard_normal()))
        return drift * (1.0 + 2.0 * noise.random() if noise.random() < 0.12 else 1.0)

    world = World(LARGE, 1, (0.3, 0.5), (1.0, 0.65))
    world.random = np.random.default_rng(seed)
    world.head.random = np.random.default_rng(1000 + seed)
    world.slowness = slowness
    assert world.run(240)[0] > 1.5


@pytest.mark.parametrize("head", [(1.0, 0.05), (1.0, 0.55)])
def test_a_new_engine_soon_knows_that_ngrams_alone_are_faster(head):
    """A head that does not pay drafted in half of an engine's first hundred steps, since it was
    long believed to have plain steps to beat.
    """
    ran = []
    for seed in range(8):
        worlds = [World(CORE, 1, MANY, each) for each in (None, head)]
        for world in worlds:
            world.random = np.random.default_rng(seed)
        (alone, _, _), (merged, levels, _) = (world.run(100) for world in worlds)
        ran.append((merged / alone, levels))
    speed, levels = np.mean(ran, axis=0)
    assert speed > 0.95 and levels < 0.15
