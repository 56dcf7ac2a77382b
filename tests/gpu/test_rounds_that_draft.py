"""Draft models other than EAGLE heads within captured rounds on CUDA: prediction layers, whole
models and block drafters draft there as they do when asked pass by pass.
"""

import pytest

from forerun.build.target import open_target
from forerun.executors.torch import TorchExecutor
from tests.parity.test_rounds_that_draft import SHAPES, asked
from tests.worlds.answers import answered, counts, plain, tokens
from tests.worlds.draft_models import BLIND, configured, make

FEW = "NEXTN, by depth", "STANDALONE", "DFLASH"
METHODS = *FEW, "NEXTN", "STANDALONE, windows", "DFLASH, causal", "DSpark", "DFlash2"
CELLS = [
    *((method, "tree", temperature) for method in METHODS for temperature in (0.0, 0.8)),
    *((method, "chain", 0.8) for method in FEW),
]
"""Method, shape and temperature."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def targets(made, device):
    """By method: with captured rounds, each size when it first comes up, and without them."""
    opened = {}

    def of(method):
        if method not in opened:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TorchExecutor, "warm_up", lambda *_: None)
                opened[method] = [
                    open_target(
                        configured(made, method, 16, device=device, disable_cuda_graph=eager)
                    )
                    for eager in (False, True)
                ]
        return opened[method]

    yield of
    for target in (each for pair in opened.values() for each in pair):
        target.close()


def drafted(target):
    """Whether rounds of this target have grown trees."""
    return any(levels for _, _, levels, *_ in target.executor.describe().get("captured", ()))


@pytest.mark.parametrize(("method", "shape", "temperature"), CELLS)
def test_draft_models_in_rounds_propose_as_alone(targets, device, method, shape, temperature):
    """Texts and accepted draft tokens; a near-tie of target or draft is forgiven."""
    rounds, eager = targets(method)
    requests = asked(temperature)
    (found, _), (expected, _) = (
        answered(each, requests, 3, **SHAPES[shape]) for each in (rounds, eager)
    )
    assert drafted(rounds) == (device == "cuda") and not drafted(eager)
    same = [a == b for a, b in zip(tokens(found), tokens(expected), strict=True)]
    assert sum(same) >= len(requests) - 1
    without = [a == b for a, b in zip(tokens(expected), plain(eager, requests), strict=True)]
    assert sum(without) >= len(requests) - 1
    accepted = [sum(each for _, each in counts(heard)) for heard in (found, expected)]
    assert abs(accepted[0] - accepted[1]) <= 0.05 * accepted[1] + 2
    assert accepted[1] > 5 or (method in BLIND and not temperature)


@pytest.mark.parametrize("method", FEW)
def test_draft_models_with_overlap(targets, device, method):
    """What a draft model leaves on the device for the next round is what it left for the host."""
    rounds, eager = targets(method)
    requests = asked(0.8)
    expected, _ = answered(eager, requests, 3, **SHAPES["tree"])
    found, stats = answered(rounds, requests, 3, overlap=True, **SHAPES["tree"])
    same = [a == b for a, b in zip(tokens(found), tokens(expected), strict=True)]
    assert sum(same) >= len(requests) - 1
    assert (stats.carried > 0.3 * stats.steps) == (device == "cuda")
