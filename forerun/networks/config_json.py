"""Converts config.json to an Architecture, with transformers' defaults. Every key is either
supported or rejected.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ModelError, reason_of
from forerun.networks.arch import FAMILIES, Architecture, Family
from forerun.networks.families import READERS
from forerun.networks.keys import Keys

_MOST_BYTES = 4 << 20
_ANNOUNCED = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys with the number of prediction layers."""

_HARMLESS = re.compile(
    r"""
    # who wrote the file and how
    _.* | unsloth.* | .*_version | (torch_)?dtype | name_or_path | model_name
    | tokenizer_class | use_cache
    | is_decoder | is_llama_config | transformers\.js_config | return_dict | torchscript
    | use_bfloat16 | output_(attentions|hidden_states|router_logits) | model_max_length
    | .*_token_id | cache_implementation | auto_map | attn_implementation
    # training only
    | initializer_range | loss_type
    | router_aux_loss_coef | pretraining_tp | \w+_dropout | \w+_pdrop
    # labels and generation defaults, which a request states itself
    | id2label | label2id | problem_type | task_specific_params | finetuning_task | prefix
    | (max|min)_length | do_sample | early_stopping | num_beams | num_beam_groups | temperature
    | top_[kp] | typical_p | (repetition|length|diversity)_penalty | num_return_sequences
    | (encoder_)?no_repeat_ngram_size | chunk_size_feed_forward
    """,
    re.VERBOSE,
)
"""Keys that never change what the model computes."""

