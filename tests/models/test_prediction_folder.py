"""Folders with prediction layers: read for their target, or refused with what is wrong."""

import json
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.build.draft_file import open_draft_file
from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.drafts.prediction_folder import holds_prediction, open_prediction
from forerun.errors import ConfigError, ModelError
from forerun.options.config import EngineConfig
from forerun.train.prediction import PredictionLayer, PredictionSpec, export_prediction
from tests.covering import spread
from tests.models import tiny

IDS = np.arange(0, 300, 2, dtype=np.int32)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return FolderCheckpoint(
        tiny.save_folder(tiny.model("qwen3"), tmp_path_factory.mktemp("prediction"))
    )


@pytest.fixture
def folder(target, tmp_path):
    torch.manual_seed(0)
    layer = PredictionLayer(PredictionSpec(target.architecture, len(IDS)))
    export_prediction(layer, IDS, tmp_path / "draft")
    return tmp_path / "draft"


def changed(folder, tensors=lambda _: None, **keys):
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    tensors(stored)
    save_file(stored, folder / "model.safetensors")
    return folder


def test_what_is_written_is_read(target, folder):
    assert holds_prediction(folder)
    opened = open_prediction(folder, target)
    assert (opened.count, opened.vocab, opened.path) == (1, 150, folder)
    assert opened.target_ids.tolist() == IDS.tolist()
    assert "model.layers.0.self_attn.q_norm.weight" in opened.names()
    stored = load_file(folder / "model.safetensors")
    fuse = stored[f"model.layers.{target.architecture.layers}.eh_proj.weight"].float().numpy()
    assert np.array_equal(opened.tensor(opened.own(0, "fuse")), fuse)
    with pytest.raises(ModelError, match="brings its own draft vocabulary"):
        opened.limited(np.arange(5, dtype=np.int32))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"hidden_size": 128}, "another target: hidden_size is 128, the target's is 64"),
        ({"num_target_layers": 9}, "num_target_layers is 9"),
        ({"vocab_size": 300}, "vocab_size is 300"),
        ({"num_nextn_predict_layers": 2}, "promises 2 prediction layers"),
        ({"draft_vocab_size": 7}, "d2t maps 150 ids, the head has 7"),
        ({"hidden_act": "gelu"}, "may change the model"),
        ({"architectures": ["LlamaForCausalLM"]}, "holds no prediction layers"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(target, folder, keys, problem):
    with pytest.raises(ModelError, match=problem) as raised:
        open_prediction(changed(folder, **keys), target)
    assert str(folder) in str(raised.value)


def test_tensors_that_are_wrong_are_named(target, folder):
    first = f"model.layers.{target.architecture.layers}."

    def damage(stored):
        stored.pop(f"{first}enorm.weight")
        stored[f"{first}hnorm.weight"] = torch.ones(3)
        stored[f"{first}extra.weight"] = torch.ones(3)

    with pytest.raises(ModelError) as raised:
        open_prediction(changed(folder, damage), target)
    for culprit in ("missing", "enorm", "hnorm.weight is [3], not [64]", "unexpected"):
        assert culprit in str(raised.value)
    with pytest.raises(ModelError, match="there is no d2t"):
        open_prediction(changed(folder, lambda stored: stored.pop("d2t")), target)


def config(target, folder, method, executor="torch", **changes):
    return EngineConfig(
        model=str(target.path), speculative_algorithm=method, executor=executor, kv_tokens=512,
        speculative_draft_model_path=str(folder), draft_on_error="stop", **changes,
    )  # fmt: skip


@pytest.mark.parametrize("method", spread(["AUTO", "EAGLE", "NEXTN+NGRAM", "NEXTN"], 2))
def test_nextn_is_used_by_its_name(target, folder, method):
    with closing(open_target(config(target, folder, method))) as opened:
        lookup = method in ("AUTO", "NEXTN+NGRAM")
        assert opened.config.speculative_algorithm == "NEXTN" + "+NGRAM" * lookup
        assert opened.draft_model.traits.name == "nextn" and opened.draft_model.traits.vocab == 150


@pytest.mark.parametrize("method", ["EAGLE3", "EAGLE+NGRAM", "DFLASH", "NAIVE"])
def test_another_kind_is_refused_in_words(target, folder, method):
    with pytest.raises(ConfigError, match="holds prediction layers; use NEXTN"):
        open_draft_file(config(target, folder, method), folder, target)
