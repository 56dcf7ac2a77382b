"""Folders of LoRA adapters: what is honoured, and what is an error that names it."""

import numpy as np
import pytest

from forerun.checkpoints.adapter import read_adapter
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import ModelError
from tests.models import tiny
from tests.models.lora import merged, save_adapter


@pytest.fixture(scope="module", params=["llama", "phi3", "glm4_moe"])
def model(request, tmp_path_factory):
    hf = tiny.model(request.param)
    return hf, FolderCheckpoint(tiny.save_folder(hf, tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"alpha_pattern": {"o_proj": 3.0}}])
def test_an_adapter_is_what_peft_would_merge(model, tmp_path, config):
    """Also where files keep several matrices as one, or rows in another order."""
    hf, checkpoint = model
    modules = r"model\.layers\.\d+\.self_attn\.(q_proj|k_proj|qkv_proj|o_proj)"
    folder = save_adapter(hf, tmp_path / "a", 1, modules, **config)
    found = read_adapter("a", folder, checkpoint.architecture)
    whole = tiny.save_folder(hf, tmp_path / "whole")
    other = _with(whole, merged(hf, folder))
    each = 4 if checkpoint.architecture.family == "phi3" else 3
    assert len(found.matrices) == each * checkpoint.architecture.layers
    for name, one in found.matrices.items():
        sum_ = checkpoint.tensor(f"{name}.weight") + one.up @ one.down
        np.testing.assert_allclose(sum_, other.tensor(f"{name}.weight"), atol=1e-5)


def _with(folder, weights):
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    stored = load_file(path)
    save_file({name: weights.get(name, value) for name, value in stored.items()}, path)
    return FolderCheckpoint(folder)


OTHER = "base_model.model.model.layers.0.self_attn.q_norm"
BAD = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "tensors", "word"),
    [
        ({"use_dora": True}, {}, "use_dora = True"),
        ({"bias": "all"}, {}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"fan_in_fan_out": True}, {}, "fan_in_fan_out"),
        ({"new_in_peft": 3}, {}, "new_in_peft = 3"),
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'"),
        ({"alpha_pattern": {"(a+)+": 3}}, {}, "alpha_pattern"),
        ({"alpha_pattern": [1]}, {}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": True}}, {}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, {}, "alpha_pattern"),
        ({}, {f"{BAD}.lora_magnitude_vector": (64,)}, "lora_magnitude_vector"),
        ({}, {"base_model.model.lm_head.lora_A.weight": (4, 64)}, "only one of"),
        ({}, {f"{BAD}.lora_A.weight": (4, 63)}, r"lora_A \[4, 63\]"),
        ({}, {f"{BAD}.lora_B.weight": (64, 5)}, r"lora_B \[64, 5\]"),
        (
            {},
            dict.fromkeys([f"{BAD[:-8]}9.q.lora_{h}.weight" for h in "AB"], (4, 4)),
            "not adapted",
        ),
    ],
)
def test_what_would_change_the_model_otherwise_is_named(tmp_path, config, tensors, word):
    hf = tiny.model("llama")
    random = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    folder = save_adapter(hf, tmp_path / "a", 1, tensors=random, **config)
    arch = FolderCheckpoint(tiny.save_folder(hf, tmp_path / "m")).architecture
    with pytest.raises(ModelError, match=word):
        read_adapter("a", folder, arch)


def test_what_is_no_adapter_is_said(tmp_path):
    arch = FolderCheckpoint(tiny.save_folder(tiny.model("llama"), tmp_path)).architecture
    with pytest.raises(ModelError, match=r"the adapter x: .* has no adapter_config.json"):
        read_adapter("x", tmp_path, arch)
