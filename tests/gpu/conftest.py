"""Everything here needs a CUDA device, and says so where there is none.

`pytest tests/gpu --rehearse` runs the same tests on the CPU: no minute of a lent device should be
spent on a typo.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from tests.models import tiny

HERE = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption("--rehearse", action="store_true", help="run tests/gpu on the CPU")
    parser.addoption("--outcomes", type=Path, help="write what became of every test, as JSON")


def pytest_configure(config):
    path = config.getoption("--outcomes", default=None)
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(path))


class Outcomes:
    """By test: passed, failed or skipped, and seconds; written after each, should time run out."""

    def __init__(self, path):
        self.path, self.outcomes = path, {}

    def pytest_runtest_logreport(self, report):
        seen = self.outcomes.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        seen["seconds"] += report.duration
        if report.outcome != "passed":
            seen |= {"outcome": report.outcome, "why": str(report.longrepr)[-2000:]}
        if report.when == "teardown":
            self.path.write_text(json.dumps(self.outcomes, indent=1) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A bad memory access on the device ends every later call of its process: leave such a worker
    of pytest-xdist, which starts another, and say why on stderr.
    """
    report = yield
    worker = hasattr(item.config, "workerinput")
    if worker and HERE in item.path.parents and report.failed and not answers():
        sys.__stderr__.write(f"{item.nodeid}: the device's context is lost\n{report.longrepr}\n")
        sys.__stderr__.flush()
        os._exit(1)
    return report


def answers():
    """Whether this process can still use its device."""
    try:
        torch.cuda.is_available() and torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def rehearsed(config):
    return config.getoption("--rehearse", default=False)


def pytest_collection_modifyitems(config, items):
    missing = not (rehearsed(config) or torch.cuda.is_available())
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device here"))


@pytest.fixture(scope="session")
def device(request):
    return "cpu" if rehearsed(request.config) else "cuda"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    made = {}

    def build(family="llama", layers=2):
        if (family, layers) not in made:
            hf = tiny.model(family, max_position_embeddings=512, num_hidden_layers=layers)
            made[family, layers] = tiny.save_folder(hf, tmp_path_factory.mktemp(family))
        return made[family, layers]

    return build


@pytest.fixture(scope="session")
def checkpoint(folder):
    layers = dict.fromkeys((*tiny.DELTAS, *tiny.CONVOLUTIONS), 4)  # One of them attends.
    return lambda family="llama": FolderCheckpoint(folder(family, layers.get(family, 2)))
