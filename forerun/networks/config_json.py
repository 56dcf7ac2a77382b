"""config.json -> Architecture, with transformers' defaults. Keys are honoured or refused."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import ModelError
from forerun.networks.arch import FAMILIES, Architecture
from forerun.networks.families import READERS
from forerun.networks.keys import Keys

_MOST_BYTES = 4 << 20

_HARMLESS = re.compile(
    r"""
    # who wrote the file and how
    _.* | unsloth.* | .*_version | (torch_)?dtype | name_or_path | tokenizer_class | use_cache
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

_MIMO = {"architectures": ["MiMoForCausalLM"], "attention_bias": True, "use_mrope": False}
"""Keys of MiMo's configuration that repeat what Qwen2's code takes for granted."""


def read_json(path: Path, most: int = _MOST_BYTES) -> dict[str, Any]:
    """The JSON object that a file of at most `most` bytes holds. Raises ModelError if it is
    larger, cannot be read, or is no object.
    """
    try:
        if path.stat().st_size > most:
            raise ModelError(f"{path} has more than {most >> 20} MiB, which is not read")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def architecture_from(config: Mapping[str, Any], where: Path) -> Architecture:
    """Read a config.json, or raise ModelError naming the key that stands in the way."""
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
"""What a multimodal Gemma 3 leaves out of its text_config: transformers' defaults."""

_OUTSIDE = (
    *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index"),
    *("image_token_index", "tie_word_embeddings"),
)
"""Keys of a multimodal configuration about images, or repeated by text_config."""


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of a multimodal Gemma 3's language model, which runs here alone."""
    keys = Keys(config, "config.json: ")
    keys.require("model_type", "gemma3")
    classes = keys.get("architectures")
    if classes != ["Gemma3ForConditionalGeneration"]:
        raise keys.unfit("architectures", classes, "['Gemma3ForConditionalGeneration'] to run here")
    inner = keys.get("text_config")
    for name in _OUTSIDE:
        keys.get(name)
    keys.refuse_the_rest(harmless)
    ties = config.get("tie_word_embeddings", True)
    return {**_GEMMA3, "model_type": "gemma3_text", "tie_word_embeddings": ties, **inner}


def _plain_name(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration as the family's own code has it. MiMo is Qwen2 with prediction
    layers (arXiv 2505.07608, section 2), Kimi K2 has DeepSeek-V3's shape: their configurations have
    other names for that. The code that they name (auto_map) is never run.
    """
    if isinstance(config.get("text_config"), dict):
        return _text_of(config)
    if config.get("model_type") == "kimi_k2":
        return {**config, "model_type": "deepseek_v3"}
    if config.get("model_type") != "mimo":
        return config
    keys = Keys(config, "config.json: ")
    for name, value in _MIMO.items():
        if config.get(name, value) != value:
            raise keys.unfit(name, config[name], f"{value!r} in a MiMo model")
    kept = {name: value for name, value in config.items() if name not in _MIMO}
    return kept | {"model_type": "qwen2"}


def _architecture(keys: Keys) -> Architecture:
    keys.get("num_nextn_predict_layers")  # Their tensors say how many there are.
    keys.get("quantization_config")  # Of the files, not of the model: models/quantised.
    family = keys.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"config.json: model_type: {family!r} does not run here; these do: {known}"
        )
    arch = READERS[family].read(family, keys)
    keys.refuse_the_rest(harmless)
    return arch


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The names under `architectures`; none if there is no such list."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def harmless(name: str, value: Any) -> bool:
    """Whether an unknown setting can be passed over: false and empty values switch nothing on, some
    are known by name.
    """
    return value is False or value in ({}, [], "") or _HARMLESS.fullmatch(name) is not None
