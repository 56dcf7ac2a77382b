"""A policy that learns again what another one knew decides as that one goes on."""

from copy import deepcopy
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from forerun.control.adaptive import AdaptivePolicy
from forerun.control.costs import Mean
from forerun.control.learnt import PolicyLearner
from forerun.control.step_costs import StepCosts
from forerun.draft_shape import DraftShape
from forerun.interface.drafter import DrafterTraits
from tests.control.steps import FREE, MODEL, Text, report_of, seen
from tests.control.test_policy import Simulation

TABLE = StepCosts((1, 2, 4, 8, 16, 64), (4.0, 4.4, 5.2, 10.1, 20.1, 78.8))
LATER = StepCosts((1, 2, 4, 8, 32), (7.0, 7.2, 8.2, 12.1, 38.0))
"""What another start measured, while the machine was busy."""
BOTH = DrafterTraits("model+ngram", 64, merged=True)


def opened(kind, costs=TABLE, nodes=4):
    """A policy, and what drives it for so many steps."""
    if kind == "ngram":
        return AdaptivePolicy(costs, nodes, 4, FREE)
    return AdaptivePolicy(
        replace(costs, draft_ms=0.6, follow_ms=0.6, drafts_in_step=kind == "device"),
        *(nodes, 4),
        BOTH if kind == "merged" else MODEL,
    )


def driven(kind, policy, steps, source=None):
    """What was verified in each of so many steps, and the source after them."""
    if kind == "device":
        source = source or Simulation(policy.account.costs.measured, policy, rows=2, seed=4)
        source.policy = policy
        return source.run(steps, 0.6).nodes[-2 * steps :], source
    source = source or Text(TABLE, 2, 0.8, seed=3, look=0.1)
    return source.run(policy, steps).verified[-steps:], source


def state(policy):
    """What it knows, as values: a sum of no steps may be 0 or 0.0."""
    return msgspec.msgpack.decode(PolicyLearner(policy).learnt())


PAUSE = replace(report_of([[1]], [0], 9.0), prompt_tokens=5)
"""A prompt: no step after it is compared with the one before."""


@pytest.mark.parametrize("kind", ["ngram", "device", "host", "merged"])
@pytest.mark.parametrize("steps", [80, 160])
def test_it_goes_on(kind, steps):
    policy = opened(kind)
    _, source = driven(kind, policy, steps)
    learnt = PolicyLearner(policy).learnt()
    later = opened(kind, LATER)
    assert PolicyLearner(later).relearn(learnt) and state(later) == state(policy)
    copied = deepcopy(source)
    for each in (policy, later):
        each.observe(PAUSE)
    expected, _ = driven(kind, policy, 60, source)
    assert driven(kind, later, 60, copied)[0] == expected
    assert state(later) == state(policy)
    fresh = opened(kind, LATER)
    fresh.observe(PAUSE)
    assert state(fresh) != msgspec.msgpack.decode(learnt)  # Something was learnt.


def test_a_few_steps_are_not_believed():
    """Start-up measures more: a process that ended soon tells nothing to the next one."""
    policy, later = opened("ngram"), opened("ngram", LATER)
    driven("ngram", policy, 20)
    before = state(later)
    assert not PolicyLearner(later).relearn(PolicyLearner(policy).learnt())
    assert state(later) == before


def test_what_is_of_another_policy_is_refused():
    kinds = (("ngram", 4), ("device", 4), ("merged", 8))
    taught = [seen(opened(kind, nodes=nodes)) for kind, nodes in kinds]
    for number, (kind, nodes) in enumerate(kinds):
        for other, policy in enumerate(taught):
            later = opened(kind, nodes=nodes)
            before = state(later)
            assert PolicyLearner(later).relearn(PolicyLearner(policy).learnt()) == (number == other)
            assert (state(later) == before) == (number != other)


@pytest.mark.parametrize(
    "learnt", [b"", b"\x01", b"\xff" * 40, msgspec.msgpack.encode({"costs": 3})]
)
def test_bytes_that_say_nothing(learnt):
    policy = opened("ngram")
    before = PolicyLearner(policy).learnt()
    assert not PolicyLearner(policy).relearn(learnt)
    assert PolicyLearner(policy).learnt() == before


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_numbers_that_are_none(wrong):
    policy = seen(opened("ngram"))
    assert PolicyLearner(opened("ngram")).relearn(PolicyLearner(policy).learnt())
    policy.account.costs.corrections[2].value = wrong
    learnt = PolicyLearner(policy).learnt()
    assert not PolicyLearner(opened("ngram")).relearn(learnt)


def test_the_newest_context_of_plain_steps_stays_the_newest():
    policy = opened("ngram")
    costs = policy.account.costs
    for cached in (100, 4000, 100):
        for _ in range(25):
            costs.learn_plain(1, cached, False, 5.0 + cached / 1000)
    later = opened("ngram", LATER)
    assert PolicyLearner(later).relearn(PolicyLearner(policy).learnt())
    for cached in (100, 4000, 10**6):
        assert later.account.costs.plain(1, cached, False) == costs.plain(1, cached, False)
    assert np.isfinite(costs.plain(1, 10**6, False))


def test_a_policy_is_described_while_it_learns():
    policy = opened("device")
    driven("device", policy, 200)
    (bucket,) = policy.shapes.buckets.values()

    class ChangingMean:
        """A mean; while it is read, a shape that was not measured before is."""

        @property
        def value(self):
            bucket.relative_cost[DraftShape(99, 1, 99)] = Mean()
            return 2.0

    known = len(bucket.relative_cost)
    bucket.relative_cost[next(iter(bucket.relative_cost))] = ChangingMean()
    assert len(policy.describe()["plain_steps_by_rows"]) == known
