"""Several drafters and one tree: the text stays, and the drafter that is right more often gets the
nodes.
"""

from array import array
from dataclasses import replace

import numpy as np
import pytest

from forerun.control.policy import FixedPolicy
from forerun.draft_shape import DraftShape
from forerun.drafters.combined import DEPTHS, PRIOR, Calibration, CombinedDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.drafters.none import NoDrafter
from forerun.engine.thread import Engine, EngineOptions
from forerun.interface.drafter import DrafterTraits
from forerun.interface.grammars import NoGrammars
from forerun.interface.plan import NodeCosts, Outcome
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, DraftSource, batch
from tests.control.steps import plan_of
from tests.drafters.test_model_drafter import FeaturedToy, TextFeedingDrafter
from tests.engine.toys import TOKENIZER, ask, limits, run


def served(combine):
    """Statistics of a few long texts, drafted by what `combine` makes of a lookup and a head."""
    executor = FeaturedToy(limits(pages=200))
    head = TextFeedingDrafter(executor.head, executor.limits, DraftShape(width=2, depth=3))
    drafter = combine(NgramDrafter(4), head)
    made = Engine(
        executor, drafter, FixedPolicy(4, 4), TOKENIZER, NoGrammars(), EngineOptions()
    )  # fmt: skip
    requests = [ask(str(i), f"Prompt {i}", 60) for i in range(3)]
    sink = run(made, *requests)
    sink.expect(*requests)
    assert made.stats().failed_steps == 0
    return made.stats(), drafter


def test_the_text_stays_and_no_drafter_alone_does_better():
    merged, drafter = served(CombinedDrafter)
    lookup, _ = served(lambda lookup, head: lookup)
    head, _ = served(lambda lookup, head: head)
    assert merged.steps <= min(lookup.steps, head.steps)
    assert drafter.traits.needs_features and "ngram" in drafter.traits.name
    assert {count.source for count in merged.by_source} == {"ngram", "draft_model"}
    shares = drafter.describe()["sources"]
    assert all(share["right"] > 0 for share in shares.values()) and len(shares) == 3


class ChanceDrafter(NoDrafter):
    """A drafter that proposes chains, right with chance `honest` at each depth and claimed to be
    with `claim`; wrong tokens are its own.
    """

    def __init__(self, name, honest, claim, source, width=1):
        self.traits = DrafterTraits(name, 8)
        self.honest, self.claim, self.source = honest, claim, source
        self.truth: list[int] = []
        self.random = np.random.default_rng(len(name))

    def propose(self, plan):
        drafts = []
        for nodes in plan.max_nodes.tolist():
            wrong = 1000 + int(self.random.integers(1000)) + 5000 * int(self.source)
            tokens = [
                token if self.random.random() < self.honest else wrong + depth
                for depth, token in enumerate(self.truth[:nodes])
            ]
            scores = self.claim ** np.arange(1, len(tokens) + 1)
            parents = np.arange(len(tokens), dtype=np.int32) - np.int32(1)
            tokens = np.array(tokens, np.int32)
            drafts.append(Draft(tokens, parents, scores.astype(np.float32), self.source))
        return drafts


class Shallow(ChanceDrafter):
    """Right at the first depth alone."""

    def propose(self, plan):
        return [
            replace(draft, tokens=draft.tokens + 5000 * (np.arange(len(draft)) > 0))
            for draft in super().propose(plan)
        ]


def replayed(drafter, sources, steps=600, nodes=3):
    """Accepted draft tokens a step, and of the last half how many nodes each source got."""
    drafter.begin(SlotInit(0, TokenText([0]), 1, Sampling()))
    random, accepted, got = np.random.default_rng(1), 0, {}
    for step in range(steps):
        truth = random.integers(0, 1000, 8).tolist()
        for source in sources:
            source.truth = truth
        plan = plan_of(1, [nodes])
        (draft,) = drafter.propose(plan)
        assert len(draft) <= nodes
        path, node = [], -1
        for token in truth:
            below = [
                n for n in range(len(draft))
                if draft.parents[n] == node and draft.tokens[n] == token
            ]  # fmt: skip
            if not below:
                break
            assert len(below) == 1, "a token hangs below a node once"
            node = below[0]
            path.append(node)
        accepted += len(path)
        emitted = np.array([truth[: len(path) + 1]], np.int32)
        counts = np.array([len(path) + 1], np.int32)
        trees = batch(plan.known, [draft])
        verified = np.array([len(draft)], np.int32)
        drafter.observe(plan, trees, Outcome(counts, emitted, verified, np.ones(1, np.bool_)))
        if step >= steps // 2:
            for source in draft.sources():
                got[source] = got.get(source, 0) + 1
    return accepted / steps, got


def test_every_depth_is_learnt_by_itself():
    trust = (
        Shallow("lookup", 1.0, 0.9, DraftSource.NGRAM),
        ChanceDrafter("head", 0.0, 0.1, DraftSource.DRAFT_MODEL),
    )
    drafter = CombinedDrafter(*trust)
    replayed(drafter, trust, 60)
    first, second = (drafter.calibration.calibrated_prob(1, depth, 0.9) for depth in (1, 2))
    assert first > 0.9 and second < 0.3


GOOD, BAD = DraftSource.DRAFT_MODEL, DraftSource.NGRAM


