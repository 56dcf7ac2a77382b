import pytest

from forerun.executors.cpu import CpuExecutor, available
from forerun.hub.catalog import open_model
from tests.parity.driver import limits
from tests.worlds.checkpoints import Checkpoints


@pytest.fixture(scope="session", autouse=True)
def compiled():
    """These tests are of the compiled core: a machine without it has nothing to test here."""
    if reason := available():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return Checkpoints(tmp_path_factory, "Q8_0")


@pytest.fixture
def executor(checkpoint):
    """Executors that are shut down at the end of the test."""
    made = []

    def build(source=None, threads=1, kernels="", kv_dtype="same", **changes):
        source = source or checkpoint()
        vocab = source.architecture.vocab
        made.append(
            CpuExecutor(source, limits(vocab, **changes), threads, kernels, kv_dtype=kv_dtype)
        )
        return made[-1]

    yield build
    for each in made:
        each.shutdown()


@pytest.fixture(scope="session")
def default_model():
    return open_model("smollm2-135m")
