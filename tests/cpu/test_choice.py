"""The native choice is the specification's choice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.executors.cpu import CpuExecutor, native
from forerun.executors.host import EXCLUDED
from forerun.spec.accept import choose
from forerun.spec.sampling import History, Sampling, process
from tests.models import tiny
from tests.parity.driver import Driver, Row, limits

EMPTY = History(np.zeros(1, np.int32), 1)


@pytest.fixture(params=["", "portable"])
def native_choice(request, executor, checkpoint):
    """(logits, sampling, position) -> token, or -1."""
    made = {}

    def call(logits, sampling, position):
        if len(logits) not in made:
            changes = {"vocab_size": len(logits), "num_hidden_layers": 1}
            source = checkpoint("llama", None, **changes)
            made[len(logits)] = executor(source, kernels=request.param)
        logits = np.ascontiguousarray(logits, np.float32)
        return native.load().forerun_choose(
            made[len(logits)]._alive(),
            logits.ctypes.data,
            sampling.temperature,
            sampling.seed & 0xFFFFFFFFFFFFFFFF,
            position,
        )

    return call


def expected(logits, sampling, position):
    return choose(process(np.asarray(logits, np.float32), sampling, EMPTY), sampling, position)


@pytest.mark.parametrize("vocab", [320, 331, 1003])
@pytest.mark.parametrize("temperature", [0.0, 0.05, 0.8, 1.0, 3.0])
def test_same_token(native_choice, random, vocab, temperature):
    for spread in (0.01, 1.0, 10.0):
        for seed in range(40):
            logits = random.normal(0, spread, vocab).astype(np.float32)
            sampling = Sampling(temperature=temperature, seed=seed * 0x123456789ABCDEF)
            position = int(random.integers(0, 1 << 20))
            found = native_choice(logits, sampling, position)
            assert found == expected(logits, sampling, position)


@pytest.mark.parametrize("temperature", [1e-4, 0.8, 3.0])
def test_excluded_tokens_are_never_chosen(native_choice, random, temperature):
    """As the host sampler lowers what a grammar forbids."""
    for seed in range(60):
        logits = random.normal(0, 5, 1003).astype(np.float32)
        allowed = random.random(1003) < random.choice([0.01, 0.5, 0.99])
        sampling = Sampling(temperature=temperature, seed=seed)
        mask = np.packbits(np.append(allowed, np.zeros(21, np.bool_)), bitorder="little")
        processed = process(logits, sampling, EMPTY, (), mask.view(np.uint32))
        found = native_choice(np.where(allowed, logits, EXCLUDED), sampling, 7)
        assert found == choose(processed, sampling, 7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_go_to_the_lowest_id(native_choice, random, temperature):
    for seed in range(60):
        logits = random.integers(-2, 2, 331).astype(np.float32)
        sampling = Sampling(temperature=temperature, seed=seed)
        assert native_choice(logits, sampling, 3) == expected(logits, sampling, 3)


@pytest.mark.parametrize("place", [0, 7, 319, 330])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_left_to_the_specification(native_choice, random, place, bad):
    logits = random.normal(0, 1, 331).astype(np.float32)
    logits[place] = bad
    for temperature in (0.0, 1.0):
        assert native_choice(logits, Sampling(temperature=temperature), 0) == -1


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, (1 << 64) - 1), temperature=st.sampled_from([0.3, 1.0, 1.7]))
def test_generated_text_is_the_same(small, seed, temperature):
    """A whole generation with the native choice and one with the specification's."""
    texts = []
    for choose_fast in (small._choose, None):
        small._sampler._choose_fast = choose_fast
        with Driver(small) as driver:
            driver.open(0, [5, 6, 7], Sampling(temperature=temperature, seed=seed))
            for _ in range(12):
                driver.step([Row(0)])
            texts.append(driver.sequences[0].tokens)
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def small(checkpoint):
    made = CpuExecutor(checkpoint(), limits(tiny.VOCAB), 1)
    yield made
    made.shutdown()
