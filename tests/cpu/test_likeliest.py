"""The likeliest ids of many logits, beside those of a sort."""

import numpy as np
import pytest

from forerun.executors.cpu.draft_model import BLOCK, likeliest


@pytest.mark.parametrize("vocab", [5, BLOCK, 40 * BLOCK + 7, 300 * BLOCK + 1])
@pytest.mark.parametrize("count", [1, 2, 64])
def test_they_are_those_of_a_sort(vocab, count):
    """Ties to the lowest id; `coarse` logits have many."""
    random = np.random.default_rng(vocab)
    for coarse in (False, True):
        logits = random.standard_normal((3, vocab)).astype(np.float32)
        logits = np.round(logits) if coarse else logits
        actual = likeliest(logits, count)
        exact = logits.astype(np.float64)
        log_probs = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
        best = np.argsort(-exact, kind="stable")[:, : min(count, vocab)]
        assert np.array_equal(actual.ids, best)
        assert actual.ids.dtype == np.int32
        assert np.allclose(actual.log_probs, np.take_along_axis(log_probs, best, -1), atol=1e-5)


@pytest.mark.parametrize("count", [1, 8])
def test_nan_and_no_rows(count):
    logits = np.zeros((2, 20 * BLOCK), np.float32)
    logits[1, 3] = np.nan
    ids = likeliest(logits, count)
    assert np.isfinite(ids.log_probs[0]).all()
    assert np.isnan(ids.log_probs[1]).all()
    assert likeliest(logits[:0], count).ids.shape == (0, count)
