"""A busy machine: steps take up to ten times as long, in bursts, at start-up as well. One unlucky
measurement does not outlive a few steps, and no server stays without draft tokens.
"""

import numpy as np
import pytest

from forerun.build.calibration import NODES, estimated_ms
from forerun.control.adaptive import AdaptivePolicy
from forerun.control.constants import MIN_REPEATS
from forerun.control.step_costs import StepCosts
from tests.control.steps import FREE, arrays, chain, report_of
from tests.control.test_sparse import COUNTS, TRUTH
from tests.covering import every, some_of, values

STEPS = 160
"""One answer."""


class Busy:
    """How many times as long the next step takes: in a burst of some 15 steps, which begins once
    in 30, up to ten times, else one.
    """

    def __init__(self, seed):
        self.random, self.left, self.factor = np.random.default_rng(seed), 0, 1.0

    def __call__(self, step=0):
        if not self.left and self.random.random() < 1 / 30:
            self.left = int(self.random.geometric(1 / 15))
            self.factor = float(np.exp(self.random.uniform(0.0, np.log(10.0))))
        if self.left:
            self.left -= 1
            return self.factor * float(self.random.uniform(0.5, 1.5))
        return max(0.8, float(self.random.normal(1.0, 0.05)))


def started(busy):
    """What start-up measures."""
    times = {nodes: [] for nodes in COUNTS}
    for _ in range(8):
        for nodes in NODES:
            if len(times[nodes]) < MIN_REPEATS or sum(times[nodes]) < 0.05:
                ms = TRUTH.verify_ms[COUNTS.index(nodes)]
                times[nodes].append(busy() * ms / 1000.0)
    return StepCosts(tuple(COUNTS), estimated_ms(times))


def tokens_per_step(costs, busy, seed=0):
    """Of a text with chains of random shares, half of whose tokens come true."""
    policy, random, tokens = AdaptivePolicy(costs, 8, 8, FREE), np.random.default_rng(seed), 0
    for step in range(STEPS):
        shares = random.uniform(0.2, 0.95, int(random.integers(0, 9)))
        right = int(np.argmax(np.append(random.random(len(shares)) >= shares, True)))
        decision = policy.decide(*arrays(1))
        allowed = decision.rows[0].nodes
        proposed = [chain(shares)] if allowed else []
        (kept,) = decision.select(proposed) if proposed else (chain([]),)
        said = 1 + min(len(kept), right)
        out = [*range(1, said), said if said <= right else 0]
        longer = busy(step)
        ms, look = longer * float(TRUTH.verify(1 + len(kept))), 0.1 * longer * (allowed > 0)
        facts = {"allowed": [allowed], "proposed": proposed, "reason": decision.reason}
        policy.observe(report_of([out], [len(kept)], ms, draft_ms=look, **facts))
        tokens += said
    return tokens / STEPS


@pytest.mark.parametrize(("place", "factor"), some_of(every(range(12), [3.0, 10.0]), values))
def test_one_slow_step_does_not_outlive_a_few(place, factor):
    """Where draft tokens were measured once, an interrupted step disabled them for 128 steps."""
    slow = tokens_per_step(TRUTH, lambda step: factor if step == place else 1.0)
    assert slow > 0.9 * tokens_per_step(TRUTH, lambda step: 1.0)


@pytest.mark.parametrize("factor", [3.0, 10.0, 30.0])
@pytest.mark.parametrize("first", range(1, 4))
def test_a_start_up_that_was_disturbed_does_not_outlive_a_few_steps(first, factor):
    """From some count on all were measured in a burst, as a machine's other work begins."""
    ms = [took * (factor if place >= first else 1.0) for place, took in enumerate(TRUTH.verify_ms)]
    measured = StepCosts(TRUTH.nodes, tuple(ms))
    assert tokens_per_step(measured, lambda step: 1.0) > 1.6


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 300), marks=pytest.mark.slow)], ids=len
)
def test_no_fresh_start_stays_without_draft_tokens(seeds):
    """Before, 49 of 150 such starts were below 1.6 and some at 1.00 for their whole answer."""
    reached = []
    for seed in seeds:
        busy = Busy(seed)
        reached.append(tokens_per_step(started(busy), busy, seed))
    assert min(reached) > 1.15 and np.mean(reached) > 1.7
    assert np.mean(np.array(reached) < 1.5) < 0.06
