"""Windows give pages back beside a store, and texts continue behind what was stored of them."""

import numpy as np
import pytest

from forerun.engine import disk_pages
from forerun.errors import EngineError
from forerun.executors.cpu import CpuExecutor, WindowedCpuExecutor
from tests.engine.drafters import ErraticDrafter
from tests.engine.toys import VOCAB, ask
from tests.engine.window_schedules import (
    BASE,
    Known,
    Schedule,
    answered,
    attach_store,
    engine_on,
    shaped,
    stored,
)


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("gemma3_text", None, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def known(source):
    found = Known(CpuExecutor(source, Known.LIMITS, 1))
    yield found
    found.executor.shutdown()


@pytest.fixture
def opened(source, tmp_path, monkeypatch):
    """Makes executors, and engines on them that keep pages in one folder."""
    monkeypatch.setattr(disk_pages, "LEAST_SECONDS", 20.0)
    made, engines = [], []

    def build(executor=None, drafter=None, least=40, **shape):
        if executor is None:
            made.append(WindowedCpuExecutor(source, shaped(**shape), 1))
            executor = made[-1]
        for engine in engines:
            engine.shutdown()
        engines.append(engine_on(executor, drafter))
        attach_store(engines[-1], executor, tmp_path / "kv", least)
        return executor, engines[-1]

    yield build
    for each in (*engines, *made):
        each.shutdown()


def cached(engine, executor, known, prompt, count=4):
    """Tokens that were found of a prompt whose answer is as it should be."""
    return answered(engine, executor, known, ask("r", prompt, count))[0]


@pytest.mark.parametrize("page", [1, 16])
def test_a_restart_continues_behind_the_last_window(opened, known, page):
    executor, engine = opened(page=page, tokens=1408)
    whole = 389 // page * page
    assert cached(engine, executor, known, BASE[:390]) == 0
    windows = {*executor.windows.needed(390 // page), *executor.windows.needed(whole // page)}
    assert stored(engine) == (390 // page, len(windows))
    for where in (None, executor):
        executor, engine = opened(where, page=page, tokens=1408)
        assert cached(engine, executor, known, BASE[:390]) == whole
        assert engine.stats().store.hits == 1
    # In the middle of it no window is left, not even on disk.
    executor, engine = opened(page=page, tokens=1408)
    assert cached(engine, executor, known, np.append(BASE[:200], [120] * 9)) == 0
    stored(engine)
    # Where texts part there is one from now on.
    executor, engine = opened(page=page, tokens=1408)
    assert cached(engine, executor, known, np.append(BASE[:200], [121] * 9)) == 200 // page * page


def test_windows_come_back_to_pages_in_memory(opened, known):
    executor, engine = opened(tokens=1408)
    cached(engine, executor, known, BASE[:390])
    stored(engine)
    for length in range(40, 130, 10):
        cached(engine, executor, known, BASE[:length][::-1])
    before = engine.stats().store
    assert cached(engine, executor, known, BASE[:390]) == 384
    after = engine.stats().store
    assert after.hits == before.hits + 1, "others needed its window pages"
    assert after.read_bytes - before.read_bytes == 2 * executor.pages.window_page_bytes


def test_damaged_windows_are_misses(opened, known, tmp_path):
    executor, engine = opened(tokens=1408)
    cached(engine, executor, known, BASE[:390])
    stored(engine)
    engine.shutdown()
    (path,) = (tmp_path / "kv").glob("*/*.windows")
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    executor, engine = opened(tokens=1408)
    assert cached(engine, executor, known, BASE[:390]) == 0
    assert engine.stats().store.misses == {"corrupt": 1}
    stored(engine)
    executor, engine = opened(tokens=1408)
    assert cached(engine, executor, known, BASE[:390]) == 384  # It was written again.


@pytest.mark.parametrize(("seed", "drafts"), [(0, False), (1, True)])
def test_any_schedule_meets_the_same_texts_after_restarts(opened, known, seed, drafts):
    """Of window pages there are too few; a pool's pages begin another life with each engine."""
    executor, hits = None, 0
    for _ in range(4):
        drafter = ErraticDrafter(known.following, VOCAB, seed) if drafts else None
        executor, engine = opened(executor, drafter, tokens=496, least=16)
        Schedule(engine, executor, known, seed).run(12)
        stored(engine)
        hits += engine.stats().store.hits
    assert hits > 4


def test_window_pages_that_do_not_exist(opened):
    pages = opened()[0].pages.contents
    with pytest.raises(EngineError, match="no such page"):
        pages.read_window_page(10**6)
    with pytest.raises(EngineError, match="are not a window page of"):
        pages.write_window_page(0, b"x")
