"""Qwen's models that see: their language model is Qwen's, read alone."""

import pytest
import torch
import transformers

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.errors import ModelError
from tests.models import tiny
from tests.worlds.checkpoints import IDS, logits_are_those_of

ROPE = {"rope_type": "default", "rope_theta": 5e6}
IN_THREE = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
VISION |= {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}


@torch.no_grad()
def test_the_language_model_of_a_folder_is_a_qwen3(tmp_path):
    text = tiny.config("qwen3", rope=ROPE | IN_THREE).to_dict() | {"model_type": "qwen3_vl_text"}
    settings = transformers.Qwen3VLConfig(text_config=text, vision_config=VISION)
    made = transformers.Qwen3VLForConditionalGeneration(settings).eval()
    made.save_pretrained(tmp_path)
    checkpoint = FolderCheckpoint(tmp_path)
    assert (checkpoint.architecture.family, checkpoint.towers) == ("qwen3", ("visual",))
    alone = tiny.model("qwen3", rope=ROPE)
    alone.model.load_state_dict(made.model.language_model.state_dict())
    alone.lm_head.load_state_dict(made.lm_head.state_dict())
    assert torch.equal(alone(IDS).logits, made(IDS).logits)
    logits_are_those_of(alone, checkpoint)


@pytest.mark.parametrize("name", ["qwen2vl", "qwen3vl", "qwen3vlmoe"])
def test_the_language_model_of_a_file_is_a_qwen(name, tmp_path, monkeypatch):
    family = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe"}[name]
    hf = tiny.model(family)
    said = {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3}
    monkeypatch.setitem(tiny.GGUF_NAMES, family, name)
    metadata = {f"{name}.{key}": value for key, value in said.items()}
    path = tiny.write_gguf(hf, tmp_path / "x.gguf", metadata=metadata)
    logits_are_those_of(hf, GgufCheckpoint(path))
    path = tiny.write_gguf(hf, tmp_path / "y.gguf", metadata={f"{name}.mapping": [1]})
    with pytest.raises(ModelError, match=rf"{name}\.mapping"):
        GgufCheckpoint(path)
