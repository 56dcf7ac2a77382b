"""A model whose layers have recurrent states (Qwen3-Next): no text depends on speculation, trees,
company, preemption or what others have left in the prefix cache.
"""

from dataclasses import replace

import pytest
import torch

from forerun.build.engine import open_target
from forerun.build.registry import choose_executor
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import ConfigError, ModelError
from forerun.measure.prove import Trial, prove
from forerun.options.config import EngineConfig
from tests.drafters.prediction import with_layers
from tests.e2e.test_equality_matrix import (
    PROMPTS,
    hints,  # noqa: F401 - a fixture
    proved,
)
from tests.models import tiny

TRIAL = Trial(PROMPTS[-4:], tokens=20, temperatures=(0.0, 1.0), group=4, mixed=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_folder(tiny.model("qwen3_next"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def layered(tmp_path_factory):
    """With a random prediction layer under Qwen3-Next's names."""
    hf = tiny.model("qwen3_next")
    torch.manual_seed(3)
    made = type(hf.model.layers[-1])(hf.config, hf.config.num_hidden_layers - 1)
    made.apply(hf._init_weights)  # Experts are empty memory before.
    width = hf.config.hidden_size
    own = *(0.2 * torch.randn(width) for _ in range(3)), torch.randn(width, 2 * width) / 8
    return with_layers(hf, [(made, *own)], tmp_path_factory.mktemp("layered"), "qwen3-next")


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return tiny.save_folder(tiny.model("llama"), tmp_path_factory.mktemp("draft"))


def configured(folder, page, **changes):
    """Little room, so that sequences are preempted; two prompts begin alike."""
    config = EngineConfig(
        model=str(folder),
        speculative_algorithm="NGRAM",
        executor="torch",
        device="cpu",
        dtype="float32",
        policy="fixed",
        draft_on_error="stop",
        page_size=page,
        max_sequences=4,
        chunked_prefill_size=320,
        kv_tokens=96,
        threads=1,
    )
    return replace(config, **changes)


class Watched:
    """Counts what an engine does with states, on every executor that is opened."""

    def __init__(self, monkeypatch):
        from forerun.executors.torch import TorchExecutor

        self.resumed, self.whole, self.executors = 0, 0, []
        opened, began = TorchExecutor.open, TorchExecutor.__init__

        def open(executor, slot_init):
            self.resumed += slot_init.cached > 0
            self.whole += slot_init.cached < slot_init.shared
            opened(executor, slot_init)

        def init(executor, *args, **kwargs):
            began(executor, *args, **kwargs)
            self.executors.append(executor)

        monkeypatch.setattr(TorchExecutor, "open", open)
        monkeypatch.setattr(TorchExecutor, "__init__", init)


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


@pytest.mark.parametrize("page", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_texts_do_not_depend_on_trees_of_a_draft_model(folder, draft, watched, hints, page):  # noqa: F811
    seen = []
    config = configured(
        folder,
        page,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(draft),
    )
    proved(config, TRIAL, hints, lambda _, runs: seen.extend(runs), ("tree",))
    assert watched.resumed > 0, "no sequence went on from a checkpoint"
    assert sum(run.accepted for run in seen) > 50, "hinted drafts are mostly right"
    assert sum(run.preemptions for run in seen) > 0


def test_nor_on_its_own_prediction_layer(layered, watched, hints):  # noqa: F811
    """Which reads the target's hidden states, so that pages are shared a token later."""
    seen = []
    config = configured(layered, 4, speculative_algorithm="NEXTN")
    proved(config, TRIAL, hints, lambda _, runs: seen.extend(runs), ("tree",))
    assert watched.resumed > 0
    assert sum(run.accepted for run in seen) > 50


def test_without_room_for_checkpoints_prompts_run_from_the_start(folder, monkeypatch, watched):
    """Drafts from the text, of which hardly one is right here."""
    monkeypatch.setattr("forerun.build.memory.CHECKPOINTS", 0)
    target = open_target(configured(folder, 4))
    try:
        sampled = replace(TRIAL, temperatures=(1.0,))
        proof = prove(target, replace(target.config, speculative_num_draft_tokens=8), sampled)
        assert proof.identical
        assert any(run.draft_tokens for run in proof.runs)
    finally:
        target.close()
    assert watched.resumed == 0 < watched.whole


def test_who_cannot_run_it_says_so(folder, draft):
    arch = FolderCheckpoint(folder).architecture
    with pytest.raises(ConfigError, match="recurrent states are not cut over ranks"):
        open_target(configured(folder, 16, tp_size=2))
    for name, dtype in (("cpu", "file"), ("jax", "float32")):
        config = configured(folder, 16, executor=name, dtype=dtype, threads=None)
        with pytest.raises((ModelError, ConfigError), match="recurrent"):
            open_target(config)
    auto = configured(folder, 16, executor="auto", dtype="auto")
    with pytest.warns(UserWarning, match="recurrent"):
        assert choose_executor(auto, arch).executor == "torch"
    with pytest.raises(ModelError, match="which a draft model cannot have"):
        open_target(
            configured(
                draft,
                16,
                speculative_algorithm="STANDALONE",
                speculative_draft_model_path=str(folder),
            )
        )
