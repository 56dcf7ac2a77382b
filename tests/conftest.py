"""What holds for every test."""

import gc
import os
import sys
from collections import Counter
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest

from tests.workers import fork_workers, say_less

# Small products only: more threads than one would mostly spin while they wait for each other, here
# and in every process that a test starts. Tests that want two threads set them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TESTS = Path(__file__).parent
FIRST = (
    *("acceptance", "drafters", "control", "train", "parity", "parallel"),
    *("fuzz", "constrain", "cli", "cpu", "build"),
)
"""Folders whose files take long, in that order: seconds to half a minute, some of one test.
Files of the others take 4 s at most, but for a few of many tests.
"""

WAITING = "e2e", "dialects"
"""Folders whose tests mostly wait, for clients and limits: handed out among the files of FIRST, so
that the processors have work meanwhile.
"""

if find_spec("hypothesis") is not None:  # Machines that only run tests/gpu have none.
    from hypothesis import HealthCheck, settings

    # No test depends on the clock: neither how long an example takes nor how long it takes to find.
    # The examples are the same in every run; `make test-slow` takes other ones (profile: other).
    settings.register_profile(
        "patient",
        settings.default,
        max_examples=50,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile("other", settings.get_profile("patient"), derandomize=False)
    settings.load_profile("patient")

gc.disable()  # While modules and tests are collected, which all stay.


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Workers are forks of this process."""
    fork_workers(config, specs)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Workers (pytest-xdist) are handed files in this order: one that takes long must not be the
    last, with nothing left for the other workers.
    """
    if hasattr(config, "workerinput"):
        say_less(config)
        counts = Counter(item.path for item in items)
        files = sorted(counts, key=lambda path: (_place(path), -counts[path]))
        waiting = [path for path in files if _folder(path) in WAITING]
        busy = [path for path in files if _folder(path) not in WAITING]
        places = dict(zip(busy, count(), strict=False))
        long = sum(_folder(path) in FIRST for path in busy)
        places |= {path: long * n / len(waiting) for n, path in enumerate(waiting)}
        items.sort(key=lambda item: places[item.path])


def _folder(path):
    return path.relative_to(TESTS).parts[0]


def _place(path):
    folder = _folder(path)
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


def pytest_collection_finish():
    """What is there before the first test is no garbage: searching a million objects for some took
    a fifth of the suite's time.
    """
    gc.freeze()
    gc.set_threshold(5_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Torch's random numbers are those of the test, whichever ran before it in this process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def random():
    return import_module("numpy").random.default_rng(0)


@pytest.fixture(scope="session", autouse=True)
def trusting():
    """Whom HTTP clients trust is read from its file once, not for each of them (30 ms)."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("httpx") is not None:
            patch.setattr(
                "httpx._transports.default.create_ssl_context",
                cache(import_module("httpx").create_ssl_context),
            )
        yield


@pytest.fixture(scope="session", autouse=True)
def packed_once():
    """Equal weights are brought into oneDNN's layout once: many tests open the same small models,
    and how that layout is found takes ten times as long as comparing their numbers (.2 ms).
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.backends.mkldnn.is_available():
        yield
        return
    layers, packed = import_module("forerun.executors.torch.decoder.layers"), {}
    pack = layers.for_products

    def once(weight):
        if weight.numel() > 1 << 16:
            return pack(weight)
        key = tuple(weight.shape), weight.numpy().tobytes()
        if key not in packed:
            if len(packed) == 2_000:
                packed.clear()
            packed[key] = pack(weight)
        return packed[key]

    with pytest.MonkeyPatch.context() as patch:
        # Not torch's own operation: torch.compile reads all operations of torch.
        patch.setattr(layers, "for_products", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def patient():
    """Processes that work are not given up, matchers do not leave the engine's thread nor are kept
    from it, and no less is drafted because a machine is slow or busy: the tests of these limits set
    them.
    """
    if find_spec("llguidance") is None:  # Machines that only run tests/gpu.
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        command = (sys.executable, "-m", "tests.constrain.patient_worker")
        patch.setattr("forerun.constrain.isolation.compile.COMMAND", command)
        patch.setattr("forerun.sandbox.SILENCE", 1000.0)
        patch.setattr("forerun.constrain.matcher.tree_mask.SLOW", 1000.0)
        patch.setattr("forerun.constrain.matcher.jump_forward.PATIENCE", 1000.0)
        patch.setattr("forerun.constrain.matcher.grammar_draft.PATIENCE", 1000.0)
        yield
