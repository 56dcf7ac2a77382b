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


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"alpha_pattern": {"o_proj": 3.0}},
        {"r": 8, "rank_pattern": {".": 4}},
    ],
)
def test_an_adapter_is_what_peft_would_merge(model, tmp_path, config):
    """Also where files keep several matrices as one, or rows in another order."""
    hf, checkpoint = model
    modules = r"model\.layers\.\d+\.self_attn\.(q_proj|k_proj|qkv_proj|o_proj)"
    folder = save_adapter(hf, tmp_path / "a", 1, modules, **config)
    adapter = read_adapter("a", folder, checkpoint.architecture)
    whole = tiny.save_folder(hf, tmp_path / "whole")
    other = _with(whole, merged(hf, folder))
    each = 4 if checkpoint.architecture.family == "phi3" else 3
    assert len(adapter.matrices) == each * checkpoint.architecture.layers
    for name, one in adapter.matrices.items():
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
        ({"init_lora_weights": "pissa_niter_4"}, {}, "init_lora_weights is 'pissa_niter_4'"),
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'"),
        ({"alpha_pattern": {"(a+)+": 3}}, {}, "alpha_pattern"),
        ({"alpha_pattern": {".*": 3}}, {}, "alpha_pattern"),
        ({"alpha_pattern": [1]}, {}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": True}}, {}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, {}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": 10**400}}, {}, "alpha_pattern"),
        ({"r": 8}, {}, "has the rank 4, but r and rank_pattern of adapter_config.json say 8"),
        ({"rank_pattern": {"q_proj": "4"}}, {}, "rank_pattern"),
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


EXPERTS = "base_model.model.model.layers.0.mlp.experts"


def of_experts(arch, rank=3):
    """An adapter of all experts of the first layer: by their names, and as peft's parameters."""
    experts, hidden = arch.layer_specs[0].feed_forward, arch.hidden
    random, count, width = np.random.default_rng(2), experts.count, experts.width
    one, all_ = {}, {}
    for room, inputs, outputs in ((".base_layer", hidden, 2 * width), ("", width, hidden)):
        down = random.normal(size=(count, rank, inputs)).astype(np.float32)
        up = random.normal(size=(outputs, rank, count)).astype(np.float32)
        all_[f"{EXPERTS}{room}.lora_A.weight"] = down.reshape(-1, inputs)
        all_[f"{EXPERTS}{room}.lora_B.weight"] = up.reshape(outputs, -1)
        parts = {"gate_proj": up[:width], "up_proj": up[width:]} if room else {"down_proj": up}
        for expert in range(count):
            for part, rows in parts.items():
                one[f"{EXPERTS}.{expert}.{part}.lora_A.weight"] = down[expert].copy()
                one[f"{EXPERTS}.{expert}.{part}.lora_B.weight"] = rows[:, :, expert].copy()
    return one, all_


def test_experts_by_name_and_as_one_parameter_are_the_same(tmp_path):
    hf = tiny.model("qwen3_moe")
    arch = FolderCheckpoint(tiny.save_folder(hf, tmp_path)).architecture
    made = of_experts(arch)
    one, all_ = (
        read_adapter("a", save_adapter(hf, tmp_path / kind, 1, "none", 3, adapter), arch).matrices
        for kind, adapter in zip(("one", "all"), made, strict=True)
    )
    assert one.keys() == all_.keys() and len(one) == 3 * arch.layer_specs[0].feed_forward.count
    for name, matrix in one.items():
        np.testing.assert_array_equal(matrix.down, all_[name].down)
        np.testing.assert_array_equal(matrix.up, all_[name].up)
    pattern = {r".*\.gate_up_proj": 32}  # As peft writes it; lora_alpha is 16.
    folder = save_adapter(hf, tmp_path / "p", 1, "none", 3, made[1], alpha_pattern=pattern)
    for name, matrix in read_adapter("a", folder, arch).matrices.items():
        np.testing.assert_array_equal(matrix.up, all_[name].up * (1 if "down" in name else 2))
    made[1][f"{EXPERTS}.lora_A.weight"] = np.ones((4, 4), np.float32)
    folder = save_adapter(hf, tmp_path / "bad", 1, "none", 3, made[1])
    with pytest.raises(ModelError, match=r"mlp.experts: lora_A \[4, 4\] .* do not fit 6 experts"):
        read_adapter("a", folder, arch)


@pytest.mark.parametrize(
    ("family", "module"),
    [("deepseek_v3", "self_attn.kv_b_proj"), ("qwen3_next", "mlp.shared_expert_gate")],
)
def test_what_is_not_adapted_is_named(tmp_path, family, module):
    hf = tiny.model(family)
    arch = FolderCheckpoint(tiny.save_folder(hf, tmp_path)).architecture
    folder = save_adapter(hf, tmp_path / "a", 1, rf"model\.layers\.0\.{module}")
    with pytest.raises(ModelError, match=f"the adapter a: model.layers.0.{module} is not adapted"):
        read_adapter("a", folder, arch)


def test_what_is_no_adapter_is_said(tmp_path):
    arch = FolderCheckpoint(tiny.save_folder(tiny.model("llama"), tmp_path)).architecture
    with pytest.raises(ModelError, match=r"the adapter x: .* has no adapter_config.json"):
        read_adapter("x", tmp_path, arch)
