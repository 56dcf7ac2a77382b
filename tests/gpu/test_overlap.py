"""Overlap on CUDA: the texts are those without it, and steps really begin early."""

from dataclasses import replace

import pytest

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.executors.torch import TorchExecutor
from tests.parity.heads import Target, learn, opened
from tests.parity.test_overlap import BEST, CHAIN, crowd, requests_for
from tests.worlds.answers import OFF, answered, tokens


@pytest.fixture(scope="module")
def learned(folder, tmp_path_factory):
    dense = Target(FolderCheckpoint(folder("llama", layers=6)))
    return learn(dense, tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def target(folder, learned, device):
    with pytest.MonkeyPatch.context() as patch:
        # Each size is captured when it comes up: the tests below draft in other shapes.
        patch.setattr(TorchExecutor, "warm_up", lambda *_: None)
        target = opened(
            folder("llama", layers=6), learned[0], device, chunked_prefill_size=256, context=128
        )
    yield target
    target.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", [OFF, CHAIN, BEST])
def test_overlap_gives_the_same_texts(target, learned, device, shape, temperature):
    """A near-tie of float32 may fall the other way where a row that has ended runs along."""
    requests = requests_for(learned[1], temperature, (60, 35, 50, 41))
    expected, _ = answered(target, requests, overlap=False, **shape)
    texts, stats = answered(target, requests, overlap=True, **shape)
    same = [one == two for one, two in zip(tokens(texts), tokens(expected), strict=True)]
    assert sum(same) >= 3
    assert (stats.carried > 0.6 * stats.steps) == (device == "cuda")


def test_overlap_with_requests_that_come_and_go(target, learned, device):
    requests = crowd(learned[1])
    expected, _ = answered(target, requests, 3, overlap=False, **CHAIN)
    texts, stats = answered(target, requests, 3, overlap=True, **CHAIN)
    same = [one == two for one, two in zip(tokens(texts), tokens(expected), strict=True)]
    assert sum(same) >= len(same) - 2
    assert (stats.carried > 0) == (device == "cuda")


def test_overlap_survives_a_thousand_steps(target, learned, device):
    """Nothing leaks on the host's side, and two sets of results are enough."""
    requests = [
        replace(request, id=str(n))
        for n, request in enumerate(requests_for(list(learned[1]) * 3, 0.8, [70] * 36))
    ]
    texts, stats = answered(target, requests, overlap=True, **OFF)
    assert [len(output_tokens) for output_tokens in tokens(texts)] == [70] * 36
    assert stats.load.pages_held == 0 and stats.failed_steps == 0
