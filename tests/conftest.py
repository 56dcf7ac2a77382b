"""What holds for every test."""

import gc
import os
from importlib.util import find_spec

import pytest

# Small products only: more threads than one would mostly spin while they wait for each other, here
# and in every process that a test starts. Whoever wants two threads sets them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

gc.disable()  # While modules and tests are collected, which all stay.


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