@pytest.mark.parametrize("claim", [0.9, 0.5])
def test_the_better_source_gets_the_nodes_whatever_is_claimed(claim):
    """One is right seven times in ten and says so; another says `claim` and is right once."""
    good, bad = ChanceDrafter("good", 0.7, 0.7, GOOD), ChanceDrafter("bad", 0.1, claim, BAD)
    alone, _ = replayed(good, [good])
    good, bad = ChanceDrafter("good", 0.7, 0.7, GOOD), ChanceDrafter("bad", 0.1, claim, BAD)
    merged, got = replayed(CombinedDrafter(bad, good), [good, bad])
    assert got[GOOD] > 5 * got.get(BAD, 0)
    assert merged > 0.95 * alone


def test_two_of_a_kind_are_better_than_each():
    def sources():
        return ChanceDrafter("one", 0.6, 0.6, GOOD), ChanceDrafter("other one", 0.6, 0.6, BAD)

    alone = max(replayed(source, [source], nodes=4)[0] for source in sources())
    pair = sources()
    merged, got = replayed(CombinedDrafter(*pair), pair, nodes=4)
    assert merged > 1.05 * alone
    assert min(got.values()) > 0.25 * sum(got.values())


def test_a_score_is_how_often_such_nodes_were_right():
    calibration, random = Calibration(2), np.random.default_rng(0)
    assert calibration.calibrated_prob(1, 1, 0.8) == pytest.approx(0.8)
    for _ in range(4000):
        calibration.learn(1, 1, 0.8, random.random() < 0.3)
    assert calibration.calibrated_prob(1, 1, 0.8) == pytest.approx(0.3, abs=0.05)
    assert (
        calibration.calibrated_prob(2, 1, 0.8)
        == calibration.calibrated_prob(1, 2, 0.8)
        == pytest.approx(0.8)
    )
    assert calibration.calibrated_prob(1, DEPTHS, 0.3) == calibration.calibrated_prob(
        1, DEPTHS + 5, 0.3
    )
    calibration.learn(3, 1, 1.0, True)
    assert calibration.calibrated_prob(3, 1, 1.0) == pytest.approx((PRIOR + 1) / (PRIOR + 1))


def test_paths_that_two_propose_are_one_node():
    good, bad = ChanceDrafter("good", 1.0, 0.5, GOOD), ChanceDrafter("bad", 1.0, 0.9, BAD)
    drafter = CombinedDrafter(bad, good)
    good.truth = bad.truth = [3, 4, 5, 6]
    drafter.begin(SlotInit(0, TokenText([0]), 1, Sampling()))
    (draft,) = drafter.propose(plan_of(1, [6]))
    assert draft.tokens.tolist() == [3, 4, 5, 6] and draft.parents.tolist() == [-1, 0, 1, 2]
    assert set(draft.sources()) == {BAD}, "the drafter that is surer of it"
    assert (np.diff(draft.score) <= 0).all()


def test_where_only_free_drafters_draft_the_head_does_not():
    good, bad = ChanceDrafter("good", 1.0, 0.9, GOOD), ChanceDrafter("bad", 1.0, 0.5, BAD)
    drafter = CombinedDrafter(bad, good)
    good.truth = bad.truth = [3, 4, 5, 6]
    for slot in (0, 1):
        drafter.begin(SlotInit(slot, TokenText([0]), 1, Sampling()))
    seen = []
    propose, observe = good.propose, good.observe
    good.propose = lambda plan: seen.append(plan.max_nodes.tolist()) or propose(plan)
    good.observe = lambda plan, *rest: seen.append(plan.max_depth.tolist()) or observe(plan, *rest)
    plan = replace(plan_of(2, [6, 6]), model_depth=np.array([0, 6], np.int32))
    alone, merged = drafter.propose(plan)
    assert set(alone.sources()) == {BAD} and set(merged.sources()) == {GOOD}
    assert merged.free.tokens.tolist() == alone.tokens.tolist() and alone.free is None
    assert merged.score[0] > alone.score[0]
    tokens = np.array([[3, 4, 9], [3, 9, -1]], np.int32)
    counts, drafted = np.array([3, 2], np.int32), np.array([4, 4], np.int32)
    drafter.observe(plan, None, Outcome(counts, tokens, drafted, np.ones(2, np.bool_)))
    assert seen == [[0, 6], [0, 6]]
    shares = drafter.describe()["sources"]
    assert shares["bad"] == {"proposed": 5, "right": 3}
    assert shares["bad+good"] == {"proposed": 2, "right": 1} and not shares["good"]["proposed"]


def test_a_free_drafter_that_buys_does_so_alone_where_the_head_has_no_part():
    """Its drafts come out as they are, without a tree of Python and without the head."""
    good, bad = ChanceDrafter("good", 1.0, 0.9, GOOD), ChanceDrafter("bad", 1.0, 0.5, BAD)
    bad.traits = replace(bad.traits, no_draft_model=True, selects_by_cost=True)
    drafter = CombinedDrafter(bad, good)
    assert (
        drafter.traits.selects_by_cost
        and not CombinedDrafter(bad, bad, good).traits.selects_by_cost
    )
    bad.truth = [3, 4, 5]
    good.propose = None
    prices = NodeCosts(array("d", [0.1]), False)
    plan = replace(plan_of(1, [3]), model_depth=np.zeros(1, np.int32), node_costs=prices)
    bought = [Draft()]
    bad.propose = lambda plan: bought if plan.node_costs is prices else None
    assert drafter.propose(plan) is bought
    counts, tokens = np.ones(1, int), np.full((1, 1), 3)
    drafter.observe(plan, None, Outcome(counts, tokens, 0 * counts, np.ones(1, bool)))
