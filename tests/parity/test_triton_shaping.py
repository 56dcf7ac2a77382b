"""The kernels of sampling parameters, interpreted on the CPU, against their references."""

import numpy as np
import pytest
import torch

from forerun.executors.torch.shaping import STOP, cut, shaped
from tests.parity.cuts import mixed, shaping_of
from tests.parity.interpreted import load

kernels = load("triton.triton_shaping")


@pytest.mark.parametrize(
    "vocab, scale",
    [
        *((1, 1), (7, 1), (2000, 0.2)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((50, 3), (1001, 4), (9001, 1), (9001, 8), (20000, 0.2))
        ),
    ],
)
def test_kept_are_the_references(vocab, scale):
    """Every second setting, of large vocabularies each the other ones; of one token
    hardly anything can be kept or left.
    """
    random = np.random.default_rng(vocab)
    settings = mixed(vocab)
    settings = settings[:: 4 if vocab == 1 else 2] if vocab < 100 else settings[vocab % 2 :: 2]
    for ties in (False, True):
        logits = (random.normal(size=(len(settings), 2, vocab)) * scale).astype(np.float32)
        if ties:
            logits = np.round(logits)
            logits[:, 0] *= -0.0 if scale == 0.2 else 1.0  # All are one tie, of both zeros.
        logits[:, 1, random.random(vocab) < 0.5] = -np.inf
        logits[:, 1, 0] = 0.5
        logits = torch.from_numpy(logits)
        shaping = shaping_of(settings, 2, vocab)
        assert torch.equal(kernels.cut(logits, shaping), cut(logits, shaping))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_node_without_a_token_keeps_none():
    logits = torch.full((2, 1, 40), -torch.inf)
    shaping = shaping_of([(1.0, 0.1, 5, 0.9), (1.0, 0.0, 40, 0.9)], 1, 40)
    assert (kernels.cut(logits, shaping) == -torch.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_logits_are_shaped_as_by_the_reference(masked):
    """Of one chunk test_shaped_choices.py holds them to the host's rule always."""
    random = np.random.default_rng(1)
    for vocab in (60, 5000):  # One part, not full; two.
        settings = mixed(vocab)[::2]
        logits = random.normal(size=(len(settings), 3, vocab)).astype(np.float32) * 3
        shaping, allowed = shaping_of(settings, 3, vocab), None
        if masked:
            allowed = random.random(logits.shape) < 0.3
            allowed[..., 0] = True
            allowed[4] = (shaping.history[shaping.slots[4].item()] & STOP > 0).numpy()
            allowed = torch.from_numpy(allowed)
        given = torch.from_numpy(logits), shaping, allowed
        expected = shaped(*given)
        assert (expected > -torch.inf).any(-1).all() and not torch.equal(expected, given[0])
        assert torch.equal(kernels.shaped(*given), expected)
