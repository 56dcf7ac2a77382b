"""Never slower than plain decoding, and close to the best fixed shape, on the device of device.py:
the real policy and drafters, a clock that counts what an H100's steps take.
"""

from functools import cache

import numpy as np
import pytest

from forerun.control.adaptive import AdaptivePolicy
from forerun.control.policy import FixedPolicy
from forerun.control.step_costs import StepCosts
from forerun.interface.drafter import DrafterTraits
from tests.control.device import (
    HOST,
    LEVEL,
    NODE,
    ROUND,
    ROW_HOST,
    ROW_LEVEL,
    HeadDevice,
    PlainDevice,
    TextDevice,
)

HEADS = [(0.03, 0.1), (0.2, 0.3), (0.4, 0.5), (0.7, 0.7)]
"""How often the first draft token of a row is right, and every further one."""
CHANGES = [
    [(0.03, 0.1), (0.7, 0.7)],
    [(0.7, 0.7), (0.03, 0.1)],
    [(0.4, 0.5), (0.03, 0.1), (0.4, 0.5)],
]
ROWS = [1, 16, pytest.param(64, marks=pytest.mark.slow)]
FIRST, THEN = 200, 400
"""Steps in which the policy learns, and those after them."""


def startup(in_round):
    """What start-up measures of this device: steps that are not carried, eight nodes a row."""
    counts = (1, 2, 3, 4, 5, 6, 8, 16, 32, 64)
    ms = []
    for nodes in counts:
        rows = -(-nodes // 8)
        ms.append(ROUND + NODE * rows * (nodes // rows) + HOST + ROW_HOST * rows)
    level = (LEVEL + ROW_LEVEL) * in_round
    steady = tuple(np.maximum.accumulate(ms).tolist())
    return StepCosts(counts, steady, draft_ms=level, follow_ms=level, in_round=in_round)


def adaptive():
    traits = DrafterTraits("head", 3, needs_features=True)
    return AdaptivePolicy(startup(in_round=True), 3, 3, traits)


def ran(device, *text):
    """(tokens per ms of all steps, of those after the first 200)."""
    device.run(FIRST, *text)
    late = device.run(THEN, *text)
    return device.tokens / device.ms, late


@cache
def plain(rows, text):
    return ran(PlainDevice(FixedPolicy(0, 0), rows), *text)[1]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("rows", ROWS)
def test_a_head_is_never_slower_than_none_and_close_to_the_best_shape(rows, head):
    fixed = [ran(HeadDevice(FixedPolicy(depth, depth), rows), *head)[1] for depth in (1, 3)]
    device = HeadDevice(adaptive(), rows)
    whole, late = ran(device, *head)
    assert whole >= 0.97 * plain(rows, head)
    assert late >= 0.95 * max(plain(rows, head), *fixed)
    assert device.captures == 0, "only what was declared runs"


@pytest.mark.parametrize("texts", CHANGES)
@pytest.mark.parametrize("rows", ROWS)
def test_a_head_whose_text_changes_is_never_slower_than_none(rows, texts):
    device, alone = HeadDevice(adaptive(), rows), PlainDevice(FixedPolicy(0, 0), rows)
    for head in texts:
        device.run(FIRST + THEN, *head)
        alone.run(FIRST + THEN, *head)
    assert device.tokens / device.ms >= 0.97 * alone.tokens / alone.ms
    assert device.captures == 0


@pytest.mark.parametrize("repeats", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", ROWS)
def test_ngrams_are_never_slower_than_none(rows, repeats):
    """They are looked up on the host, so that a step that may have some is not carried."""
    traits = DrafterTraits("ngram", 8, free=True)
    device = TextDevice(AdaptivePolicy(startup(in_round=False), 3, 3, traits), rows)
    whole, late = ran(device, repeats)
    assert min(whole, late) >= 0.97 * plain(rows, (0.0, 0.0))
    if repeats == 0.9 and rows < 64:
        assert late >= 0.95 * ran(TextDevice(FixedPolicy(3, 3), rows), repeats)[1]