_ALIASES: dict[str, Family] = {
    "kimi_k2": "deepseek_v3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma4_unified_text": "gemma4_text",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Names of configurations that another family's reader reads; Qwen3.5's without a text_config."""

_MIMO = {"architectures": ["MiMoForCausalLM"], "attention_bias": True, "use_mrope": False}
"""Keys of MiMo's configuration that repeat what Qwen2's reader assumes."""

_LFM2 = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
_DENSE_LFM2 = _LFM2 | {"block_ff_dim": "intermediate_size"}
"""LFM2's names of keys that have other names elsewhere. If both are present, LFM2's own applies, as
in transformers.
"""


@dataclass(frozen=True, slots=True)
class _Indexed:
    """A model of DeepSeek-V3's shape with sparse attention: of more than index_topk tokens an
    indexer chooses as many. Up to that length it attends to all tokens, as DeepSeek-V3 does.

    class_name  the only value of `architectures`
    defaults    transformers' defaults that differ from DeepSeek-V3's
    """

    class_name: str
    defaults: Mapping[str, Any]


INDEXED = {
    "deepseek_v32": _Indexed("DeepseekV32ForCausalLM", {}),
    "glm_moe_dsa": _Indexed(
        "GlmMoeDsaForCausalLM",
        {
            **{"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "q_lora_rank": 2048},
            **{"qk_nope_head_dim": 192, "v_head_dim": 256},
        },
    ),
}
"""By model_type."""
_OF_INDEXERS = (
    *("index_topk", "index_head_dim", "index_n_heads", "indexer_types", "index_topk_freq"),
    *("index_topk_pattern", "index_skip_topk_offset", "index_share_for_mtp_iteration"),
    *("indexer_rope_interleave", "layer_types", "mlp_layer_types"),
)


def _densely(config: Mapping[str, Any], about: _Indexed) -> Mapping[str, Any]:
    """Convert such a configuration to DeepSeek-V3's, for texts so short that the indexer chooses
    all tokens. Raises ModelError for unknown kinds of layers.
    """
    keys = Keys({**about.defaults, **config}, "config.json: ")
    classes, layers = keys.get("architectures"), keys.integer("num_hidden_layers")
    if classes not in (None, [about.class_name]):
        raise keys.unfit("architectures", classes, f"[{about.class_name!r}] to run here")
    if {*map(str, keys.get("layer_types", []))} - {"indexed_attention"}:
        raise keys.unfit("layer_types", keys.get("layer_types"), "indexed_attention everywhere")
    dense = keys.integer("first_k_dense_replace", 3)
    kinds = keys.get("mlp_layer_types")
    if kinds is not None:
        dense = kinds.count("dense") if isinstance(kinds, list) else dense
        if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise keys.unfit(
                "mlp_layer_types", kinds, f"dense layers, then sparse, {layers} in all"
            )
    context = keys.integer("max_position_embeddings")
    rest = {k: v for k, v in {**about.defaults, **config}.items() if k not in _OF_INDEXERS}
    return rest | {
        **{"model_type": "deepseek_v3", "architectures": None, "first_k_dense_replace": dense},
        "max_position_embeddings": min(context, keys.integer("index_topk", 2048)),
        "original_max_position_embeddings": keys.get("original_max_position_embeddings", context),
    }


def read_json(path: Path, max_bytes: int = _MOST_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file of at most `max_bytes` bytes. Raises ModelError if the file is
    larger, cannot be read, or contains no object.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise ModelError(
                f"{path} is larger than {max_bytes >> 20} MiB, the limit for this file"
            )
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {reason_of(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def architecture_from(config: Mapping[str, Any], where: Path) -> Architecture:
    """Read a config.json into an Architecture. Raises ModelError naming the key that is missing or
    not supported.
    """
    try:
        return _architecture(Keys(_plain_name(config), "config.json: "))
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error


_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""transformers' defaults for keys that a multimodal Gemma 3 leaves out of its text_config."""

_UNIFIED = {"hidden_size_per_layer_input": 0, "sliding_window": 1024}
"""Defaults that differ in a Gemma 4 that reads images and sound by itself (12B)."""

_OUTSIDE = (
    *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index"),
    *("image_token_index", "quantization_config", "quantization", "projector_hidden_act"),
    "vision_feature_layer",
    *("multimodal_projector_bias", "spatial_merge_size", "audio_config", "eoa_token_index"),
    "vision_soft_tokens_per_image",
    *("downsample_factor", "tile_size"),
    *("projector_bias", "projector_hidden_size", "projector_use_layernorm", "encoder_patch_size"),
    *("do_image_splitting", "use_thumbnail", "use_image_special_tokens", "max_pixels_tolerance"),
    *("min_tiles", "max_tiles", "min_image_tokens", "max_image_tokens", "max_num_patches"),
)
"""Keys of a multimodal configuration about images and sound, or about the files."""


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """A multimodal configuration, of which only the language model runs here.

    class_name  the only value of `architectures`
    inner       possible families of the language model; the first is the default
    defaults    transformers' defaults of keys that text_config may leave out
    tied        default of tie_word_embeddings, whatever text_config has; a head in the files that
                differs from the embedding is used anyway
    """

    class_name: str
    inner: tuple[str, ...]
    defaults: Mapping[str, Any]
    tied: bool = False


_WRAPPERS = {
    "gemma3": _Wrapper("Gemma3ForConditionalGeneration", ("gemma3_text",), _GEMMA3, tied=True),
    "qwen3_5": _Wrapper("Qwen3_5ForConditionalGeneration", ("qwen3_5_text",), {}),
    "qwen3_5_moe": _Wrapper("Qwen3_5MoeForConditionalGeneration", ("qwen3_5_moe_text",), {}),
    "qwen2_vl": _Wrapper("Qwen2VLForConditionalGeneration", ("qwen2_vl_text",), {}),
    "qwen2_5_vl": _Wrapper("Qwen2_5_VLForConditionalGeneration", ("qwen2_5_vl_text",), {}),
    "qwen3_vl": _Wrapper("Qwen3VLForConditionalGeneration", ("qwen3_vl_text",), {}),
    "qwen3_vl_moe": _Wrapper(
        "Qwen3VLMoeForConditionalGeneration", ("qwen3_vl_moe_text",), {"norm_topk_prob": True}
    ),
    "gemma4": _Wrapper("Gemma4ForConditionalGeneration", ("gemma4_text",), {}, tied=True),
    "gemma4_unified": _Wrapper(
        "Gemma4UnifiedForConditionalGeneration", ("gemma4_unified_text",), _UNIFIED, tied=True
    ),
    "mistral3": _Wrapper(
        "Mistral3ForConditionalGeneration", ("ministral3", "mistral"), {}, tied=True
    ),
    "lfm2_vl": _Wrapper("Lfm2VlForConditionalGeneration", ("lfm2",), {}, tied=True),
}
"""By model_type."""


_FLAT = ("qwen2_vl", "qwen2_5_vl")


def with_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Qwen2-VL or Qwen2.5-VL as transformers writes it today, with a
    text_config; as it is published its keys are beside those of images. Any other unchanged.
    """
    if config.get("model_type") not in _FLAT or "text_config" in config:
        return config
    outer = ("architectures", "model_type", "tie_word_embeddings", *_OUTSIDE)
    return {
        **{key: value for key, value in config.items() if key in outer},
        "text_config": {key: value for key, value in config.items() if key not in outer},
    }


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a multimodal checkpoint's language model. Raises ModelError for
    an unknown one, and for a key that may change the model.
    """
    keys = Keys(config, "config.json: ")
    name = keys.get("model_type")
    if isinstance(name, str) and name.startswith("gemma4_") and name.endswith("_assistant"):
        raise ModelError(
            "an assistant drafts for a Gemma 4: name it with --speculative-draft-model-path beside "
            "that model"
        )
    if not isinstance(name, str) or name not in _WRAPPERS:
        known = ", ".join(_WRAPPERS)
        raise ModelError(
            f"config.json: multimodal checkpoints of model_type {name!r} are not supported; the "
            f"language models of these are: {known}"
        )
    wrapper = _WRAPPERS[name]
    classes = keys.get("architectures")
    if classes != [wrapper.class_name]:
        raise keys.unfit("architectures", classes, f"[{wrapper.class_name!r}] to run here")
    inner = dict(keys.get("text_config"))
    if inner.setdefault("model_type", wrapper.inner[0]) not in wrapper.inner:
        wanted = " or ".join(wrapper.inner)
        raise keys.unfit("text_config.model_type", inner["model_type"], wanted)
    for key in _OUTSIDE:
        keys.get(key)
    inner_ties = inner.get("tie_word_embeddings") is True
    ties = keys.flag("tie_word_embeddings", wrapper.tied or inner_ties)
    keys.refuse_the_rest(harmless)
    return _plain_name({**wrapper.defaults, **inner, "tie_word_embeddings": ties})


def _plain_name(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a configuration to the form of the family whose reader is used. MiMo is Qwen2 with
    prediction layers (arXiv 2505.07608, section 2), Kimi K2 has DeepSeek-V3's shape: their
    configurations use other names. The code that they name (auto_map) is never run.
    """
    if isinstance(config.get("text_config"), dict):
        return _text_of(config)
    name = config.get("model_type")
    if name == "gemma4_unified_text":
        if config.get("architectures") == ["Gemma4UnifiedForCausalLM"]:
            config = {**config, "architectures": None}
        config = {**_UNIFIED, **config}
    if isinstance(name, str) and name in _ALIASES:
        return {**config, "model_type": _ALIASES[name]}
    if isinstance(name, str) and name in INDEXED:
        return _densely(config, INDEXED[name])
    if name in ("lfm2", "lfm2_moe"):
        names = _DENSE_LFM2 if name == "lfm2" else _LFM2
        own = {names[key]: config[key] for key in names if config.get(key) is not None}
        return {key: value for key, value in config.items() if key not in names} | own
    if name != "mimo":
        return config
    keys = Keys(config, "config.json: ")
    for key, value in _MIMO.items():
        if config.get(key, value) != value:
            raise keys.unfit(key, config[key], f"{value!r} in a MiMo model")
    rest = {key: value for key, value in config.items() if key not in _MIMO}
    return rest | {"model_type": "qwen2"}


def _architecture(keys: Keys) -> Architecture:
    for name in _ANNOUNCED:
        keys.get(name)  # The tensors determine how many there are.
    for name in ("quantization", "quantization_config"):
        keys.get(name)  # Of the files, not of the model: checkpoints/quantised.
    family = keys.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"config.json: model_type {family!r} is not supported; these families are: {known}"
        )
    arch = READERS[family].read(family, keys)
    keys.refuse_the_rest(harmless)
    return arch


def announced_layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of prediction layers that a configuration declares; None if it declares
    none.
    """
    inner = config.get("text_config")
    for source in (config, inner if isinstance(inner, dict) else {}):
        for name in _ANNOUNCED:
            if isinstance(count := source.get(name), int):
                return count
    return None


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the names under `architectures`; [] if there is no such list."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def harmless(name: str, value: Any) -> bool:
    """Return whether an unread key can be ignored: it is false or empty, so it enables nothing
    (unless it disables causal attention), or known not to change the model.
    """
    if name == "is_causal":
        return value is True
    return value is False or value in ({}, [], "") or _HARMLESS.fullmatch(name) is not None
