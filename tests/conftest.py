"""What holds for every test."""

import gc
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

# Small products only: more threads than one would mostly spin while they wait for each other, here
# and in every process that a test starts. Whoever wants two threads sets them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

TESTS = Path(__file__).parent
LONGEST = (
    "train/test_served_head.py",
    "drafters/test_contract.py",
    "parity/test_triton_shaping.py",
    "parity/test_rounds_that_draft.py",
    "parity/test_compile_ahead.py",
    "control/test_promise.py",
    "cli/test_fuzz.py",
    "constrain/test_pure_masks.py",
    "parity/test_torch_invariance.py",
    "parity/test_eagle_heads.py",
    "parity/test_torch_drafting.py",
    "e2e/test_two_processes.py",
    "parity/test_triton_attention.py",
    "acceptance/test_default_draft.py",
    "e2e/test_streams.py",
)
"""Files that take longest, in that order, by the durations of a whole run (docs/log.md)."""

gc.disable()  # While modules and tests are collected, which all stay.


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Workers (pytest-xdist) are handed files in this order: one that takes long must not be the
    last, with nothing left for the other worker. Behind LONGEST those with the most tests.
    """
    if hasattr(config, "workerinput"):
        counts = Counter(item.path for item in items)
        counts |= {TESTS / name: 10_000 - at for at, name in enumerate(LONGEST)}
        items.sort(key=lambda item: -counts[item.path])


def pytest_collection_finish():
    """What is there before the first test is no garbage: searching a million objects for some took
    a fifth of the suite's time.
    """
    gc.freeze()
    gc.set_threshold(5_000)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def patient():
    """Processes that work are not given up, matchers do not leave the engine's thread, and no less
    is drafted because a machine is slow or busy: the tests of these limits set them.
    """
    if find_spec("llguidance") is None:  # Machines that only run tests/gpu.
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.sandbox.SILENCE", 1000.0)
        patch.setattr("forerun.constrain.matcher.tree_mask.SLOW", 1000.0)
        patch.setattr("forerun.constrain.matcher.jump_forward.PATIENCE", 1000.0)
        patch.setattr("forerun.constrain.matcher.grammar_draft.PATIENCE", 1000.0)
        yield
