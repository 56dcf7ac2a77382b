"""Pages that come back from disk, and copied ones within which a text of others goes on, hold what
draft models need: the same text, in as many steps.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.cache.folder import StoreFolder
from forerun.cache.store import PageStore
from forerun.client.completion import complete
from forerun.engine import disk_pages
from forerun.errors import EngineError
from forerun.executors import cpu
from tests.drafters.served import PROMPTS, Cells, requests_for

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
PROMPT, TOKENS, COMMON = PROMPTS[2], 19, 45
PARTS = np.append(PROMPT[:COMMON], PROMPT[::-1])
SLOW = pytest.mark.slow


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
        every = (requests_for([PROMPT], TOKENS, temperature) for _ in range(times))
        done = [complete(engine, requests)[0][0] for requests in every]
        assert engine.fault is None
        return [(one.cached_tokens, one.tokens, one.stats.steps) for one in done]
    finally:
        engine.shutdown()


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
def test_pages_of_a_disk_take_as_many_steps(
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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("executor", "name", "page_size", "within"),
    [
        ("cpu", "EAGLE", 16, True),
        ("cpu", "STANDALONE, itself", 16, True),
        ("cpu", "NEXTN, mimo", 16, True),
        ("cpu", "NEXTN by depth, deepseek", 16, False),
        ("cpu", "DFLASH, both ways", 8, True),
        ("torch", "STANDALONE, itself", 16, True),
        pytest.param("cpu", "ASSISTANT, shared", 16, True, marks=SLOW),
        pytest.param("torch", "EAGLE", 16, True, marks=SLOW),
        pytest.param("torch", "NEXTN by depth, deepseek", 16, False, marks=SLOW),
        pytest.param("torch", "DFLASH, both ways", 8, True, marks=SLOW),
        pytest.param("rounds", "EAGLE", 16, True, marks=SLOW),
        pytest.param("rounds", "STANDALONE, itself", 16, True, marks=SLOW),
        pytest.param("jax", "EAGLE", 16, True, marks=SLOW),
        pytest.param("jax", "STANDALONE, itself", 16, True, marks=SLOW),
        pytest.param("jax", "DFLASH, both ways", 8, True, marks=SLOW),
    ],
)
def test_a_text_within_a_page_of_another_takes_as_many_steps(
    cells, executor, name, page_size, within, temperature
):
    cell = cells(executor, name, page_size=page_size)
    engine = cell.engine(cell.model(), shape=(3, 3, 1))

    def answer(prompt, salt):
        (request,) = requests_for([prompt], TOKENS, temperature, seed=7)
        return complete(engine, [replace(request, cache_salt=salt)])[0][0]

    engine.start()
    try:
        alone, _, parted, whole = [
            answer(prompt, salt)
            for prompt, salt in ((PROMPT, "a"), (PARTS, "b"), (PROMPT, "b"), (PROMPT, "a"))
        ]
        assert engine.fault is None and engine.stats().failed_steps == 0
    finally:
        engine.shutdown()
    known = COMMON - engine.lookahead, len(PROMPT) - 1
    if not within:  # States are there for ends of pages only.
        known = tuple(count // page_size * page_size for count in known)
    assert (alone.cached_tokens, parted.cached_tokens, whole.cached_tokens) == (0, *known)
    for run in (parted, whole):
        assert run.tokens == alone.tokens and run.stats.steps == alone.stats.steps
    if name == "STANDALONE, itself":
        assert alone.stats.steps < TOKENS / 2
