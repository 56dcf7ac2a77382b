"""LFM2 and LFM2.5: configurations as published, in every spelling, and what is refused of them."""

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.errors import ModelError
from forerun.hub.catalog import open_model
from forerun.networks.config_json import architecture_from
from forerun.networks.layer_spec import Dense, Experts, Router, ShortConvolution
from forerun.text.tools import LFM2, format_of
from tests.models import tiny
from tests.worlds.checkpoints import holds

ATTENDS = [2, 5, 8, 10, 12, 14]
KINDS = ["full_attention" if layer in ATTENDS else "conv" for layer in range(16)]
AS_LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0,
    "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3,
    "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True,
    "eos_token_id": 7, "full_attn_idxs": ATTENDS, "hidden_size": 2048, "initializer_range": 0.02,
    "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05,
    "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pad_token_id": 0, "rope_theta": 1000000.0, "tie_embedding": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0", "use_cache": True, "use_pos_enc": True,
    "vocab_size": 65536,
}  # fmt: skip
RENAMED = ("block_ff_dim", "tie_embedding", "rope_theta", "full_attn_idxs", "conv_dim_out")
AS_LFM25 = {key: value for key, value in AS_LFM2.items() if key not in RENAMED} | {
    "full_attn_idxs": None, "intermediate_size": 12288, "layer_types": KINDS,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "model_name": "LiquidAI/LFM2.5-1.2B-Thinking", "tie_word_embeddings": True,
}  # fmt: skip
SPARSE = {
    "architectures": ["Lfm2MoeForCausalLM"], "conv_L_cache": 3, "conv_bias": False,
    "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 7168, "max_position_embeddings": 128000, "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
    "num_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0,
    "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_cache": True,
    "use_expert_bias": True, "vocab_size": 65536,
    "layer_types": ["full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)],
}  # fmt: skip


@pytest.mark.parametrize("config", [AS_LFM2, AS_LFM25], ids=["2", "2.5"])
def test_configurations_as_published(config, tmp_path):
    arch = architecture_from(config, tmp_path)
    assert (arch.layers, arch.recurrent_layers, arch.tied_head) == (16, 10, True)
    assert arch.recurrent == ShortConvolution(2048, 3)
    assert {spec.feed_forward for spec in arch.layer_specs} == {Dense(8192)}
    assert (arch.rope.theta, arch.norm_eps, arch.head_size) == (1e6, 1e-5, 64)
    assert 1.16e9 < arch.parameters < 1.18e9
    assert [spec.recurrent is None for spec in arch.layer_specs] == [
        kind == "full_attention" for kind in KINDS
    ]
    assert arch.state_bytes == 10 * 2 * 2048 * 4, "two rows a layer"


def test_experts_as_published(tmp_path):
    arch = architecture_from(SPARSE, tmp_path)
    router = Router("sigmoid", normalised=True, correction=True)
    assert [spec.feed_forward for spec in arch.layer_specs] == [
        *[Dense(7168)] * 2,
        *[Experts(32, 4, 1792, router)] * 22,
    ]
    assert 8.2e9 < arch.parameters < 8.5e9


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"block_ff_dim": 6656}, 4608),
        ({"block_ff_dim": 12289, "block_multiple_of": 100}, 8200),
        ({"block_ffn_dim_multiplier": 1.5}, 12288),
        ({"block_ffn_dim_multiplier": None, "block_ff_dim": 100}, 66),
        ({"block_auto_adjust_ff_dim": False}, 12288),
        ({"intermediate_size": 3}, 8192),
    ],
)
def test_the_width_of_a_feed_forward_is_computed(changes, width, tmp_path):
    """block_ff_dim goes before intermediate_size."""
    arch = architecture_from(AS_LFM2 | changes, tmp_path)
    assert arch.layer_specs[0].feed_forward == Dense(width)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_use_swiglu": False}, "block_use_swiglu"),
        ({"use_pos_enc": False}, "use_pos_enc"),
        ({"block_dim": 1024}, "block_dim"),
        ({"conv_dim": 1024}, "conv_dim"),
        ({"conv_dim_out": 1024}, "conv_dim_out"),
        ({"num_heads": 16}, "num_heads"),
        ({"block_norm_eps": 1e-6}, "block_norm_eps"),
        ({"theta": 1e4}, "theta"),
        ({"full_attn_idxs": [2, 16]}, "full_attn_idxs"),
        ({"layer_types": KINDS[::-1]}, "full_attn_idxs"),
        ({"layer_types": ["conv"] * 16}, "layer_types"),
        ({"full_attn_idxs": []}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 16}, "layer_types"),
        ({"conv_L_cache": 1}, "convolution's window"),
        ({"block_multiple_of": 0}, "block_multiple_of"),
        ({"use_sandwich_norm": True}, "use_sandwich_norm"),
        ({"architectures": ["Lfm3ForCausalLM"]}, "architectures"),
    ],
)
def test_keys_are_honoured_or_refused(changes, named, tmp_path):
    with pytest.raises(ModelError, match=named):
        architecture_from(AS_LFM2 | changes, tmp_path)


@pytest.mark.parametrize("key", ["block_ff_dim", "block_auto_adjust_ff_dim"])
def test_keys_of_the_dense_models_are_refused_of_experts(key, tmp_path):
    with pytest.raises(ModelError, match=key):
        architecture_from(SPARSE | {key: 96}, tmp_path)


