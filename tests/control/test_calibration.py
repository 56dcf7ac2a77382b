import numpy as np
import pytest

from forerun.build.engine import make_engine, open_target
from forerun.client.completion import complete, make_request
from forerun.config import EngineConfig
from forerun.control import calibration
from forerun.control.calibration import measure_costs, smoothed, with_draft_model
from forerun.drafters.ngram import NgramDrafter
from forerun.errors import ConfigError
from forerun.executors.toy import ToyExecutor
from forerun.interface.executor import ExecutorLimits
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

    def verify(self, plan, trees):
        cached = int(plan.kv_len.max()) * len(trees.tokens)
        CLOCK.seconds += 0.001 + 0.0005 * len(trees.tokens) + 2e-5 * cached
        return super().verify(plan, trees)


def test_measured_costs_are_those_of_the_executor():
    limits = ExecutorLimits(16, 200, 8, 256, 1024, 259)
    executor, begun = PricedToy(limits), CLOCK.seconds
    costs = measure_costs(executor, NgramDrafter(8))
    assert CLOCK.seconds - begun < 1.0
    assert costs.nodes[:3] == (1, 2, 3)
    slope = (costs.verify_ms[5] - costs.verify_ms[0]) / (costs.nodes[5] - costs.nodes[0])
    assert 0.3 < slope < 1.5
    assert np.all(np.diff(costs.verify_ms) >= 0)
    assert 10.0 < costs.attend_ms < 40.0
    assert 0.0 < costs.draft_ms < 1.0


class InnerHead:
    """A head that a toy's steps run themselves: 4 ms to follow, 2 for every further level."""

    def __init__(self):
        self.levels = 0

    def draft_request(self, draft_request):
        self.levels = draft_request.levels

    def grown(self):
        return self


class DraftingToy(PricedToy):
    def __init__(self, limits, head):
        super().__init__(limits)
        self.head = head

    def verify(self, plan, trees):
        levels, self.head.levels = self.head.levels, 0
        CLOCK.seconds += 0.004 + 0.002 * (levels - 1) if levels else 0.0
        return super().verify(plan, trees)


def test_drafting_within_a_step_is_a_part_of_its_cost():
    head = InnerHead()
    executor = DraftingToy(ExecutorLimits(16, 200, 8, 256, 1024, 259), head)
    alone = measure_costs(executor, NgramDrafter(8))
    costs = with_draft_model(alone, head, executor, 16)
    assert costs.draft_ms == costs.follow_ms == 0.0
    extra = dict(zip(costs.nodes, np.subtract(costs.verify_ms, alone.verify_ms), strict=True))
    assert extra[1] == 0.0
    # Of a row of 2 nodes one level is grown, of 8 rows of 8 nodes seven.
    assert 3.0 < extra[2] < 6.0
    assert 12.0 < extra[64] < 22.0


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
    costs = measure_costs(executor, NgramDrafter(limits.slots))
    assert len(costs.nodes) >= 2 and max(costs.nodes) <= limits.max_nodes
    # Every slot is free again, or opening would be refused.
    measure_costs(executor, NgramDrafter(limits.slots))


def test_an_executor_too_small_to_measure_says_so():
    with pytest.raises(ConfigError, match="max-step-nodes"):
        measure_costs(ToyExecutor(ExecutorLimits(16, 4, 4, 1, 64, 259)), NgramDrafter(4))


def test_adaptive_and_fixed_policies_give_the_same_text():
    prompt, texts = np.frombuffer(b"Hello", np.uint8).astype(np.int32), []
    for policy in ("adaptive", "fixed"):
        target = open_target(EngineConfig(model="toy", policy=policy, kv_tokens=2048))
        assert (target.costs is not None) == (policy == "adaptive")
        engine = make_engine(target, target.config)
        engine.start()
        texts.append(complete(engine, [make_request(prompt, max_tokens=80)])[0][0].text)
        engine.shutdown()
    assert texts[0] == texts[1]


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
    assert pressed[5] == pytest.approx(39.4)
    assert smoothed([1, 2], [3.0, 9.0]) == [3.0, 9.0]
    assert smoothed([8, 16], [9.0, 9.5]) == [9.0, 9.5]
