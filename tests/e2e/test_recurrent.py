"""Models whose layers have recurrent states (Qwen3-Next, Qwen3.5, LFM2): no text depends on
speculation, trees, company, preemption or what others have left in the prefix cache.
"""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from forerun.build.registry import choose_executor
from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import ConfigError, ModelError
from forerun.executors import cpu
from forerun.executors.cpu import CpuExecutor
from forerun.executors.torch import TorchExecutor
from forerun.measure.prove import Trial, prove
from tests.drafters.prediction import with_layers
from tests.e2e.test_equality_matrix import (
    PROMPTS,
    hints,  # noqa: F401 - a fixture
    proved,
)
from tests.models import tiny
from tests.parity.heads import Target, Twin
from tests.worlds.configs import small

TRIAL = Trial(PROMPTS[-4:], tokens=20, temperatures=(0.0, 1.0), group=4, mixed=True)


ON = {"torch": "qwen3_next", "cpu": "qwen3_5_text"}
"""Executor -> the family that it is tried with."""
CONVOLUTION = "lfm2"
"""And this on both."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    deep = {"num_hidden_layers": 6, "layer_types": ["conv", "full_attention", "conv"] * 2}
    made = {family: tiny.model(family) for family in ON.values()}
    made[CONVOLUTION] = tiny.model(CONVOLUTION, **deep)  # A head reads three layers.
    return {
        family: tiny.save_folder(hf, tmp_path_factory.mktemp(family)) for family, hf in made.items()
    }


@pytest.fixture(scope="module")
def folder(folders):
    return folders["qwen3_next"]


@pytest.fixture(scope="module")
def layered(tmp_path_factory):
    """With a random prediction layer under Qwen's names."""
    return {
        family: layered_folder(family, tmp_path_factory.mktemp("layered")) for family in ON.values()
    }


def layered_folder(family, folder):
    hf = tiny.model(family)
    torch.manual_seed(3)
    made = type(hf.model.layers[-1])(hf.config, hf.config.num_hidden_layers - 1)
    made.apply(hf._init_weights)  # Experts are empty memory before.
    width = hf.config.hidden_size
    own = *(0.2 * torch.randn(width) for _ in range(3)), torch.randn(width, 2 * width) / 8
    return with_layers(hf, [(made, *own)], folder, "qwen3-next")


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return tiny.save_folder(tiny.model("llama"), tmp_path_factory.mktemp("draft"))


def configured(folder, page, **changes):
    """Little room, so that sequences are preempted; two prompts begin alike."""
    little = {"speculative_algorithm": "NGRAM", "page_size": page, "kv_tokens": 96}
    return small(folder, **little | changes)


def on(executor):
    """Changes of `configured` for an executor."""
    return {"executor": executor, "dtype": "file" if executor == "cpu" else "float32"}


class Watched:
    """Counts what an engine does with states, on every executor that is opened."""

    def __init__(self, monkeypatch):
        self.resumed, self.whole = 0, 0
        for kind in (TorchExecutor, CpuExecutor):
            monkeypatch.setattr(kind, "open", self.counting(kind.open))

    def counting(self, opened):
        def open(executor, slot_init):
            self.resumed += slot_init.cached > 0
            self.whole += slot_init.cached < slot_init.shared
            opened(executor, slot_init)

        return open


@pytest.fixture
def accepting(monkeypatch, hints):  # noqa: F811
    """Prove a configuration whose hinted drafts are mostly right, and return the runs: some went on
    from a checkpoint.
    """

    def proof(config):
        watched, seen = Watched(monkeypatch), []
        proved(config, TRIAL, hints, lambda _, runs: seen.extend(runs), ("tree",))
        assert watched.resumed > 0, "no sequence went on from a checkpoint"
        assert sum(run.accepted for run in seen) > 50
        return seen

    return proof


NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
EXECUTORS = [pytest.param("torch", marks=pytest.mark.slow), pytest.param("cpu", marks=NATIVE)]


@pytest.mark.parametrize("page", [1, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("convolutions", [False, True], ids=["nets", "convolutions"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_texts_do_not_depend_on_trees_of_a_draft_model(
    folders, draft, accepting, executor, convolutions, page
):
    config = configured(
        folders[CONVOLUTION if convolutions else ON[executor]],
        page,
        **on(executor),
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(draft),
    )
    assert sum(run.preemptions for run in accepting(config)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
def test_nor_on_its_own_prediction_layer(layered, accepting, executor):
    """Which reads the target's hidden states, so that pages are shared a token later."""
    config = configured(layered[ON[executor]], 4, speculative_algorithm="NEXTN", **on(executor))
    accepting(config)


@NATIVE
def test_nor_on_a_head_beside_convolutions(folders, tmp_path, accepting):
    model = folders[CONVOLUTION]
    head = Twin(Target(FolderCheckpoint(model)), tmp_path / "head", {}).folder
    changes = on("cpu") | {"speculative_algorithm": "EAGLE3"}
    accepting(configured(model, 4, speculative_draft_model_path=str(head), **changes))


@NATIVE
def test_its_prediction_layer_drafts_unless_something_else_is_named(layered):
    unnamed = {"executor": "auto", "dtype": "auto", "speculative_algorithm": "AUTO"}
    unnamed |= {"policy": "auto", "kv_tokens": 256}  # Steps are timed at the start.
    with closing(open_target(configured(layered["qwen3_5_text"], 4, **unnamed))) as target:
        found = target.config
        assert (found.executor, found.speculative_algorithm) == ("cpu", "NEXTN+NGRAM")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_without_room_for_checkpoints_prompts_run_from_the_start(folders, monkeypatch, executor):
    """Drafts from the text, of which hardly one is right here."""
    watched = Watched(monkeypatch)
    monkeypatch.setattr("forerun.build.memory.CHECKPOINTS", 0)
    with closing(open_target(configured(folders[ON[executor]], 4, **on(executor)))) as target:
        sampled = replace(TRIAL, temperatures=(1.0,))
        proof = prove(target, replace(target.config, speculative_num_draft_tokens=8), sampled)
        assert proof.identical
        assert any(run.draft_tokens for run in proof.runs)
    assert watched.resumed == 0 < watched.whole


def test_who_cannot_run_it_says_so(folder, draft):
    arch = FolderCheckpoint(folder).architecture
    with pytest.raises(ConfigError, match="2 key heads of a gated delta net do not divide by that"):
        open_target(configured(folder, 16, tp_size=4))
    if cpu.available() is None:
        auto = configured(folder, 16, executor="auto", dtype="auto")
        assert choose_executor(auto, arch).executor == "cpu"
    with pytest.raises(ModelError, match="which a draft model cannot have"):
        open_target(
            configured(
                draft,
                16,
                speculative_algorithm="STANDALONE",
                speculative_draft_model_path=str(folder),
            )
        )
