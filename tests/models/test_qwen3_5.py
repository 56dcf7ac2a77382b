"""Qwen3.5, 3.6 and 3.8: configurations as published, multimodal folders, layouts of experts."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize, quantize

from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint, eos_ids
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.errors import ModelError
from forerun.networks.config_json import announced_layers, architecture_from
from forerun.networks.layer_spec import Dense, GatedDelta
from forerun.options.config import EngineConfig
from tests.models import tiny
from tests.worlds.checkpoints import holds, logits_are_those_of, rewrite

IDS = torch.arange(100)[None]
TEXT_27B = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
    "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 17408, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_hidden_layers": 64,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "use_cache": True, "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
        "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
NESTED = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056,
    "model_type": "qwen3_5", "text_config": TEXT_27B, "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0", "video_token_id": 248057,
    "vision_config": {"depth": 27, "model_type": "qwen3_5"}, "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}  # fmt: skip


def test_a_configuration_as_published(tmp_path):
    arch = architecture_from(NESTED, tmp_path)
    assert (arch.layers, arch.recurrent_layers, arch.norm_offset) == (64, 48, 1.0)
    assert arch.recurrent == GatedDelta(16, 48, 128, 128, 4)
    assert {spec.feed_forward for spec in arch.layer_specs} == {Dense(17408)}
    assert (arch.rope.theta, arch.rope.rotated) == (1e7, 64)
    assert 26e9 < arch.parameters < 28e9
    assert announced_layers(NESTED) == announced_layers(TEXT_27B) == 1


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_text"])
def test_flat_configurations_are_the_same_model(name, tmp_path):
    flat = TEXT_27B | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": name}
    assert architecture_from(flat, tmp_path) == architecture_from(NESTED, tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval"),
        ("qwen3_5_text", {"num_experts": 4}, "num_experts"),
        ("qwen3_5_text", {"indexer_budget": 64}, "indexer_budget"),
        ("qwen3_5_text", {"architectures": ["Qwen3NextForCausalLM"]}, "architectures"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3_5_moe_text", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_5_moe_text", {"linear_num_value_heads": 3}, "value heads"),
    ],
)
def test_keys_are_honoured_or_refused(family, changes, named, tmp_path):
    with pytest.raises(ModelError, match=named):
        architecture_from(tiny.config(family).to_dict() | changes, tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen4_exp"}, "model_type 'qwen4_exp' are not supported"),
        ({"architectures": ["Qwen3_5Model"]}, "architectures"),
        ({"text_config": TEXT_27B | {"model_type": "qwen3_next"}}, "text_config.model_type"),
        ({"hc_count": 4}, "hc_count"),
    ],
)
def test_multimodal_configurations_are_honoured_or_refused(changes, named, tmp_path):
    with pytest.raises(ModelError, match=named):
        architecture_from(NESTED | changes, tmp_path)


def test_experts_are_always_normalised(tmp_path):
    """Unlike Qwen2-MoE's and Qwen3-MoE's, whose configurations without the key mean no."""
    settings = tiny.config("qwen3_5_moe_text").to_dict()
    assert "norm_topk_prob" not in settings
    assert architecture_from(settings, tmp_path).layer_specs[0].feed_forward.router.normalised


@pytest.fixture(params=["dense", "experts"])
def multimodal(request, tmp_path):
    """A random model with a tower, as transformers saves it."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "patch_size": 4, "num_position_embeddings": 16}
    dense = request.param == "dense"
    of, whole = (
        (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration)
        if dense
        else (transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration)
    )
    text = tiny.config("qwen3_5_text" if dense else "qwen3_5_moe_text").to_dict()
    made = whole(of(text_config=text, vision_config=vision)).eval()
    made.save_pretrained(tmp_path)
    return made, tmp_path


@torch.no_grad()
def test_the_language_model_of_a_multimodal_folder_runs_alone(multimodal):
    made, folder = multimodal
    checkpoint = FolderCheckpoint(folder)
    alone = tiny._CLASSES[checkpoint.architecture.family][1](made.config.text_config).eval()
    alone.model.load_state_dict(made.model.language_model.state_dict())
    alone.lm_head.load_state_dict(made.lm_head.state_dict())
    holds(checkpoint, alone)
    assert torch.equal(alone(IDS).logits, made(IDS).logits)


def test_towers_that_are_left_out_are_named(multimodal):
    _, folder = multimodal
    assert FolderCheckpoint(folder).towers == ("visual",)
    (folder / "tokenizer.json").write_text(tiny._tokenizer())
    with pytest.warns(UserWarning, match="visual not loaded; only text is supported"):
        open_target(EngineConfig(model=str(folder), device="cpu", kv_tokens=256)).close()


def test_other_tensors_of_a_multimodal_folder_are_refused(multimodal):
    _, folder = multimodal
    rewrite(folder, lambda tensors: tensors.update({"audio.proj.weight": np.ones((2, 2), "f4")}))
    with pytest.raises(ModelError, match=r"unexpected audio\.proj\.weight"):
        FolderCheckpoint(folder)


def test_the_end_of_a_text_may_stand_with_the_language_model(tmp_path):
    assert eos_ids(tmp_path, NESTED, 248320) == (248044,)


