"""Layers with a window give back what lies behind it, and no text changes: against an engine that
keeps everything.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.build import calibration
from forerun.executors.cpu import CpuExecutor, WindowedCpuExecutor
from tests.engine.drafters import ErraticDrafter
from tests.engine.toys import VOCAB, ask
from tests.engine.window_schedules import (
    BASE,
    Known,
    Schedule,
    answered,
    engine_on,
    reads_what_was_given_back,
    shaped,
)
from tests.parity.driver import Driver, Row

CACHES = {"float32": (None, "same"), "float16": ("Q8_0", "same"), "q8_0": ("Q8_0", "q8_0")}
"""How keys and values are stored: of a file of which kind, and kv_dtype."""


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("gemma3_text", None, vocab_size=VOCAB)


@pytest.fixture
def windowed(source):
    made = []

    def build(of=None, kv_dtype="same", **shape):
        made.append(WindowedCpuExecutor(of or source, shaped(**shape), 1, kv_dtype=kv_dtype))
        return made[-1]

    yield build
    for each in made:
        each.shutdown()


@pytest.mark.parametrize(
    ("cache", "page", "drafts", "seed"),
    [("float32", 16, True, 2), ("float16", 16, False, 1), ("q8_0", 1, True, 0)],
)
def test_any_schedule_meets_the_same_texts(checkpoint, windowed, cache, page, drafts, seed):
    """Of window pages there are too few for all sequences at once, and of pages too."""
    kind, kv_dtype = CACHES[cache]
    source = checkpoint("gemma3_text", kind, vocab_size=VOCAB)
    known = Known(CpuExecutor(source, Known.LIMITS, 1, kv_dtype=kv_dtype))
    executor = windowed(source, page=page, tokens=304, kv_dtype=kv_dtype)
    assert executor.describe()["cache_dtype"] == cache
    drafter = ErraticDrafter(known.following, VOCAB, seed) if drafts else None
    engine = engine_on(executor, drafter)
    Schedule(engine, executor, known, seed).run(16)
    assert engine.stats().preemptions > 0 or page == 1
    assert (engine.stats().acceptance_length > 1.05) == drafts
    known.executor.shutdown()


@pytest.mark.parametrize("page", [1, 16])
def test_a_text_goes_on_where_its_window_is_still_there(windowed, source, page):
    known, executor = Known(CpuExecutor(source, Known.LIMITS, 1)), windowed(page=page, tokens=1408)
    engine, whole = engine_on(executor), 389 // page * page

    def cached(prompt):
        return answered(engine, executor, known, ask("r", prompt, 4))[0]

    assert cached(BASE[:390]) == 0
    assert cached(BASE[:390]) == whole, "its window was not needed by others"
    assert cached(np.append(BASE[:304], BASE[30:50])) < 300, "far behind the window"
    # The prefix index knew these pages already; now they have window pages again.
    assert cached(np.append(BASE[:304], BASE[340:350])) == 304
    cached(BASE[:395][::-1])
    assert cached(BASE[:390]) == whole, "a long text needs its own window alone"
    for length in range(40, 130, 10):
        cached(BASE[:length][::-1])
    assert cached(BASE[:390]) < whole, "others needed it"
    assert cached(BASE[:390]) == whole
    known.executor.shutdown()


def test_long_texts_need_no_more_window_pages(windowed, source):
    """Many windows long, several at once, with pages for one step and two windows alone."""
    known, executor = Known(CpuExecutor(source, Known.LIMITS, 1)), windowed(tokens=1408)
    engine = engine_on(executor)
    asked = [ask(str(n), BASE[n : 390 + n], 60) for n in range(3)]
    assert answered(engine, executor, known, *asked) == [0, 0, 0]
    assert executor.limits.window_pages < 3 * (450 // 16)
    known.executor.shutdown()


@pytest.mark.parametrize("family", ["gemma4_text", "gpt_oss", "exaone4", "mistral", "qwen2"])
def test_layers_of_any_family(checkpoint, windowed, family):
    """Shared keys and values, sinks, windows everywhere: the logits of a long text, bit for bit."""
    changes = {"gemma4_text": {"vocab_size_per_layer_input": VOCAB}}.get(family, {})
    if family in ("mistral", "qwen2"):
        changes = {"sliding_window": 24}
    if family == "qwen2":
        changes |= {"use_sliding_window": True, "max_window_layers": 0}
    source = checkpoint(family, None, vocab_size=VOCAB, **changes)
    kept = CpuExecutor(source, replace(shaped(), window=0, window_pages=0), 1)
    found = []
    for executor in (kept, windowed(source)):
        with Driver(executor) as driver:
            driver.open(0, BASE[:200])
            logits = []
            while driver.sequences[0].kv_len < 230:
                result = driver.step([Row(0, known=20)])
                logits.append(result.logits(0, 0).numpy().copy())
            found.append(np.stack(logits))
    kept.shutdown()
    assert found[0].tobytes() == found[1].tobytes()


def test_what_was_given_back_is_never_read(windowed):
    reads_what_was_given_back(windowed())


def test_steps_are_timed(windowed, monkeypatch):
    """Start-up runs steps behind texts that it computes first."""
    monkeypatch.setattr(calibration, "SECONDS", 0.02)
    executor = windowed(slots=8, windows=8)
    assert calibration.measure_costs(executor).attend_ms >= 0.0
    executor.windows.check()
    assert not executor.capabilities.unwritten
