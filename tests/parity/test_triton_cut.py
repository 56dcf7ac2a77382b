"""The kernel of min_p, top_k and top_p, interpreted on the CPU, against the twin that sorts."""

import numpy as np
import pytest
import torch

from forerun.executors.torch.shaping import cut
from tests.parity.cuts import mixed, shaping_of
from tests.parity.interpreted import load

cutting = load("triton_cut")


@pytest.mark.parametrize(
    "vocab, scale", [(1, 1), (7, 1), (50, 3), (1001, 4), (9001, 1), (9001, 8), (20000, 0.2)]
)
def test_kept_are_the_twins(vocab, scale):
    random = np.random.default_rng(vocab)
    asked = mixed(vocab)
    for ties in (False, True):
        logits = (random.normal(size=(len(asked), 2, vocab)) * scale).astype(np.float32)
        if ties:
            logits = np.round(logits)
            logits[:, 0] *= -0.0 if scale == 0.2 else 1.0  # All are one tie, of both zeros.
        logits[:, 1, random.random(vocab) < 0.5] = -np.inf
        logits[:, 1, 0] = 0.5
        logits = torch.from_numpy(logits)
        shaping = shaping_of(asked, 2)
        assert torch.equal(cutting.cut(logits, shaping), cut(logits, shaping))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_node_without_a_token_keeps_none():
    logits = torch.full((2, 1, 40), -torch.inf)
    shaping = shaping_of([(1.0, 0.1, 5, 0.9), (1.0, 0.0, 40, 0.9)], 1)
    assert (cutting.cut(logits, shaping) == -torch.inf).all()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_trouble_ends():
    """What is not finite has no choice, whatever is left of it."""
    logits = torch.zeros(3, 1, 40)
    logits[0, 0, 3], logits[1, 0, 4], logits[2] = torch.nan, torch.inf, torch.nan
    shaping = shaping_of([(1.0, 0.1, 5, 0.9)] * 3, 1)
    assert cutting.cut(logits, shaping).shape == logits.shape
