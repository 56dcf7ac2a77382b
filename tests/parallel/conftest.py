import sys

import pytest

from forerun.executors.torch.parallel import processes
from tests.forked import Nursery


@pytest.fixture(scope="session")
def nursery():
    """It has imported what ranks import."""
    made = Nursery("tests.parallel.captured_rank")
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def forks(nursery):
    """Ranks are forks, which saves 2 s each. Those of a server (test_server.py) and of a program of
    its own (test_failure.py, ALONE) begin by their command line.
    """
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            nursery.forking(processes, patch)
        yield
