from dataclasses import replace

import numpy as np
import pytest

from forerun.build import calibration
from forerun.build.calibration import (
    NODES,
    REPEATS,
    estimated_ms,
    measure_costs,
    rising,
    smoothed,
    with_draft_model,
)
from forerun.errors import ConfigError
from forerun.executors.toy import ToyExecutor
from forerun.interface.executor import Capabilities, ExecutorLimits
from forerun.interface.next_draft import NextDrafts
from tests.cli.toys import toy_target


class Clock:
    """Goes on when somebody says so, and a microsecond whenever it is read."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        self.seconds += 1e-6
        return self.seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def virtual_time(monkeypatch):
    monkeypatch.setattr(calibration, "perf_counter", CLOCK)


class PricedToy(ToyExecutor):
    """A toy whose step takes a known time: one millisecond, and half of one per node."""

    def begin(self, plan, trees, masks=None):
        cached = int(plan.kv_len.max()) * len(trees.tokens)
        CLOCK.seconds += 0.001 + 0.0005 * len(trees.tokens) + 2e-5 * cached
        return super().begin(plan, trees, masks)


def test_measured_costs_are_those_of_the_executor():
    limits = ExecutorLimits(16, 200, 8, 256, 1024, 259)
    executor, begun = PricedToy(limits), CLOCK.seconds
    costs = measure_costs(executor)
    assert CLOCK.seconds - begun < 1.0
    assert costs.nodes[:3] == (1, 2, 3)
    slope = (costs.verify_ms[5] - costs.verify_ms[0]) / (costs.nodes[5] - costs.nodes[0])
    assert 0.3 < slope < 1.5
    assert np.all(np.diff(costs.verify_ms) >= 0)
    assert 10.0 < costs.attend_ms < 40.0


class StrictToy(PricedToy):
    """Refuses a page table that is wider than its context, as an executor of fixed shapes does."""

    def begin(self, plan, trees, masks=None):
        assert plan.page_table.shape[1] <= -(-self.limits.context // self.limits.page_size)
        return super().begin(plan, trees, masks)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_no_step_is_longer_than_the_context(page_size):
    assert measure_costs(StrictToy(ExecutorLimits(page_size, 512, 8, 64, 256, 259)))


class SparseToy(PricedToy):
    """A step costs what it reads of 128 experts, of which each token chooses 8 of its own."""

    chosen = np.random.default_rng(0).random((259, 128)).argsort(1)[:, :8]

    def begin(self, plan, trees, masks=None):
        CLOCK.seconds += 0.0001 * len(np.unique(self.chosen[trees.tokens]))
        return ToyExecutor.begin(self, plan, trees, masks)


def test_timed_steps_touch_as_many_experts_as_text():
    """Rows that all said the same would read the experts of one row, and look cheap."""
    costs = measure_costs(SparseToy(ExecutorLimits(16, 200, 8, 256, 1024, 259)))
    expected = 12.8 * (1.0 - (1.0 - 8 / 128) ** np.array(costs.nodes))
    assert costs.nodes == tuple(sorted(NODES))
    np.testing.assert_allclose(costs.verify_ms, expected, rtol=0.08)


class CapturingToy(ToyExecutor):
    """A toy on a clock: the first step of a size compiles, the second captures, others replay."""

    def __init__(self, limits, first=(1.5, 0.15)):
        super().__init__(limits)
        self.first, self.calls = first, {}

    def replay(self, nodes):
        return 0.005 + 0.00003 * nodes

    def begin(self, plan, trees, masks=None):
        size = plan.rows, len(trees.tokens)
        calls = self.calls[size] = self.calls.get(size, 0) + 1
        random = np.random.default_rng((calls, *size))
        slow = calls <= len(self.first)
        took = self.first[calls - 1] if slow else self.replay(size[1])
        CLOCK.seconds += took * (1.0 + 0.02 * random.standard_normal())
        return super().begin(plan, trees, masks)


@pytest.mark.parametrize("first", [(1.5, 0.15), (0.4,), ()])
def test_first_calls_are_no_part_of_the_table(first):
    executor = CapturingToy(ExecutorLimits(16, 200, 8, 256, 1024, 259), first)
    costs = measure_costs(executor)
    assert set(costs.nodes) == set(NODES)
    expected = [1e3 * executor.replay(nodes) for nodes in costs.nodes]
    np.testing.assert_allclose(costs.verify_ms, expected, rtol=0.05)
    assert costs.attend_ms < 1.0  # 1,000 tokens cost nothing here but noise.


def test_measuring_a_slow_machine_ends(monkeypatch):
    """Two counts of nodes are timed, however long they take: a step of 4 seconds, 6 of them."""
    executor = CapturingToy(ExecutorLimits(16, 200, 8, 256, 1024, 259), ())
    begun = CLOCK.seconds
    monkeypatch.setattr(executor, "replay", lambda nodes: 4.0)
    costs = measure_costs(executor)
    assert len(costs.nodes) == 2
    # Beside the table: what 1,000 cached tokens cost.
    assert CLOCK.seconds - begun < 4.0 * 1.1 * (
        2 * (executor.capabilities.first_steps + 2) + 2 * REPEATS + 4
    )


def test_where_steps_are_long_small_ones_are_timed(monkeypatch):
    """What one stream's drafts cost is known before what many streams cost: a model of 1.5B on two
    cores, whose four nodes take as long as one.
    """
    executor = CapturingToy(ExecutorLimits(16, 200, 8, 256, 1024, 259), ())
    monkeypatch.setattr(executor, "replay", lambda nodes: 0.03 + 0.005 * max(0, nodes - 4))
    costs = measure_costs(executor)
    assert {1, 2, 4, 8} <= set(costs.nodes)
    assert costs.verify(np.array([4]))[0] < 1.1 * costs.verify_ms[0]


DRAFTS = NextDrafts(np.ones(1, np.bool_), 1, 1, *(np.zeros((1, 1)) for _ in range(3)))


class DraftingToy(PricedToy):
    """Steps that do the draft model's work: 4 ms to follow, 2 for every further level."""

    levels = deepest = 0

    def begin(self, plan, trees, masks=None):
        self.levels = levels = plan.on_device_draft.levels if plan.on_device_draft else 0
        self.deepest = max(levels, self.deepest)
        CLOCK.seconds += 0.004 + 0.002 * (levels - 1) if levels else 0.0
        return super().begin(plan, trees, masks)

    def finish(self, round, masks=None):
        outcome = super().finish(round, masks)
        return replace(outcome, drafts=DRAFTS) if self.levels else outcome