def test_folders_name_what_is_missing_as_they_call_it(tmp_path):
    hf = tiny.model("lfm2")
    hf.model.embedding_norm = None
    hf.model.layers[1].self_attn.q_layernorm = None
    tiny.save_folder(hf, tmp_path)
    with pytest.raises(
        ModelError, match=r"layers\.1\.self_attn\.q_layernorm.*model\.embedding_norm"
    ):
        FolderCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("attention.head_count_kv", [0, 2, 0], "head_count_kv"),
        ("attention.head_count_kv", [0, 2, 0, 1], "head_count_kv"),
        ("attention.head_count_kv", [0, 0, 0, 0], "head_count_kv"),
        ("attention.head_count_kv", None, "head_count_kv"),
        ("attention.head_count_kv", [2, 2, 0, 0], r"missing blk\.0\.attn_k"),
        ("shortconv.l_cache", None, r"shortconv\.l_cache is missing"),
        ("shortconv.l_cache", 4, r"blk\.0\.shortconv\.conv"),
        ("attention.sliding_window", 256, "sliding_window"),
    ],
)
def test_gguf_metadata_are_honoured_or_refused(key, value, named, tmp_path):
    path = tmp_path / "x.gguf"
    tiny.write_gguf(tiny.model("lfm2"), path, metadata={f"lfm2.{key}": value})
    with pytest.raises(ModelError, match=named):
        GgufCheckpoint(path)


AS_VL = {
    "architectures": ["Lfm2VlForConditionalGeneration"], "do_image_splitting": True,
    "downsample_factor": 2, "dtype": "bfloat16", "encoder_patch_size": 16, "image_token_id": 396,
    "max_image_tokens": 256, "max_num_patches": 1024, "max_pixels_tolerance": 2.0, "max_tiles": 10,
    "min_image_tokens": 64, "min_tiles": 2, "model_type": "lfm2_vl", "projector_bias": True,
    "projector_hidden_act": "gelu", "projector_hidden_size": 2560, "text_config": AS_LFM2,
    "tile_size": 512, "use_image_special_tokens": True, "use_thumbnail": True,
    "vision_config": {"model_type": "siglip2_vision_model"}, "vision_feature_layer": -1,
}  # fmt: skip


def test_of_a_multimodal_configuration_the_language_model_runs_alone(tmp_path):
    assert architecture_from(AS_VL, tmp_path) == architecture_from(AS_LFM2, tmp_path)
    with pytest.raises(ModelError, match="use_sandwich_norm"):
        architecture_from(AS_VL | {"text_config": AS_LFM2 | {"use_sandwich_norm": 1}}, tmp_path)


@torch.no_grad()
def test_the_language_model_of_a_multimodal_folder_is_that_of_transformers(tmp_path):
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 1, "patch_size": 4, "num_patches": 16}
    settings = transformers.Lfm2VlConfig(
        text_config=tiny.config("lfm2").to_dict(),
        vision_config=vision | {"model_type": "siglip2_vision_model"},
        projector_hidden_size=32,
    )
    made = transformers.Lfm2VlForConditionalGeneration(settings).eval()
    made.save_pretrained(tmp_path)
    checkpoint = FolderCheckpoint(tmp_path)
    assert checkpoint.towers == ("multi_modal_projector", "vision_tower")
    alone = tiny.model("lfm2")
    alone.model.load_state_dict(made.model.language_model.state_dict())
    holds(checkpoint, alone)


@pytest.mark.parametrize("kind", ["", ":Q4_K_M", ":Q8_0"])
def test_the_publishers_files_open_by_their_hub_id(kind, tmp_path, monkeypatch):
    """As its repository has them: one file per kind, a tokenizer like Llama 3's, Python calls."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    name = "LFM2.5-1.2B-Instruct"
    repository = tmp_path / "hub" / f"models--LiquidAI--{name}-GGUF"
    here = repository / "snapshots" / ("0" * 40)
    here.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    shown = "{%- if tools -%}{{ 'List of tools: [' + (tools | join(', ')) + ']' }}{%- endif -%}"
    metadata = {"tokenizer.ggml.pre": "lfm2", "tokenizer.chat_template": shown + tiny.CHAT_TEMPLATE}
    for each in ("F16", "Q4_K_M", "Q8_0"):
        stored = "F16" if each == "F16" else "Q8_0"
        tiny.write_gguf(tiny.model("lfm2"), here / f"{name}-{each}.gguf", stored, metadata)
    model = open_model(f"LiquidAI/{name}-GGUF{kind}", cache_dir=tmp_path)
    assert (model.architecture.family, model.name) == ("lfm2", f"LiquidAI/{name}-GGUF{kind}")
    assert model.path.name == f"{name}-{kind[1:] or 'Q4_K_M'}.gguf"
    assert format_of(model.chat_template) is LFM2


def test_projections_of_few_bits_stay_as_the_file_has_them(tmp_path):
    hf = tiny.model("lfm2")
    checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", "Q8_0"))
    packed = checkpoint.packed("model.layers.0.conv.in_proj.weight")
    assert (packed.kind, len(packed.rows)) == ("Q8_0", 3 * 64)
    kernel = checkpoint.tensor("model.layers.0.conv.conv.weight")
    np.testing.assert_array_equal(kernel, tiny.weights(hf)["model.layers.0.conv.conv.weight"])
