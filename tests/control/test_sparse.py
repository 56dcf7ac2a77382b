"""Speculation on a sparse model: a step costs what it reads of the experts that its nodes touch, so
the second node costs most and later ones less and less. No clock: steps take what the curve says.
"""

import numpy as np
import pytest

from forerun.build.calibration import NODES, estimated_ms
from forerun.control.adaptive import AdaptivePolicy
from forerun.control.step_costs import StepCosts
from tests.control.steps import FREE, Text
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
    told = curve(sorted(NODES), expert_ms)
    text = Text(curve(range(1, 257), expert_ms), rows, 1.0, share=acceptance)
    assert text.run(AdaptivePolicy(told, 8, 8, FREE), 300).over_plain() >= 0.97


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
