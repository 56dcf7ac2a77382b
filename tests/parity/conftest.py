import os
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.executors.torch import TorchExecutor
from forerun.hub.catalog import open_model
from tests.models import tiny
from tests.parity.driver import limits
from tests.parity.heads import Target, learn
from tests.worlds.checkpoints import Checkpoints


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return Checkpoints(tmp_path_factory)


@pytest.fixture(scope="session")
def default_model():
    return open_model("smollm2-135m")


@pytest.fixture(scope="module")
def default_executor(default_model):
    vocab = default_model.architecture.vocab
    made = TorchExecutor(default_model.checkpoint, limits(vocab, pages=48))
    yield made
    made.shutdown()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small target, whose text a head can learn."""
    hf = tiny.model("llama", max_position_embeddings=512, num_hidden_layers=4)
    return tiny.save_folder(hf, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def dense(folder):
    """The same in transformers."""
    return Target(FolderCheckpoint(folder))


class Learned(NamedTuple):
    """A draft head's folder."""

    folder: Path


@pytest.fixture(scope="session")
def learned(dense, tmp_path_factory):
    """A head that has read half of a few of its texts, and the texts; nothing writes to them. The
    first worker that needs them makes them for all (4 s).
    """
    common = tmp_path_factory.getbasetemp()
    common = common.parent if "PYTEST_XDIST_WORKER" in os.environ else common
    draft, texts = common / "learned", common / "learned.npy"
    with (common / "learned.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not texts.exists():
            draft.mkdir(exist_ok=True)
            np.save(texts, learn(dense, draft)[1])
    return Learned(draft), np.load(texts)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """A folder of compiled JAX programs: executors of one shape share them; jax's own variable
    names one that stays from run to run.
    """
    kept = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return kept or str(tmp_path_factory.mktemp("compiled"))


QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""XLA compiles with fewer optimisations, which takes a third of the time, and in one piece."""


@contextmanager
def little_optimised():
    import jax.stages

    compile_ = jax.stages.Lowered.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda self: compile_(self, QUICK))
        yield


@pytest.fixture(scope="module")
def quickly():
    """Programs of this module are compiled with fewer optimisations."""
    with little_optimised():
        yield