@pytest.mark.parametrize("depth", [1, 3, 9])
def test_drafting_within_a_step_is_priced_by_level(depth):
    """No deeper than drafts will be: an executor would compile what no step runs."""
    executor = DraftingToy(ExecutorLimits(16, 200, 8, 256, 1024, 259))
    alone = measure_costs(executor)
    costs = with_draft_model(alone, None, executor, 16, depth)
    assert executor.deepest <= depth
    assert costs.drafts_in_step and not alone.drafts_in_step
    assert costs.verify_ms == alone.verify_ms
    assert costs.follow_ms == pytest.approx(4.0, rel=0.1)
    assert costs.draft_ms == pytest.approx(2.0 * (depth > 1), rel=0.1)


@pytest.mark.parametrize(
    "limits",
    [
        ExecutorLimits(1, 20, 2, 4, 20, 259),
        ExecutorLimits(256, 1, 64, 512, 256, 259),
        ExecutorLimits(16, 4, 1, 2, 64, 259),
    ],
)
def test_small_executors_can_be_measured(limits):
    executor = ToyExecutor(limits)
    costs = measure_costs(executor)
    assert len(costs.nodes) >= 2 and max(costs.nodes) <= limits.max_nodes
    # Every slot is free again, or opening would be refused.
    measure_costs(executor)


class SteadyToy(CapturingToy):
    """Its first step of a size takes what all others take, but for some calls: 65 ms, and 8 more
    for every node.
    """

    capabilities = Capabilities(first_steps=0)

    def __init__(self, limits, slow=(), truth=lambda nodes: 0.065 + 0.008 * nodes):
        super().__init__(limits, ())
        self.slow, self.steps, self.truth = slow, [], truth

    def replay(self, nodes):
        self.steps.append(nodes)
        return self.truth(nodes) * (2.0 if len(self.steps) - 1 in self.slow else 1.0)


STEADY = ExecutorLimits(16, 200, 8, 8, 1024, 259)
"""Counts of nodes up to 8, in the order 1, 2, 8, 4, 3, 5, 6; each longer than its share."""


@pytest.mark.parametrize("place", [None, *range(4)])
def test_a_long_step_is_timed_once_unless_it_was_disturbed(monkeypatch, place):
    """Then it is timed again, with counts beside it; whichever it was, the table is not wrong."""
    monkeypatch.setattr(calibration, "_attention_ms", lambda *_: 0.0)
    executor = SteadyToy(STEADY, () if place is None else {place})
    costs = measure_costs(executor)
    if place is None:
        assert len(executor.steps) == len(set(executor.steps)) == len(costs.nodes)
    else:
        assert executor.steps.count(executor.steps[place]) == 3
    truth = [1e3 * executor.truth(nodes) for nodes in costs.nodes]
    np.testing.assert_allclose(costs.verify_ms, truth, rtol=0.06)


