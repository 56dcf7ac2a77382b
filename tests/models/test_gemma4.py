"""Gemma 4's configurations and files: as published, as transformers 5 writes them, and as GGUF."""

import json

import numpy as np
import pytest
import safetensors.numpy
import transformers

from forerun.build.memory import dense_needs
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.errors import ModelError
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.config_json import architecture_from
from forerun.options.config import EngineConfig
from tests.models import tiny
from tests.parity.test_torch_logits import FURTHER
from tests.worlds.checkpoints import holds, logits_are_those_of

ROPES = {
    "full_attention": {
        **{"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"}
    },
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
COMMON = {
    **{"attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False},
    **{"bos_token_id": 2, "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1},
    **{"final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256},
    **{"hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02},
    **{"max_position_embeddings": 131072, "model_type": "gemma4_text"},
    **{"moe_intermediate_size": None, "num_experts": None, "num_global_key_value_heads": None},
    **{"num_kv_shared_layers": 0, "pad_token_id": 0, "rms_norm_eps": 1e-06},
    **{"rope_parameters": ROPES, "sliding_window": 512, "tie_word_embeddings": True},
    **{"top_k_experts": None, "use_bidirectional_attention": None, "use_cache": True},
    **{"use_double_wide_mlp": False, "vocab_size": 262144, "hidden_size_per_layer_input": 0},
    **{"vocab_size_per_layer_input": 262144},
}
E2B = COMMON | {
    **{"hidden_size": 1536, "hidden_size_per_layer_input": 256, "intermediate_size": 6144},
    **{"num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 1},
    **{"num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}
WIDE = {"attention_k_eq_v": True, "sliding_window": 1024, "max_position_embeddings": 262144}
WIDE |= {"use_bidirectional_attention": "vision"}
B31 = (
    COMMON
    | WIDE
    | {
        **{"hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32},
        **{"num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16},
    }
)
A4B = (
    COMMON
    | WIDE
    | {
        **{"enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112},
        **{"moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128},
        **{"num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8},
        "top_k_experts": 8,
    }
)


def whole(text, **changes):
    """A multimodal configuration around a language model's."""
    made = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"]}
    made |= {"text_config": text, "vision_config": {}, "audio_config": {}, "dtype": "bfloat16"}
    made |= {"boi_token_id": 255999, "eoa_token_index": 258883, "image_token_id": 258880}
    made |= {"audio_token_id": 258881, "vision_soft_tokens_per_image": 280}
    return made | {"tie_word_embeddings": True, "transformers_version": "5.5.0"} | changes


@pytest.mark.parametrize(
    ("text", "billions", "caches"),
    [
        (E2B, 4.65, {(1, 256): 12, (1, 512): 3}),
        (B31, 30.7, {(16, 256): 50, (4, 512): 10}),
        (A4B, 25.2, {(8, 256): 25, (2, 512): 5}),
    ],
    ids=["E2B", "31B", "26B-A4B"],
)
def test_configurations_as_published(tmp_path, text, billions, caches):
    arch = architecture_from(whole(text), tmp_path)
    assert arch == architecture_from(text, tmp_path) and arch.family == "gemma4_text"
    assert arch.parameters / 1e9 == pytest.approx(billions, abs=0.05)
    kept = [(cached.kv_heads, cached.head_size) for cached in arch.caches]
    assert {shape: kept.count(shape) for shape in kept} == caches
    assert len(arch.cache_places) == arch.layers
    last = arch.layer_specs[-1]
    assert last.attention.window is None and last.cache.head_size == 512
    assert arch.rope_of(last)[0].frequencies(512).nonzero()[0].tolist() == list(range(64))


def test_a_plan_counts_the_table_of_vectors_as_it_is_stored(tmp_path):
    """With float8 weights, too: like the embedding it is never narrowed."""
    arch = architecture_from(E2B, tmp_path)
    wide, narrow = (
        dense_needs(EngineConfig(model="x", device="cuda", dtype=dtype), arch, None).weights
        for dtype in ("bfloat16", "float8")
    )
    rows = 262144 * (1536 + 35 * 256)
    assert wide == 2 * arch.parameters and narrow == arch.parameters + rows


def test_the_last_layers_read_the_last_of_their_kind(tmp_path):
    specs = architecture_from(E2B, tmp_path).layer_specs
    assert {spec.reads for spec in specs[:15]} == {None}
    assert [spec.reads for spec in specs[15:]] == [13, 13, 13, 13, 14] * 4
    assert [spec.feed_forward.width for spec in specs[14:16]] == [6144, 12288]


def test_what_transformers_writes_is_what_was_published(tmp_path):
    """It has the layers that differ by their numbers."""
    changes = FURTHER["gemma4_text"]["values of keys"]
    written = tiny.config("gemma4_text", **changes).to_dict()
    assert "per_layer_config" in written
    about = {
        str(k): dict(v) if isinstance(v, dict) else v
        for k, v in json.loads(json.dumps(written["per_layer_config"])).items()
    }
    published = {key: value for key, value in written.items() if key != "per_layer_config"}
    published |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    arch = architecture_from(written | {"per_layer_config": about}, tmp_path)
    assert arch == architecture_from(published, tmp_path)
    assert arch.cache_shapes == (CacheLayer(2, 16), CacheLayer(1, 32))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_kv_shared_layers": 33}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input"),
        ({"per_layer_config": {"40": {}}}, "per_layer_config"),
        ({"per_layer_config": {"4": {"sliding_window": 3}}}, "sliding_window"),
        ({"per_layer_config": [1]}, "per_layer_config"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"laurel_rank": 64}, "laurel_rank"),
        ({"rope_parameters": ROPES | {"other": {}}}, "other"),
        ({"head_dim": 0}, "head_size"),
        ({"global_head_dim": 1 << 20}, "head_size"),
    ],
)
def test_what_cannot_be_is_named(tmp_path, changes, named):
    with pytest.raises(ModelError, match=named):
        architecture_from(E2B | changes, tmp_path)


def test_only_the_language_model_of_a_multimodal_folder_is_read(tmp_path):
    """Towers are left out by name, and what makes keys that no layer reads."""
    hf = tiny.model("gemma4_text", tie_word_embeddings=True)
    folder = tiny.save_folder(hf, tmp_path / "text")
    config = json.loads((folder / "config.json").read_text())
    config.pop("architectures")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    moved = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    alone = FolderCheckpoint(folder)
    unread = "model.language_model.layers.3.self_attn."
    moved |= {
        f"{unread}{part}.weight": np.zeros((4, 4), np.float32) for part in ("k_proj", "k_norm")
    }
    for tower in ("vision_tower.a", "audio_tower.b", "embed_vision.c", "embed_audio.d"):
        moved[f"model.{tower}.weight"] = np.zeros(3, np.float32)
    there = tmp_path / "whole"
    there.mkdir()
    safetensors.numpy.save_file(moved, there / "model.safetensors")
    (there / "config.json").write_text(json.dumps(whole(config)))
    source = FolderCheckpoint(there)
    assert source.towers == ("audio_tower", "embed_audio", "embed_vision", "vision_tower")
    assert source.architecture == alone.architecture and set(source.names()) == set(alone.names())
    for name in source.names():
        np.testing.assert_array_equal(source.tensor(name), alone.tensor(name))
    safetensors.numpy.save_file(
        moved | {"model.language_model.layers.0.extra": np.zeros(3, np.float32)},
        there / "model.safetensors",
    )
    with pytest.raises(ModelError, match="extra"):
        FolderCheckpoint(there)


UNIFIED = {
    **{"vocab_size": tiny.VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    **{"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"global_head_dim": 32, "sliding_window": 9, "final_logit_softcapping": 9.0},
}
SHARED = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
SHARED |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    "changes",
    [{"attention_k_eq_v": True, "num_global_key_value_heads": 1}, SHARED],
    ids=["keyed", "shared"],
)
def test_one_that_reads_images_by_itself_is_transformers_own_class(tmp_path, changes):
    """gemma4_unified: in its wrapper, whose embedders of images and sound are left out by name, and
    alone.
    """
    images = {"mm_embed_dim": 8, "mm_posemb_size": 4, "output_proj_dims": 8, "patch_size": 2}
    hf = transformers.Gemma4UnifiedForConditionalGeneration(
        transformers.Gemma4UnifiedConfig(
            text_config=UNIFIED | changes,
            vision_config=images | {"pooling_kernel_size": 1},
            audio_config={"audio_embed_dim": 8},
        )
    ).eval()
    tiny.randomised(hf, "gemma4_text")
    hf.save_pretrained(tmp_path / "whole")
    source = FolderCheckpoint(tmp_path / "whole")
    assert source.towers == ("embed_audio", "embed_vision", "vision_embedder")
    logits_are_those_of(hf, source)
    inner = transformers.Gemma4UnifiedForCausalLM(hf.config.text_config).eval()
    inner.model.load_state_dict(hf.model.language_model.state_dict())
    inner.save_pretrained(tmp_path / "alone")
    logits_are_those_of(inner, FolderCheckpoint(tmp_path / "alone"))


GGUF = ("plain", "values of keys", "experts beside")


@pytest.mark.parametrize("name", GGUF)
def test_files_are_those_of_transformers(tmp_path, name):
    """Also where they hold what makes keys of layers that read those of others."""
    hf = tiny.model("gemma4_text", **FURTHER["gemma4_text"][name])
    extra = {"blk.3.attn_k.weight": np.zeros((4, 64), np.float32)} if name == "plain" else None
    checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", extra=extra))
    holds(checkpoint, hf)
    logits_are_those_of(hf, checkpoint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window_pattern", 6),
        ("attention.head_count_kv", [2, 2]),
        ("attention.value_length_swa", 24),
        ("rope.dimension_count", 16),
        ("attention.shared_kv_layers", 4),
        ("altup.num_inputs", 4),
    ],
)
def test_metadata_that_cannot_be_is_named(tmp_path, key, value):
    hf = tiny.model("gemma4_text")
    path = tiny.write_gguf(hf, tmp_path / "x.gguf", metadata={f"gemma4.{key}": value})
    with pytest.raises(ModelError, match=key.replace(".", r"\.")):
        GgufCheckpoint(path)