def test_experts_may_be_one_tensor(tmp_path):
    """As Qwen's own files have them: all gates of an expert, then all its ups."""
    hf = tiny.model("qwen3_5_moe_text")
    tiny.save_folder(hf, tmp_path)
    rewrite(tmp_path, fused)
    checkpoint = FolderCheckpoint(tmp_path)
    for name, weight in tiny.weights(hf).items():
        np.testing.assert_array_equal(checkpoint.tensor(name), weight)
        packed = checkpoint.packed(name)
        if packed is not None:
            np.testing.assert_array_equal(packed.floats(), weight)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.mlp.experts.down_proj"))
    with pytest.raises(ModelError, match=r"missing model\.layers\.2\.mlp\.experts\.down_proj"):
        FolderCheckpoint(tmp_path)


def fused(tensors):
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(6)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], 1)
        tensors[f"{prefix}.down_proj"] = parts["down"]


FITTING = {"linear_value_head_dim": 16, "moe_intermediate_size": 32}
FITTING |= {"shared_expert_intermediate_size": 64}


def in_turns(array, keys=2):
    """Value heads of key heads that follow each other, as files place them."""
    heads = array.reshape(keys, 4 // keys, len(array) // 4, *array.shape[1:])
    return heads.swapaxes(0, 1).reshape(array.shape)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_files_keep_value_heads_in_turns(family, kind, tmp_path):
    """No column of what is stored in few bits is moved."""
    changes = FITTING if family == "qwen3_5_moe_text" else {"linear_value_head_dim": 16}
    hf, quant = tiny.model(family, **changes), gguf.GGMLQuantizationType[kind]
    checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", kind))
    arch, weights = checkpoint.architecture, tiny.weights(hf)
    assert arch.family == family and arch.recurrent.tiled and arch.norm_offset == 0
    assert set(checkpoint.names()) == set(weights)
    moved = (*(f".{part}_proj.weight" for part in "vzba"), ".dt_bias")
    for name, weight in weights.items():
        expected = weight + 1 if "norm" in name and "linear_attn" not in name else weight
        if "linear_attn" in name and name.endswith(moved):
            expected = in_turns(expected)
        if name.endswith("out_proj.weight"):
            expected = in_turns(expected.T).T
        if name.endswith("conv1d.weight"):
            expected = np.concatenate([expected[:32], in_turns(expected[32:])])
        if name.endswith("A_log"):
            np.testing.assert_allclose(checkpoint.tensor(name), in_turns(weight), atol=1e-6)
            continue
        if weight.ndim == 2 and not name.endswith(tiny.AS_FLOATS):
            raw = quantize(np.ascontiguousarray(expected), quant)
            expected = dequantize(raw, quant)
            np.testing.assert_array_equal(checkpoint.packed(name).rows, raw.view(np.uint8))
        np.testing.assert_array_equal(checkpoint.tensor(name), expected)
    if kind == "F32":
        logits_are_those_of(hf, checkpoint)


def test_gates_and_ups_of_experts_may_be_one_tensor_in_gguf(tmp_path):
    hf = tiny.model("qwen3_5_moe_text")

    def joined(arrays, settings):
        tensors = stacked(arrays, settings)
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = [tensors.pop(f"{prefix}.{part}_proj.weight") for part in ("gate", "up")]
            tensors[f"{prefix}.gate_up_proj.weight"] = np.concatenate(parts, 1)
        return tensors

    stacked = tiny.stacked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "stacked", joined)
        checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", "F16"))
    for name, weight in tiny.weights(hf).items():
        if ".mlp.experts." in name:
            expected = weight.astype(np.float16).astype(np.float32)
            np.testing.assert_array_equal(checkpoint.tensor(name), expected)
            np.testing.assert_array_equal(checkpoint.packed(name).floats(), expected)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("ssm.inner_size", 65, r"ssm\.inner_size"),
        ("ssm.group_count", 3, "key heads"),
        ("full_attention_interval", 2, r"missing blk\.1\.attn"),
        ("rope.dimension_sections", None, None),
        ("ssm.time_step_floor", 0.5, r"ssm\.time_step_floor"),
    ],
)
def test_gguf_metadata_are_honoured_or_refused(key, value, named, tmp_path):
    metadata = {f"qwen35.{key}": value}
    hf = tiny.model("qwen3_5_text", linear_value_head_dim=16)
    path = tiny.write_gguf(hf, tmp_path / "x.gguf", metadata=metadata)
    if named is None:
        assert GgufCheckpoint(path).architecture.layers == 4
        return
    with pytest.raises(ModelError, match=named):
        GgufCheckpoint(path)


def test_the_newer_experiment_is_refused_by_name(tmp_path):
    hf = tiny.model("qwen3_5_text", linear_value_head_dim=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.GGUF_NAMES, "qwen3_5_text", "qwen4exp")
        patch.setattr(
            tiny, "gguf_name", lambda name, arch, plain=tiny.gguf_name: plain(name, "qwen35")
        )
        path = tiny.write_gguf(hf, tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="architecture 'qwen4exp' does not run here"):
        GgufCheckpoint(path)


def test_a_quantised_multimodal_folder_says_so_outside(tmp_path):
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = json.loads(json.dumps(NESTED | {"quantization_config": method}))
    assert architecture_from(config, tmp_path) == architecture_from(NESTED, tmp_path)
