"""A text that continues within a page of another finds there what its draft model needs: the same
text, in as many steps.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.client.completion import complete
from forerun.executors import cpu
from tests.drafters.served import PROMPTS, Cells, asked

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
PROMPT, TOKENS, COMMON = PROMPTS[2], 19, 45
PARTS = np.append(PROMPT[:COMMON], PROMPT[::-1])
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def cells(kinds, compiled):
    opened = Cells(kinds, compiled)
    yield opened
    opened.close()


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
def test_the_same_in_as_many_steps(cells, executor, name, page_size, within, temperature):
    cell = cells(executor, name, page_size=page_size)
    engine = cell.engine(cell.model(), shape=(3, 3, 1))

    def answers(prompt, salt):
        (request,) = asked([prompt], TOKENS, temperature, seed=7)
        return complete(engine, [replace(request, cache_salt=salt)])[0][0]

    engine.start()
    try:
        alone, _, parted, whole = [
            answers(prompt, salt)
            for prompt, salt in ((PROMPT, "a"), (PARTS, "b"), (PROMPT, "b"), (PROMPT, "a"))
        ]
        assert engine.fault is None and engine.stats().failed_steps == 0
    finally:
        engine.shutdown()
    known = COMMON - engine.lookahead, len(PROMPT) - 1
    if not within:  # States are there for ends of pages only.
        known = tuple(count // page_size * page_size for count in known)
    assert (alone.cached_tokens, parted.cached_tokens, whole.cached_tokens) == (0, *known)
    for found in (parted, whole):
        assert found.tokens == alone.tokens and found.stats.steps == alone.stats.steps
    if name == "STANDALONE, itself":
        assert alone.stats.steps < TOKENS / 2
