"""How a model's files say that embeddings are made."""

import json

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.pooling import EmbeddingRule, embedding_rule
from forerun.errors import ModelError
from tests.models import tiny

KINDS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
OFF = {f"pooling_mode_{kind}": False for kind in KINDS}
MODULES = ("Transformer", "Pooling", "Normalize")


def folder(tmp_path, pooling, modules=MODULES, prompts=None):
    """A folder as sentence-transformers saves it."""
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "",
         "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(modules)
    ]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    place = tmp_path / "1_Pooling"
    place.mkdir()
    config = {"word_embedding_dimension": 64, **OFF, "include_prompt": True, **pooling}
    (place / "config.json").write_text(json.dumps(config))
    if prompts is not None:
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return embedding_rule(tmp_path, {})


@pytest.mark.parametrize(("mode", "kind"), [("lasttoken", "last"), ("mean_tokens", "mean")])
def test_the_folder_decides(tmp_path, mode, kind):
    opened = folder(tmp_path, {f"pooling_mode_{mode}": True})
    assert opened == EmbeddingRule(kind, "1_Pooling/config.json")


def test_newer_folders_name_the_mode_and_a_prompt(tmp_path):
    prompts = {"prompts": {"query": "Find: "}, "default_prompt_name": "query"}
    opened = folder(tmp_path, {"pooling_mode": "lasttoken"}, prompts=prompts)
    assert (opened.pooling, opened.prompt) == ("last", "Find: ")


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_model_of_embeddings_needs_no_head(tmp_path, prefix):
    """Qwen3-Embedding-8B has none, and config.json does not tie it (mlx #2309)."""
    hf = tiny.model("qwen3", tie_word_embeddings=False)
    tiny.save_folder(hf, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file({prefix + name.removeprefix("model."): t for name, t in tensors.items()}, file)
    with pytest.raises(ModelError, match=r"missing lm_head\.weight"):
        FolderCheckpoint(tmp_path)
    assert folder(tmp_path, {"pooling_mode": "lasttoken"}).fault == ""
    checkpoint = FolderCheckpoint(tmp_path)
    assert checkpoint.architecture.tied_head
    for name, weight in hf.model.state_dict().items():
        np.testing.assert_array_equal(checkpoint.tensor(f"model.{name}"), weight.numpy())


@pytest.mark.parametrize(
    ("pooling", "modules", "word"),
    [
        ({"pooling_mode_cls_token": True}, MODULES, "mode is cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, MODULES, "mean, last"),
        ({"pooling_mode_lasttoken": True, "weights": [1]}, MODULES, "weights is unknown"),
        ({"pooling_mode_lasttoken": True}, (*MODULES, "Dense"), "Dense"),
        ({"pooling_mode_lasttoken": True}, ("Transformer", "Normalize"), "one Pooling"),
    ],
)
def test_what_is_not_computed_is_named(tmp_path, pooling, modules, word):
    assert word in folder(tmp_path, pooling, modules).fault


def test_modules_stay_within_the_folder(tmp_path):
    listed = [{"path": "../..", "type": "a.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    assert "outside" in embedding_rule(tmp_path, {}).fault
    (tmp_path / "modules.json").write_text("[1]")
    assert "cannot be read" in embedding_rule(tmp_path, {}).fault


def test_without_files_it_is_the_last_token(tmp_path):
    assert embedding_rule(tmp_path, {}) == EmbeddingRule()
    path = tmp_path / "x.gguf"
    for kind, pooling in ((None, "last"), (0, "last"), (1, "mean"), (3, "last")):
        metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": kind}
        assert embedding_rule(path, metadata).pooling == pooling
        assert not embedding_rule(path, metadata).fault
    metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": 2}
    assert "pooling_type is cls" in embedding_rule(path, metadata).fault


def test_base_models_without_a_head_are_read(tmp_path):
    """Qwen3-Embedding is stored so: `architectures` names the model, tensors have no prefix."""
    whole = tiny.model("qwen3", tie_word_embeddings=True)
    alone = tiny.save_folder(whole, tmp_path / "whole")
    tiny.save_folder(whole, tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    whole.model.save_pretrained(tmp_path / "base")
    assert "Qwen3Model" in (tmp_path / "base" / "config.json").read_text()
    base = FolderCheckpoint(tmp_path / "base")
    other = FolderCheckpoint(alone)
    assert base.architecture == other.architecture and base.names() == other.names()
    for name in base.names():
        assert (base.tensor(name) == other.tensor(name)).all()
    assert transformers.AutoModel.from_pretrained(tmp_path / "base").config.tie_word_embeddings


@pytest.mark.parametrize(("value", "runs"), [(True, True), (False, False)])
def test_attention_to_later_tokens_is_refused(tmp_path, value, runs):
    path = tiny.save_folder(tiny.model("qwen3"), tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"is_causal": value}
    (path / "config.json").write_text(json.dumps(config))
    if runs:
        assert FolderCheckpoint(path).architecture
    else:
        with pytest.raises(ModelError, match="is_causal"):
            FolderCheckpoint(path)
