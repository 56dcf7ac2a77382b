"""Speculation on a sparse model: a step costs what it reads of the experts that its nodes touch, so
the second node costs most and later ones less and less. No clock: steps take what the curve says.
"""

import numpy as np
import pytest

from forerun.build.calibration import NODES, estimated_ms
from forerun.control.adaptive import AdaptivePolicy
from forerun.control.step_costs import StepCosts
from tests.control.steps import FREE, Text, arrays, chain, report_of
from tests.covering import every, some_of, values

EXPERTS, CHOSEN = 128, 8
DENSE, NODE = 1.0, 0.02
"""Milliseconds of what every step reads, and of a node's arithmetic."""


def step_ms(nodes, expert_ms):
    """The union of the experts that so many nodes choose: 4 touch 3.6 times as many as one."""
    touched = EXPERTS * (1.0 - (1.0 - CHOSEN / EXPERTS) ** np.asarray(nodes))
    return DENSE + expert_ms * touched + NODE * np.asarray(nodes)


def curve(counts, expert_ms):
    return StepCosts(tuple(counts), tuple(step_ms(counts, expert_ms).tolist()))


def test_start_up_believes_a_curve_that_bends_downwards():
    """Further nodes cost less than the ones before them, and are believed to."""
    counts = sorted(NODES)
    truth = step_ms(counts, 0.1)
    assert (np.diff(truth) / np.diff(counts))[-1] < 0.2 * (truth[1] - truth[0])
    believed = estimated_ms({n: [ms / 1000.0] * 3 for n, ms in zip(counts, truth, strict=True)})
    assert believed == pytest.approx(truth)


@pytest.mark.parametrize(
    ("expert_ms", "rows", "acceptance"),
    some_of(every([0.02, 0.1, 0.5], [1, 4, 16], [0.5, 0.7, 0.9]), values),
)
def test_never_slower_than_plain_on_a_sparse_model(expert_ms, rows, acceptance):
    measured = curve(sorted(NODES), expert_ms)
    text = Text(curve(range(1, 257), expert_ms), rows, 1.0, share=acceptance)
    assert text.run(AdaptivePolicy(measured, 8, 8, FREE), 300).over_plain() >= 0.97


def test_a_tree_is_cut_where_a_node_opens_more_than_it_brings():
    """The same draft, whose every token is right one time in two: deep where experts are small,
    nothing of it where they are dear.
    """
    sizes = []
    for expert_ms in (0.001, 0.5):
        text = Text(curve(range(1, 257), expert_ms), 1, 1.0, match=1.0, share=0.5)
        text.run(AdaptivePolicy(curve(sorted(NODES), expert_ms), 8, 8, FREE), 300)
        sizes.append(np.mean(text.verified[100:]))
    assert sizes[0] > 3.0 and sizes[1] < 0.2


# --- fresh servers of one machine, whose start-up met other disturbances, soon draft the same ----


COUNTS = sorted(NODES)
TRUTH = StepCosts(tuple(COUNTS), (2.9, 3.05, 3.2, 3.4, 4.6, 4.9, 5.6, 11.5, 22.0, 44.0))
"""What steps of one machine take, of an eight-bit model of 135M on two cores."""
SERVERS = 7
BEFORE, AFTER = 800, 3200
"""Tokens of the text until servers are compared, and until they were."""


def started(seed):
    """What start-up measures: a neighbour may slow down all the steps of a size, as when eleven
    servers priced 5 nodes at 4.1 to 8.3 ms and 8 nodes at 5.0 to 7.5.
    """
    random, times = np.random.default_rng(seed), {}
    for nodes, ms in zip(COUNTS, TRUTH.verify_ms, strict=True):
        slow = np.exp(random.uniform(np.log(0.9), np.log(1.8)))
        times[nodes] = (ms * slow * random.normal(1.0, 0.05, 5) / 1000.0).tolist()
    return StepCosts(tuple(COUNTS), estimated_ms(times))


class Prompts:
    """At every place of a text: how likely each token of a chain is, and how many are right."""

    def __init__(self, seed=0):
        random = np.random.default_rng(seed)
        self.shares, self.right = [], []
        for _ in range(AFTER + 9):
            shares = random.uniform(0.2, 0.95, int(random.integers(0, 9)))
            wrong = random.random(len(shares)) >= shares
            self.shares.append(shares)
            self.right.append(int(np.argmax(np.append(wrong, True))))


def decoded(costs, prompts, seed):
    """(tokens per step, milliseconds) of the text after BEFORE tokens, by a server that was told
    these costs; the rest of the noise is that of its steps.
    """
    policy, random = AdaptivePolicy(costs, 8, 8, FREE), np.random.default_rng(1000 + seed)
    place, begun, steps, taken = 0, 0, 0, 0.0
    while place < AFTER:
        decision = policy.decide(*arrays(1))
        allowed = decision.rows[0].nodes
        proposed = [chain(prompts.shares[place])] if allowed else []
        (kept,) = decision.select(proposed) if proposed else (chain([]),)
        said = 1 + min(len(kept), prompts.right[place])
        tokens = [*range(1, said), said if said <= prompts.right[place] else 0]
        ms = float(TRUTH.verify(1 + len(kept)))
        facts = {"allowed": [allowed], "proposed": proposed, "reason": decision.reason}
        noisy = ms * float(random.normal(1.0, 0.05))
        policy.observe(
            report_of([tokens], [len(kept)], noisy, draft_ms=0.1 * (allowed > 0), **facts)
        )
        if place >= BEFORE:
            begun = begun or place
            steps, taken = steps + 1, taken + ms
        place += said
    return (place - begun) / steps, taken / (place - begun)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_fresh_servers_draft_alike(seed):
    """Within 3 % of each other in tokens per step on the same prompts, and in speed."""
    prompts = Prompts(seed)
    drafted = [decoded(started(100 * seed + n), prompts, n) for n in range(SERVERS)]
    for counts in np.array(drafted).T:
        assert counts.max() <= 1.03 * counts.min()
