"""Same sequence, same bits: alone, in any batch, tree, chunks, pages and number of threads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.executors.cpu import CpuExecutor
from tests.models import tiny
from tests.parity.driver import limits, scored
from tests.parity.test_torch_invariance import Interleaved, plain_text


class KeepingExecutor(CpuExecutor):
    """Of every step a copy of the logits is kept."""

    def finish(self, round, masks=None):
        outcome = super().finish(round, masks)
        kept = {node: self._logits_of(node).copy() for node in scored(self)}
        round.logits_of = kept.__getitem__
        return outcome


FAMILIES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "olmo2", "qwen3_5_text", "lfm2")
CHANGES = {"qwen3_5_text": {"linear_value_head_dim": 16}}
"""So that rows are whole blocks."""
IN_BLOCKS = {"llama, q8_0": "llama", "qwen3, q8_0": "qwen3"}
"""With keys and values in blocks."""
PLACES = [(1, 1), (16, 2), (256, 3)]
"""Page size and threads."""


@pytest.fixture(scope="module")
def executors(checkpoint):
    made = {
        (family, page_size): KeepingExecutor(
            checkpoint(IN_BLOCKS.get(family, family), "Q4_1", **CHANGES.get(family, {})),
            limits(tiny.VOCAB, page_size=page_size, pages=2048 // page_size),
            threads,
            kv_dtype="q8_0" if family in IN_BLOCKS else "same",
        )
        for family in (*FAMILIES, *IN_BLOCKS)
        for page_size, threads in PLACES
    }
    yield made
    for each in made.values():
        each.shutdown()


@pytest.fixture(scope="module")
def texts(executors):
    random = np.random.default_rng(1)
    return {
        family: [
            plain_text(executors[family, 1], random.integers(0, tiny.VOCAB, n), 40, n)
            for n in (150, 7, 110, 60)
        ]
        for family in (*FAMILIES, *IN_BLOCKS)
    }


@settings(max_examples=12)
@given(
    family=st.sampled_from((*FAMILIES, *IN_BLOCKS)),
    page_size=st.sampled_from([size for size, _ in PLACES]),
    rows=st.integers(1, 4),
    seed=st.integers(0, 1 << 32),
)
def test_any_journey_meets_the_same_bits(executors, texts, family, page_size, rows, seed):
    journey = Interleaved(executors[family, page_size], texts[family][:rows], seed)
    assert journey.compared >= sum(len(text.logits) for text in texts[family][:rows])


def test_journeys_accept_guesses(executors, texts):
    assert Interleaved(executors["llama", 16], texts["llama"], 5).accepted > 20


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model(default_model):
    random = np.random.default_rng(4)
    vocab = default_model.architecture.vocab
    executor = KeepingExecutor(default_model.checkpoint, limits(vocab, pages=48), 2)
    texts = [
        plain_text(executor, random.integers(0, vocab, n), 10, n, chunk)
        for n, chunk in ((125, 125), (9, 1))
    ]
    journey = Interleaved(executor, texts, 0)
    executor.shutdown()
    assert journey.compared >= sum(len(text.logits) for text in texts)
