"""config.json -> Architecture, with transformers' defaults. Keys are honoured or refused."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import ModelError
from forerun.models.arch import Architecture, Family, family_named
from forerun.models.keys import Keys, shown
from forerun.models.rope import Linear, Llama3, Rope, Scaling, Yarn, yarn_attention_factor

_MOST_BYTES = 4 << 20

_CLASSES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_LAYER_KINDS = ("full_attention", "sliding_attention")

_HARMLESS = re.compile(
    r"""
    # who wrote the file and how
    _.* | unsloth.* | .*_version | (torch_)?dtype | name_or_path | tokenizer_class | use_cache
    | is_decoder | is_llama_config | transformers\.js_config | return_dict | torchscript
    | use_bfloat16 | output_(attentions|hidden_states) | model_max_length | .*_token_id
    # training only
    | initializer_range | pretraining_tp | \w+_dropout | \w+_pdrop
    # labels and generation defaults, which a request states itself
    | id2label | label2id | problem_type | task_specific_params | finetuning_task | prefix
    | (max|min)_length | do_sample | early_stopping | num_beams | num_beam_groups | temperature
    | top_[kp] | typical_p | (repetition|length|diversity)_penalty | num_return_sequences
    | (encoder_)?no_repeat_ngram_size | chunk_size_feed_forward
    """,
    re.VERBOSE,
)
"""Keys that never change what the model computes."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of moderate size, or ModelError."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ModelError(f"{path} is larger than any configuration")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def architecture_from(config: Mapping[str, Any], where: Path) -> Architecture:
    """Read a config.json, or raise ModelError naming the key that stands in the way."""
    try:
        return _architecture(Keys(config, "config.json: "))
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error


def _architecture(keys: Keys) -> Architecture:
    family = family_named(keys.get("model_type"), "config.json: model_type")
    keys.require("hidden_act", "silu")
    classes = keys.get("architectures", [_CLASSES[family]])
    if classes != [_CLASSES[family]]:
        raise keys.unfit("architectures", classes, f"[{_CLASSES[family]!r}] to run here")
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers")
    trained = keys.integer("max_position_embeddings")
    default_head_size = 128 if family == "qwen3" else hidden // max(heads, 1)
    head_size = keys.integer("head_dim", default_head_size)
    if family == "qwen2" and head_size * heads != hidden:
        raise keys.unfit("head_dim", head_size, f"{hidden} / {heads} in a Qwen2 model")
    window = _window(keys, family, layers)
    biased = family in ("llama", "qwen3") and keys.flag("attention_bias", False)
    arch = Architecture(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", heads if family == "llama" else None),
        head_size=head_size,
        ffn=keys.integer("intermediate_size"),
        vocab=keys.integer("vocab_size"),
        context=min(trained, window or trained),
        norm_eps=keys.real("rms_norm_eps", 1e-6),
        rope=rope_from(keys, trained),
        qkv_bias=biased or family == "qwen2",
        o_bias=biased,
        mlp_bias=family == "llama" and keys.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        tied_head=keys.flag("tie_word_embeddings", False),
        sliding_window=window,
    )
    keys.refuse_the_rest(_harmless)
    return arch


def _harmless(name: str, value: Any) -> bool:
    """False and empty values switch nothing on; the rest is known by name."""
    return value is False or value in ({}, [], "") or _HARMLESS.fullmatch(name) is not None


def _window(keys: Keys, family: Family, layers: int) -> int | None:
    """The sliding window where some layer has one. Sequences up to its length never notice it."""
    if family == "llama":
        return None
    if family == "mistral":
        none = keys.has("sliding_window") and keys.get("sliding_window") is None
        return None if none else keys.integer("sliding_window", 4096)
    used = keys.flag("use_sliding_window", False)
    window = keys.integer("sliding_window", 4096)
    first = keys.integer("max_window_layers", 28)
    slides = used and first < layers
    kinds = keys.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or any(kind not in _LAYER_KINDS for kind in kinds):
            raise keys.unfit("layer_types", kinds, f"a list of {' or '.join(_LAYER_KINDS)}")
        slides = _LAYER_KINDS[1] in kinds
    if slides and not used:
        raise keys.unfit("use_sliding_window", used, "true where layer_types say so")
    return window if slides else None


def rope_from(keys: Keys, context: int) -> Rope:
    """Both spellings: rope_theta with rope_scaling, and rope_parameters (transformers 5)."""
    scaling, parameters = keys.get("rope_scaling"), keys.get("rope_parameters")
    found = scaling or parameters or {}
    if not isinstance(found, dict):
        raise keys.unfit("rope_scaling", found, "an object")
    inner = Keys(found, f"{keys.prefix}{'rope_scaling' if scaling else 'rope_parameters'}.")
    theta = inner.real("rope_theta", keys.real("rope_theta", 10000.0))
    keys.require("partial_rotary_factor", 1.0)
    inner.require("partial_rotary_factor", 1.0)
    original = inner.integer("original_max_position_embeddings", context)
    original = keys.integer("original_max_position_embeddings", original)
    kind = inner.text("rope_type", inner.text("type", "default"))
    rope = Rope(theta, _scaling(kind, inner, context, original))
    inner.refuse_the_rest(lambda name, value: value is False or name == "finetuned")
    return rope


def _scaling(kind: str, inner: Keys, context: int, original: int) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(inner.real("factor"))
    if kind == "llama3":
        low, high = inner.real("low_freq_factor"), inner.real("high_freq_factor")
        return Llama3(inner.real("factor"), low, high, original)
    if kind != "yarn":
        raise inner.unfit("rope_type", kind, "default, linear, llama3 or yarn")
    factor = inner.real("factor", context / max(original, 1))
    return Yarn(
        factor,
        original,
        inner.real("attention_factor", _attention_factor(inner, factor)),
        inner.real("beta_fast", 0.0) or 32.0,
        inner.real("beta_slow", 0.0) or 1.0,
        inner.flag("truncate", True),
    )


def _attention_factor(inner: Keys, factor: float) -> float:
    """YaRN's factor; with DeepSeek's two scales where both are given."""
    scale, over_all = inner.real("mscale", 0.0), inner.real("mscale_all_dim", 0.0)
    if not (scale and over_all) or factor <= 1:
        return yarn_attention_factor(factor)
    step = yarn_attention_factor(factor) - 1
    below = over_all * step + 1
    if below <= 0:
        raise inner.unfit("mscale_all_dim", shown(over_all), "positive")
    return (scale * step + 1) / below
