"""Pages that come back from disk hold what draft models need: the same text, in as many steps."""

import numpy as np
import pytest

from forerun.cache.folder import StoreFolder
from forerun.cache.store import PageStore
from forerun.client.completion import complete
from forerun.engine import disk_pages
from forerun.errors import EngineError
from forerun.executors import cpu
from tests.drafters.served import PROMPTS, Cells, asked

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
PROMPT = PROMPTS[2]


@pytest.fixture(scope="module")
def cells(kinds, compiled):
    opened = Cells(kinds, compiled)
    yield opened
    opened.close()


def answers(cell, store, temperature, times, **changes):
    """(cached tokens, tokens, steps) of the prompt, asked in turn, by an engine of its own, which
    finds other pages in the executor's memory than the one before it left.
    """
    pages = cell.target.executor.pages
    for page in range(cell.target.executor.limits.pages):
        pages.write_page(page, bytes(pages.page_bytes))
    engine = cell.engine(cell.model(), **changes)
    size = cell.target.config.page_size
    engine.attach_store(
        PageStore(
            StoreFolder(store, 1 << 30), "x", 4 * (size + engine.lookahead), pages.page_bytes
        ),
        least=16,
    )
    engine.start()
    try:
        done = [complete(engine, asked([PROMPT], 19, temperature))[0][0] for _ in range(times)]
        assert engine.fault is None
        return [(one.cached_tokens, one.tokens, one.stats.steps) for one in done]
    finally:
        engine.shutdown()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("executor", "name", "page_size", "temperature"),
    [
        ("cpu", "EAGLE", 8, 0.0),
        ("cpu", "EAGLE", 1, 0.8),
        ("cpu", "STANDALONE, first layers", 16, 0.8),
        ("cpu", "NEXTN, mimo", 16, 0.8),
        ("cpu", "NEXTN by depth, deepseek", 4, 0.8),
        ("torch", "STANDALONE, first layers", 16, 0.0),
        pytest.param("torch", "NEXTN by depth, deepseek", 4, 0.8, marks=SLOW),
        pytest.param("torch", "EAGLE", 1, 0.8, marks=SLOW),
        pytest.param("torch", "DFLASH, both ways", 8, 0.8, marks=SLOW),
        pytest.param("rounds", "EAGLE", 8, 0.8, marks=SLOW),
        pytest.param("rounds", "NEXTN by depth, deepseek", 4, 0.8, marks=SLOW),
    ],
)
def test_the_same_in_as_many_steps(
    cells, tmp_path, monkeypatch, executor, name, page_size, temperature
):
    monkeypatch.setattr(disk_pages, "LEAST_SECONDS", 10.0)
    cell = cells(executor, name, page_size=page_size)
    new, known = answers(cell, tmp_path, temperature, 2, shape=(3, 3, 1))
    (after,) = answers(cell, tmp_path, temperature, 1, shape=(3, 3, 1))
    assert after[1:] == known[1:] and new[0] == 0
    # In memory are pages of its answer, too, of which one begins as the prompt ends.
    assert after[0] == (len(PROMPT) - 1) // page_size * page_size <= known[0]
    assert np.array_equal(new[1], after[1])
    (plain,) = answers(cell, tmp_path / "plain", temperature, 1)
    assert np.array_equal(plain[1], after[1])


def test_a_page_that_does_not_exist(cells):
    pages = cells("cpu", "EAGLE", page_size=8).target.executor.pages
    with pytest.raises(EngineError, match="no such page"):
        pages.read_page(10**6)
    with pytest.raises(EngineError, match="are not a page of"):
        pages.write_page(0, b"x")
