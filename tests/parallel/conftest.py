import pytest

from forerun.executors.torch.parallel import processes
from tests.forked import ForkServer
from tests.models import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_folder(tiny.model("llama"), tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def nursery():
    """It has imported what ranks import."""
    with ForkServer("tests.parallel.captured_rank") as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def forks(nursery):
    """Ranks are forks, which saves 2 s each. Those of a server (test_server.py) and of a program of
    its own (test_failure.py, ALONE) begin by their command line.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "subprocess", nursery.subprocess())
        yield
