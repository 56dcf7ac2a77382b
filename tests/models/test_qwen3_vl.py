"""Qwen's models that see: their language model is Qwen's, read alone."""

import json

import pytest
import torch
import transformers

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.errors import ModelError
from tests.models import tiny
from tests.worlds.checkpoints import IDS, logits_are_those_of, rewrite

ROPE = {"rope_type": "default", "rope_theta": 5e6}
IN_THREE = {"mrope_section": [4, 2, 2]}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
DEEP = {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
SEEING = {
    "qwen2_vl": ("Qwen2VL", "qwen2", VISION | {"embed_dim": 16, "hidden_size": 64}),
    "qwen2_5_vl": ("Qwen2_5_VL", "qwen2", VISION | {"out_hidden_size": 64}),
    "qwen3_vl": ("Qwen3VL", "qwen3", VISION | DEEP),
    "qwen3_vl_moe": ("Qwen3VLMoe", "qwen3_moe", VISION | DEEP),
}
"""model_type -> name of the class, the family of the language model, what sees."""


@torch.no_grad()
def seeing(name, folder, **changes):
    """Write a folder of a model that sees; returns its language model alone."""
    title, family, vision = SEEING[name]
    parts = IN_THREE | ({"mrope_interleaved": True} if "3" in name else {})
    text = tiny.config(family, rope=ROPE | parts, **changes).to_dict()
    text = {**text, "model_type": f"{name}_text"}
    settings = getattr(transformers, f"{title}Config")(text_config=text, vision_config=vision)
    made = getattr(transformers, f"{title}ForConditionalGeneration")(settings).eval()
    tiny.randomised(made, family)
    made.save_pretrained(folder)
    alone = tiny.model(family, rope=ROPE, **changes)
    alone.model.load_state_dict(made.model.language_model.state_dict())
    alone.lm_head.load_state_dict(made.lm_head.state_dict())
    assert torch.equal(alone(IDS).logits, made(IDS).logits)
    return alone


@pytest.mark.parametrize("name", SEEING)
def test_the_language_model_of_a_folder_is_a_qwen(name, tmp_path):
    alone = seeing(name, tmp_path)
    checkpoint = FolderCheckpoint(tmp_path)
    assert (checkpoint.architecture.family, checkpoint.towers) == (SEEING[name][1], ("visual",))
    logits_are_those_of(alone, checkpoint)


@pytest.mark.parametrize("width", [24, 32, 64])
def test_experts_as_they_were_published(tmp_path, width):
    """Their matrices are [in, out]; at any width but the model's own one of two shapes says it."""
    alone = seeing("qwen3_vl_moe", tmp_path, moe_intermediate_size=width)

    def as_published(tensors):
        turned = {name: one for name, one in tensors.items() if ".mlp.experts." in name}
        assert len(turned) == 4
        tensors |= {name: one.transpose(0, 2, 1).copy() for name, one in turned.items()}

    rewrite(tmp_path, as_published)
    logits_are_those_of(alone, FolderCheckpoint(tmp_path))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_folder_as_it_was_published(name, tmp_path):
    """All keys in one object, a rope of its own name; layers and what sees side by side."""
    alone = seeing(name, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    flat = {k: v for k, v in text.items() if k not in ("architectures", "rope_parameters")} | config
    flat |= {"rope_theta": 5e6, "rope_scaling": {"type": "mrope", **IN_THREE}}
    path.write_text(json.dumps(flat))

    def as_published(tensors):
        for stored in [*tensors]:
            plain = stored.replace("model.language_model.", "model.").replace("model.v", "v")
            tensors[plain] = tensors.pop(stored)

    rewrite(tmp_path, as_published)
    checkpoint = FolderCheckpoint(tmp_path)
    assert (checkpoint.architecture.family, checkpoint.towers) == ("qwen2", ("visual",))
    logits_are_those_of(alone, checkpoint)
    path.write_text(json.dumps({**flat, "rope_scaling": {"type": "odd"}}))
    with pytest.raises(ModelError, match="rope_type is 'odd'"):
        FolderCheckpoint(tmp_path)


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