def test_a_slow_model_is_measured_alike_beside_neighbours(monkeypatch):
    """A neighbour slows what runs by half for 50 to 300 ms, every 800 or so: what 4 and 8 nodes of
    a 1B model on two cores take over one is within a tenth in nine starts of ten.
    """
    monkeypatch.setattr(calibration, "_attention_ms", lambda *_: 0.0)
    counts = (1, 2, 3, 4, 5, 6, 8, 16, 32, 64)
    ms = (21.5, 22.8, 24.0, 25.5, 26.7, 28.0, 30.5, 51.0, 91.0, 185.0)

    class Disturbed(SteadyToy):
        def __init__(self, seed):
            super().__init__(ExecutorLimits(16, 200, 8, 64, 1024, 259))
            random, at = np.random.default_rng(seed), CLOCK.seconds
            self.bad = []
            for _ in range(20):
                at += random.exponential(0.8)
                self.bad.append((at, at := at + random.uniform(0.05, 0.3)))

        def begin(self, plan, trees, masks=None):
            left, now = np.interp(len(trees.tokens), counts, ms) / 1e3, CLOCK.seconds
            while left > 0.0:
                slow = 2.0 if any(start <= now < end for start, end in self.bad) else 1.0
                left, now = left - 0.001 / slow, now + 0.001
            CLOCK.seconds = now
            return ToyExecutor.begin(self, plan, trees, masks)

    ratios = []
    for seed in range(40):
        costs = measure_costs(Disturbed(seed))
        assert (np.diff(costs.verify_ms) >= 0.0).all()
        one, four, eight = costs.verify(np.array([1, 4, 8]))
        ratios.append([four / one, eight / one])
    near = np.abs(np.array(ratios) / [25.5 / 21.5, 30.5 / 21.5] - 1.0) < 0.1
    assert near.mean(axis=0).min() >= 0.9


@pytest.mark.parametrize(
    ("seconds", "tokens"), [(0.0001, 256), (0.002, 250), (0.004, 125), (1.0, 64)]
)
def test_as_many_cached_tokens_as_there_is_time_for(seconds, tokens):
    executor = PricedToy(ExecutorLimits(16, 64, 8, 64, 1024, 259))
    known = []
    begin = executor.begin
    executor.begin = lambda plan, *rest: known.append(plan) or begin(plan, *rest)
    attend_ms = calibration._attention_ms(executor, seconds)
    assert sum(len(plan.known[0]) for plan in known[:-6]) == tokens
    assert attend_ms == pytest.approx(20.0, rel=0.1)


def test_tokens_that_need_not_be_there_are_not_computed():
    """Behind 1,000 positions that were not written, where the executor takes those."""

    class Unwritten(PricedToy):
        capabilities = Capabilities(unwritten=True)

        def begin(self, plan, trees, masks=None):
            known.append((len(plan.known[0]), int(plan.kv_len[0])))
            return super().begin(plan, trees, masks)

        def _read(self, plan, row):
            return np.zeros(int(plan.kv_len[row]), np.int32)

    known = []
    executor = Unwritten(ExecutorLimits(16, 256, 8, 64, 4096, 259))
    attend_ms = calibration._attention_ms(executor, 0.004)
    assert known == [(1, 1024), (1, 0)] * 3
    assert attend_ms == pytest.approx(20.0, rel=0.1)


def test_an_executor_too_small_to_measure_says_so():
    with pytest.raises(ConfigError, match="chunked-prefill-size"):
        measure_costs(ToyExecutor(ExecutorLimits(16, 4, 4, 1, 64, 259)))


def test_the_toys_automatic_policy_is_fixed():
    with toy_target() as target:
        assert target.config.policy == "fixed"
        assert target.costs is None


def test_a_slow_moment_makes_no_guess_a_bargain():
    counts, clean = [1, 4, 5, 8, 16, 32, 64], [4.0, 5.2, 7.0, 10.1, 19.7, 39.3, 78.8]
    assert smoothed(counts, clean) == pytest.approx(clean)
    slow = [*clean[:5], 65.0, 78.8]
    pressed = smoothed(counts, slow)
    assert pressed[:5] == pytest.approx(clean[:5]) and pressed[6] == clean[6]
    assert pressed[5] == pytest.approx(39.4, rel=0.01)
    assert smoothed([1, 2], [3.0, 9.0]) == [3.0, 9.0]
    assert smoothed([8, 16], [9.0, 9.5]) == [9.0, 9.5]


def test_times_that_fall_share_the_error():
    assert rising([3.0, 2.0, 4.0], [1, 1, 1]) == [2.5, 2.5, 4.0]
    assert rising([3.0, 2.0, 4.0], [1, 3, 1]) == [2.25, 2.25, 4.0]
    assert rising([3.0, 2.0, 1.0, 9.0], [2, 2, 2, 2]) == [2.0, 2.0, 2.0, 9.0]
    assert rising([1.0, 2.0], [1, 1]) == [1.0, 2.0]


def test_fresh_servers_price_steps_alike():
    """A slow moment makes neither a few nodes dear nor more nodes cheaper than fewer."""
    clean = {1: 3.0, 2: 3.2, 3: 3.4, 4: 3.5, 5: 5.0, 6: 5.2, 8: 5.8, 16: 11.5, 32: 22.0, 64: 44.0}
    random, prices = np.random.default_rng(0), []
    for _ in range(40):
        times = {}
        for nodes, ms in clean.items():
            slow = 1.0 + 0.6 * (random.random() < 0.15)  # A neighbour, while this size is timed.
            times[nodes] = (ms * slow * random.normal(1.0, 0.05, 5) / 1000.0).tolist()
        believed = estimated_ms(times)
        assert (np.diff(believed) >= 0.0).all()
        prices.append(believed[4])
    assert np.mean(np.abs(np.array(prices) / 5.0 - 1.0) < 0.15) > 0.8
