"""Small random checkpoints of every family, as folders and as GGUF files, and their oracle.

hf = model("qwen3")                          a transformers model, fp32, random weights
save_folder(hf, path, shards=3)              config.json + safetensors + tokenizer.json
write_gguf(hf, path / "x.gguf", "Q8_0")      the same weights as llama.cpp would store them
reference(checkpoint)                        a transformers model with a checkpoint's weights
"""

import json
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from gguf.quants import quantize
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from transformers.initialization import no_init_weights

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.networks.arch import FAMILIES, Architecture
from forerun.networks.rope import Divided, LinearScaling, Llama3, Yarn

VOCAB = 320
QUANTS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""What the gguf package can write at a row length of 64."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def longrope(pairs: int) -> dict[str, Any]:
    """LongRoPE of heads that rotate so many pairs, for texts of more than 64 tokens."""
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 2.5 * pair for pair in range(pairs)],
        "original_max_position_embeddings": 64,
    }


_NAMES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "gemma2": "Gemma2",
    "gemma3_text": "Gemma3", "mixtral": "Mixtral", "glm4_moe": "Glm4Moe",
    "deepseek_v3": "DeepseekV3", "deepseek_v2": "DeepseekV2", "gpt_oss": "GptOss",
    "phi3": "Phi3", "smollm3": "SmolLM3", "granite": "Granite", "olmo2": "Olmo2",
    "qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe",
    "seed_oss": "SeedOss", "olmo3": "Olmo3", "exaone4": "Exaone4",
    "glm4_moe_lite": "Glm4MoeLite", "minimax_m2": "MiniMaxM2", "ministral3": "Ministral3",
    "lfm2": "Lfm2", "lfm2_moe": "Lfm2Moe", "granitemoehybrid": "GraniteMoeHybrid",
    "gemma4_text": "Gemma4", "hunyuan_v1_dense": "HunYuanDenseV1",
}  # fmt: skip
"""What transformers calls a family; configurations of what is text alone say so."""
_CLASSES = {
    family: (
        getattr(transformers, f"{name}{'Text' * family.endswith('_text')}Config"),
        getattr(transformers, f"{name}ForCausalLM"),
    )
    for family, name in _NAMES.items()
}
assert tuple(_CLASSES) == FAMILIES

LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
"""Families of Llama's block: what the compiled core and every format knows."""

_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
_GROUPED = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3}
_GROUPED |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_hidden_layers": 3}
_GROUPED |= {"routed_scaling_factor": 1.5}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
_LATENT |= {"v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4}
DELTAS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with gated delta nets."""
CONVOLUTIONS = ("lfm2", "lfm2_moe")
"""Families with short convolutions."""
_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
_CONV |= {"norm_eps": 1e-5, "tie_word_embeddings": True}
DEEPSEEKS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Families of DeepSeek's shape."""
_GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.2}
_GRANITE |= {"residual_multiplier": 0.3, "logits_scaling": 2.0}
GRANITES = ("granite", "granitemoehybrid")
"""Families with scales of their own."""
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3_moe": _EXPERTS | {"norm_topk_prob": True},
    # Scores large enough for the cap to bend them.
    "gemma2": {"query_pre_attn_scalar": 4, "attn_logit_softcapping": 5.0, "sliding_window": 24},
    "gemma3_text": {"query_pre_attn_scalar": 24, "sliding_window": 24, "num_hidden_layers": 3},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "glm4_moe": _GROUPED | {"use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": _GROUPED | _LATENT,
    "deepseek_v2": _GROUPED | _LATENT | {"topk_method": "group_limited_greedy"},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": _GRANITE,
    "granitemoehybrid": _GRANITE
    | {"layer_types": ["full_attention"] * 2, "mamba_n_heads": 4, "num_local_experts": 0}
    | {"num_experts_per_tok": 0}
    | {"shared_intermediate_size": 96, "position_embedding_type": "rope"},
    "qwen3_next": _EXPERTS | _DELTA | {"shared_expert_intermediate_size": 48},
    "olmo3": {"sliding_window": 24},
    "exaone4": {"sliding_window": 24, "sliding_window_pattern": 2, "num_hidden_layers": 3},
    "glm4_moe_lite": _GROUPED
    | _LATENT
    | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "ministral3": {
        "rope_parameters": YARN
        | {"original_max_position_embeddings": 512, "rope_theta": 1e4, "mscale": 1.0}
        | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    },
    "gemma4_text": {"global_head_dim": 32, "sliding_window": 24, "num_hidden_layers": 4}
    | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 9.0}
    | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "minimax_m2": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32},
    "lfm2": _CONV | {"intermediate_size": 120, "block_multiple_of": 32},  # 96 in truth.
    "lfm2_moe": _EXPERTS | _CONV | {"num_dense_layers": 1, "routed_scaling_factor": 1.5},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _EXPERTS | _DELTA | {"shared_expert_intermediate_size": 48},
}
"""What differs from the plain numbers; windows are shorter than the tests' texts."""


_PARTIAL = {"glm4_moe": 0.5, "minimax_m2": 0.5, **dict.fromkeys(DELTAS, 0.25)}


def config(family: str, rope: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A configuration of 2 layers (Gemma 3: 3); `rope` is merged into rope_parameters."""
    numbers: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | (rope or {}),
    }
    if "original_max_position_embeddings" in numbers["rope_parameters"] and family == "phi3":
        numbers |= {"original_max_position_embeddings": 64}  # Phi-3's own key goes before.
    if family == "olmo3":  # Only layers without a window have stretched positions.
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        ropes = {"full_attention": numbers["rope_parameters"], "sliding_attention": plain}
        numbers["rope_parameters"] = ropes
    if family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": 3000.0}
        ropes = {"full_attention": numbers["rope_parameters"], "sliding_attention": local}
        numbers["rope_parameters"] = ropes
    if family in CONVOLUTIONS:
        del numbers["rms_norm_eps"]
    if family == "gemma4_text":
        whole = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4}
        local = {"rope_type": "default", "rope_theta": 3000.0}
        numbers["rope_parameters"] = {"full_attention": whole, "sliding_attention": local}
    numbers |= _OF_FAMILY.get(family, {})
    partial = changes.pop("partial", _PARTIAL.get(family))
    if partial is not None:
        numbers["rope_parameters"] |= {"partial_rotary_factor": partial}
    if family == "gemma3_text":
        count = changes.get("num_hidden_layers", numbers["num_hidden_layers"])
        kinds = ("sliding_attention", "full_attention")
        numbers["layer_types"] = [kinds[layer % 2] for layer in range(count)]
    return _CLASSES[family][0](**numbers | changes)


def model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model in fp32; norms and biases are random too."""
    settings = config(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = _made(family, settings)
        randomised(made, family)
    return made


def randomised(made: Any, family: str) -> None:
    """Give a transformers model of the family random weights, norms and biases."""
    with torch.no_grad():
        for name, weight in made.named_parameters():
            spread = 0.2 if weight.dim() == 1 else 1.5 / weight.shape[-1] ** 0.5
            weight.normal_(_centre(family, name), spread)
        for name, buffer in made.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.2)


def _centre(family: str, name: str) -> float:
    """Of random weights: norms that do nothing, and states that are remembered for a while."""
    if name.endswith("A_log"):
        return -3.0
    stored = family in ("gemma2", "gemma3_text", *DELTAS)
    named = ("norm", "router.scale", "per_expert_scale")
    return float(any(part in name for part in named) and (not stored or "linear_attn" in name))


def _made(family: str, settings: Any) -> Any:
    """Eager attention for Gemma 2 and gpt-oss: transformers has caps and sinks nowhere else."""
    settings._attn_implementation = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    return _CLASSES[family][1](settings).eval()


def weights(hf: Any) -> dict[str, np.ndarray]:
    """Canonical name -> float32, a tied head left out."""
    tied = hf.config.tie_word_embeddings
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in hf.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = tensor.detach().float().numpy().copy()
        own = name.replace("shared_experts", "shared_expert").replace("mlp.router", "mlp.gate")
        own = own.replace("mlp.e_score", "mlp.gate.e_score")
        own = own.replace("shared_mlp.output_linear", "mlp.down_proj")
        own = own.replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm")
        if hf.config.model_type in CONVOLUTIONS:
            own = _of_lfm2(own)
        if hf.config.model_type == "gemma4_text":
            own = own.replace("router.proj", "moe.gate").replace("router.", "moe.gate.")
            own = own.replace(".experts.", ".moe.experts.")
        if ".mlp.experts." in own or ".moe.experts." in own:
            tensors |= _experts(own, array, hf.config)
        elif hf.config.model_type in DELTAS and own.split(".")[-2] in _NEXT:
            tensors |= _of_next(own, array, hf.config)
        elif "shared_mlp.input_linear" in own:
            prefix = own.removesuffix("shared_mlp.input_linear.weight")
            parts = zip(("gate", "up"), np.split(array, 2), strict=True)
            tensors |= {f"{prefix}mlp.{part}_proj.weight": rows for part, rows in parts}
        elif "qkv_proj" in own or "mlp.gate_up_proj" in own:
            tensors |= _parts(own, array, hf.config)
        else:
            tensors[own] = _half_split(own, array, hf.config)
    return tensors


_LFM2 = {
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".embedding_norm.": ".norm.",
    "_layernorm.": "_norm.",
    "self_attn.out_proj.": "self_attn.o_proj.",
    "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
    "feed_forward.": "mlp.",
}


def _of_lfm2(name: str) -> str:
    return next((name.replace(own, usual) for own, usual in _LFM2.items() if own in name), name)


def _experts(name: str, array: np.ndarray, settings: Any) -> dict[str, np.ndarray]:
    """All experts' matrices, which transformers keeps as one tensor, one by one."""
    prefix, kind = name.rsplit(".", 1)
    end = "bias" if kind.endswith("_bias") else "weight"
    parts = ("gate_proj", "up_proj") if kind.startswith("gate_up_proj") else ("down_proj",)
    if settings.model_type == "gpt_oss":  # Matrices [in, out], gate and up in turns.
        array = array if end == "bias" else array.swapaxes(1, 2)
        array = np.concatenate([array[:, part :: len(parts)] for part in range(len(parts))], 1)
    return {
        f"{prefix}.{expert}.{part}.{end}": matrix
        for expert, whole in enumerate(array)
        for part, matrix in zip(parts, np.split(whole, len(parts)), strict=True)
    }


def _parts(name: str, array: np.ndarray, settings: Any) -> dict[str, np.ndarray]:
    """Phi-3's matrices that are several in one."""
    query = settings.num_attention_heads * settings.head_dim
    key = settings.num_key_value_heads * settings.head_dim
    fused, cuts = "gate_up_proj", [settings.intermediate_size]
    names = ["gate_proj", "up_proj"]
    if "qkv" in name:
        fused, cuts, names = "qkv_proj", [query, query + key], ["q_proj", "k_proj", "v_proj"]
    whole = zip(names, np.split(array, cuts), strict=True)
    split = {name.replace(fused, part): matrix for part, matrix in whole}
    return {name: _half_split(name, matrix, settings) for name, matrix in split.items()}


_NEXT = ("q_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", *(f"in_proj_{x}" for x in "zba"))


def _of_next(name: str, array: np.ndarray, settings: Any) -> dict[str, np.ndarray]:
    """Qwen3-Next's and Qwen3.5's matrices whose rows are of several parts, head by head in most."""
    prefix, kind, end = name.rsplit(".", 2)
    if kind in ("in_proj_z", "in_proj_b", "in_proj_a"):
        return {f"{prefix}.{kind[-1]}_proj.{end}": array}
    if kind == "in_proj_qkv":
        keys = settings.linear_num_key_heads * settings.linear_key_head_dim
        parts = zip("qkv", np.split(array, [keys, 2 * keys]), strict=True)
        return {f"{prefix}.{part}_proj.{end}": rows for part, rows in parts}
    heads, each = settings.linear_num_key_heads, 1
    if kind == "q_proj":
        heads, names = settings.num_attention_heads, ["q_proj", "gate_proj"]
        widths = [settings.head_dim] * 2
    else:
        each = settings.linear_num_value_heads // heads
        names, widths = ["b_proj", "a_proj"], [each] * 2
    if kind == "in_proj_qkvz":
        names = ["q_proj", "k_proj", "v_proj", "z_proj"]
        value = each * settings.linear_value_head_dim
        widths = [settings.linear_key_head_dim] * 2 + [value] * 2
    whole = array.reshape(heads, sum(widths), *array.shape[1:])
    parts = np.split(whole, np.cumsum(widths)[:-1], 1)
    tensors = {}
    for part, rows in zip(names, parts, strict=True):
        own = f"{prefix}.{part}.{end}"
        tensors[own] = _half_split(own, rows.reshape(-1, *array.shape[1:]), settings)
    return tensors


def _half_split(name: str, array: np.ndarray, settings: Any) -> np.ndarray:
    """Rotated numbers where rope.py has them: half a head apart, over the whole head."""
    kind = name.split(".")[-2]
    partial = settings.rope_parameters.get("partial_rotary_factor", 1.0) == 0.5
    if partial and kind in ("q_proj", "k_proj", "q_norm", "k_norm"):
        each = array.reshape(-1, 4, settings.head_dim // 4, *array.shape[1:])
        return each[:, [0, 2, 1, 3]].reshape(array.shape)
    turned = ("q_proj", "k_proj", "q_norm", "k_norm")
    if settings.model_type in DELTAS and ".self_attn." in name and kind in turned:
        rotated, size = settings.head_dim // 8, settings.head_dim // 2  # A quarter of a head.
        each = array.reshape(-1, settings.head_dim, *array.shape[1:])
        one, two, rest = np.split(each, [rotated, 2 * rotated], 1)
        parts = [one, rest[:, : size - rotated], two, rest[:, size - rotated :]]
        return np.concatenate(parts, 1).reshape(array.shape)
    if settings.model_type not in DEEPSEEKS:
        return array
    heads = {"q_b_proj": settings.num_attention_heads, "q_proj": settings.num_attention_heads}
    heads |= {"kv_a_proj_with_mqa": 1}
    if kind not in heads:
        return array
    each = array.reshape(heads[kind], -1, *array.shape[1:])
    rest, turned = np.split(each, [-settings.qk_rope_head_dim], 1)
    return np.concatenate([rest, turned[:, ::2], turned[:, 1::2]], 1).reshape(array.shape)


def save_folder(hf: Any, folder: Path, shards: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """Write what `save_pretrained` writes, a tokenizer.json beside it. Returns `folder`."""
    total = sum(tensor.numel() for tensor in hf.state_dict().values()) * dtype.itemsize
    stored = copied(hf).to(dtype)
    stored.save_pretrained(folder, max_shard_size=total // shards + 1)
    (folder / "tokenizer.json").write_text(_tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    if dtype == torch.float32:
        _SAVED[folder] = _written(folder), stored
    return folder


def copied(hf: Any) -> Any:
    """A copy that has weights and hooks of its own and shares the rest: a fifth of `deepcopy`."""
    seen: dict[int, Any] = {}

    def weights(kept: dict[str, Any]) -> dict[str, Any]:
        for tensor in kept.values():
            if tensor is not None and id(tensor) not in seen:
                made = tensor.detach().clone()
                parameter = isinstance(tensor, torch.nn.Parameter)
                seen[id(tensor)] = torch.nn.Parameter(made) if parameter else made
        return {name: None if kept[name] is None else seen[id(kept[name])] for name in kept}

    def of(module: Any) -> Any:
        if module is None or id(module) in seen:
            return seen.get(id(module))
        made = seen[id(module)] = type(module).__new__(type(module))
        own = {
            name: copy(value) if isinstance(value, dict | list) else value
            for name, value in vars(module).items()
        }
        own["_parameters"], own["_buffers"] = weights(own["_parameters"]), weights(own["_buffers"])
        own["_modules"] = {name: of(each) for name, each in own["_modules"].items()}
        vars(made).update(own)
        return made

    return of(hf)


_SAVED: dict[Path, tuple[list[int], Any]] = {}
"""When a folder's files were written, and what stands in them."""


def _written(folder: Path) -> list[int]:
    return [file.stat().st_mtime_ns for file in sorted(folder.glob("*.[js]*"))]


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE of exactly VOCAB ids; ids 0 to 2 are special."""
    return tokenizers.Tokenizer.from_str(_tokenizer())


@cache
def _tokenizer() -> str:
    """It as its file has it."""
    text = "the quick brown fox jumps over the lazy dog and then there is another one of them "
    return byte_level_bpe(VOCAB, [text * 20]).to_str(pretty=True)


def byte_level_bpe(vocab: int, texts: list[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE of exactly `vocab` ids, trained on the texts; ids 0 to 2 are special."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    for index in range(made.get_vocab_size(), vocab):
        made.add_tokens([f"<filler {index}>"])
    return made


def write_gguf(
    hf: Any,
    path: Path,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    stored: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write the weights as llama.cpp's converter would; matrices quantised as `kind`.

    metadata  keys to set or, with None, to leave out
    stored    canonical name -> raw bytes and their type, instead of the weight
    extra     more tensors, under their names in the file
    """
    settings, family = hf.config, hf.config.model_type
    if family == "gemma4_text":  # Else transformers shows no size of heads, which differ by layer.
        settings.allow_global_per_layer_attribute_access = True
    name = GGUF_NAMES.get(family, family)
    writer = gguf.GGUFWriter(path, name)
    _add_metadata(writer, hf, metadata or {})
    quant = gguf.GGMLQuantizationType[kind]
    arrays = fused(hf) if family == "phi3" else stacked(weights(hf), settings)
    if family in DELTAS:
        arrays = of_qwen3_next(hf, arrays)
    for source, weight in arrays.items():
        array = interleaved(source, weight, settings) if family in INTERLEAVED else weight
        if name in ("gemma2", "gemma3") and "norm" in source:
            array = array + 1
        if source.endswith("kv_b_proj.weight"):
            add_in_two(writer, source, array, settings, quant)
            continue
        if family in DEEPSEEKS:  # Pairs side by side, as in its folders.
            array = _paired(source, array, settings)
        if family in ("glm4_moe", "minimax_m2"):  # Its own inverse: the rotated numbers first.
            array = _half_split(source, array, settings)
        if stored and source in stored:
            raw, raw_kind = stored[source]
            writer.add_tensor(gguf_name(source, name), raw, raw_dtype=raw_kind)
        elif array.ndim == 1 or source.endswith(AS_FLOATS):
            flat = array.squeeze(1) if array.ndim == 3 else array
            writer.add_tensor(gguf_name(source, name), flat)
        else:
            writer.add_tensor(gguf_name(source, name), quantize(array, quant), raw_dtype=quant)
    for source, array in (extra or {}).items():
        writer.add_tensor(source, array)
    return written(writer, path)


def written(writer: Any, path: Path) -> Path:
    """Write what a GGUFWriter was given into its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_qwen3_next(hf: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As the converters have them: norms with their 1 but a net's own, decay as it is used, and the
    rows of q, k and v of a net head after head; the others as in folders.
    """
    tensors = {name: array for name, array in arrays.items() if "_attn." not in name}
    settings = hf.config
    for name, tensor in hf.state_dict().items():
        array = tensor.detach().float().numpy()
        if "norm" in name and "linear_attn" not in name:
            tensors[name] = array + 1
        elif "in_proj_qkvz" in name:
            parts = _of_next(name, array, settings)
            prefix = name.removesuffix("in_proj_qkvz.weight")
            joined = [parts[f"{prefix}{part}_proj.weight"] for part in "qkv"]
            tensors[f"{prefix}in_proj_qkv.weight"] = np.concatenate(joined)
            tensors[f"{prefix}in_proj_z.weight"] = parts[f"{prefix}z_proj.weight"]
        elif name.endswith(".A_log"):
            tensors[name] = _in_turns(name, -np.exp(array), settings)
        elif name.endswith(".dt_bias"):
            tensors[name.replace("dt_bias", "dt_proj.bias")] = _in_turns(name, array, settings)
        elif "_attn." in name:
            tensors[name] = _in_turns(name, array, settings).squeeze()
    return tensors


def _in_turns(name: str, array: np.ndarray, settings: Any) -> np.ndarray:
    """Value heads as Qwen3.5's converter places them: the first of each key head, then the second
    ones.
    """
    kind = name.partition("linear_attn.")[2].removesuffix(".weight")
    if settings.model_type == "qwen3_next" or kind in ("", "norm"):
        return array
    keys, heads = settings.linear_num_key_heads, settings.linear_num_value_heads
    width = (
        1
        if kind in ("A_log", "dt_bias", "in_proj_b", "in_proj_a")
        else (settings.linear_value_head_dim)
    )
    if kind == "out_proj":
        return _turned(array.T, keys, heads, width).T
    first = 2 * keys * settings.linear_key_head_dim if kind in ("conv1d", "in_proj_qkv") else 0
    return np.concatenate([array[:first], _turned(array[first:], keys, heads, width)])


def _turned(rows: np.ndarray, keys: int, heads: int, width: int) -> np.ndarray:
    each = rows.reshape(keys, heads // keys, width, *rows.shape[1:])
    return each.swapaxes(0, 1).reshape(rows.shape)


def _paired(name: str, array: np.ndarray, settings: Any) -> np.ndarray:
    """Undoes what _half_split does to DeepSeek's."""
    order = _half_split(name, np.arange(len(array)), settings)
    return array[np.argsort(order)]


def add_in_two(writer, source, array, settings, quant) -> None:
    """DeepSeek's kv_b_proj as llama.cpp's converter cuts it."""
    heads, nope = settings.num_attention_heads, settings.qk_nope_head_dim
    each = array.reshape(heads, -1, array.shape[-1])
    halves = {"k_b": each[:, :nope].swapaxes(1, 2), "v_b": each[:, nope:]}
    for part, half in halves.items():
        name = source.replace("self_attn.kv_b_proj", f"self_attn.{part}_proj")
        fits = half.shape[-1] % 32 == 0
        kind = quant if fits else gguf.GGMLQuantizationType.F32
        raw = quantize(np.ascontiguousarray(half), kind)
        writer.add_tensor(gguf_name(name, "deepseek2"), raw, raw_dtype=kind)


GGUF_NAMES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    **dict.fromkeys(DEEPSEEKS, "deepseek2"),
    "gpt_oss": "gpt-oss",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "olmo3": "olmo2",
    "minimax_m2": "minimax-m2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granite",
    "gemma4_text": "gemma4",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
}
"""What llama.cpp calls families that it does not call by their names here."""
INTERLEAVED = ("llama", "mistral", "mixtral", "smollm3", "ministral3", *GRANITES)
"""Whose heads llama.cpp's converter turns (`undo_permute`)."""


AS_FLOATS = (".bias", ".mlp.gate.weight", ".moe.gate.weight", ".shared_expert_gate.weight")
AS_FLOATS += (".conv1d.weight", ".conv.conv.weight")
"""Ends of names of what is never quantised."""


def stacked(arrays: dict[str, np.ndarray], settings: Any) -> dict[str, np.ndarray]:
    """Experts' matrices one above the other, as converters write them."""
    tensors, experts = {}, {}
    for name, array in arrays.items():
        room = ".moe.experts." if ".moe.experts." in name else ".mlp.experts."
        prefix, _, rest = name.partition(room)
        if rest:
            expert, part = rest.split(".", 1)
            experts.setdefault(f"{prefix}{room}{part}", {})[int(expert)] = array
        else:
            tensors[name] = array
    for name, each in experts.items():
        tensors[name] = np.stack([each[expert] for expert in range(len(each))])
    return tensors


def fused(hf: Any) -> dict[str, np.ndarray]:
    """Phi-3's matrices as they are, several in one."""
    return {name: tensor.detach().float().numpy() for name, tensor in hf.state_dict().items()}


def _add_experts(writer: gguf.GGUFWriter, settings: Any) -> None:
    """As the converters of each family do."""
    family = settings.model_type
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if family in GGUF_NAMES and hasattr(settings, name) and family != "mistral":
            writer.add_expert_count(getattr(settings, name))
            writer.add_expert_used_count(settings.num_experts_per_tok)
            break
    if hasattr(settings, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(settings.moe_intermediate_size)
    if family in ("olmo3", "exaone4") and settings.sliding_window:
        writer.add_sliding_window(settings.sliding_window)
        flags = [kind == "sliding_attention" for kind in settings.layer_types]
        writer.add_sliding_window_pattern(flags)
    if family == "olmo3":
        ropes = settings.rope_parameters
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        if factor := ropes["full_attention"].get("attention_factor"):
            writer.add_rope_scaling_attn_factors(factor)
    if family == "ministral3":
        writer.add_attn_temperature_scale(settings.rope_parameters["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(settings.rope_parameters["mscale_all_dim"])
    if family == "minimax_m2":
        writer.add_expert_feed_forward_length(settings.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(settings.intermediate_size)
        writer.add_sliding_window(settings.sliding_window)
    if family in DELTAS:
        writer.add_ssm_conv_kernel(settings.linear_conv_kernel_dim)
        writer.add_ssm_state_size(settings.linear_key_head_dim)
        writer.add_ssm_group_count(settings.linear_num_key_heads)
        writer.add_ssm_time_step_rank(settings.linear_num_value_heads)
        inner = settings.linear_num_value_heads * settings.linear_value_head_dim
        writer.add_ssm_inner_size(inner)
        writer.add_full_attention_interval(4)
    if family in CONVOLUTIONS:
        _add_convolutions(writer, settings)
    if family == "granitemoehybrid":  # As of models that have such layers.
        writer.add_expert_shared_feed_forward_length(settings.shared_intermediate_size)
        writer.add_ssm_conv_kernel(settings.mamba_d_conv)
        writer.add_ssm_inner_size(settings.mamba_expand * settings.hidden_size)
        writer.add_rope_scaling_finetuned(True)
    if family in DELTAS[1:]:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if hasattr(settings, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(settings.shared_expert_intermediate_size)
    if family in ("glm4_moe", *DEEPSEEKS):
        writer.add_expert_group_count(settings.n_group)
        writer.add_expert_group_used_count(settings.topk_group)
        writer.add_expert_shared_count(settings.n_shared_experts)
        writer.add_leading_dense_block_count(settings.first_k_dense_replace)
        softmax, kinds = family == "deepseek_v2", gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SOFTMAX if softmax else kinds.SIGMOID)
        writer.add_expert_weights_scale(settings.routed_scaling_factor)
        writer.add_expert_weights_norm(settings.norm_topk_prob)
    if family == "glm4_moe":
        writer.add_nextn_predict_layers(0)
    if family in DEEPSEEKS:
        _add_latent(writer, settings)


def _add_convolutions(writer: gguf.GGUFWriter, settings: Any) -> None:
    writer.add_shortconv_l_cache(settings.conv_L_cache)
    (values,) = writer.kv_data
    name = GGUF_NAMES.get(settings.model_type, settings.model_type)
    values.pop(f"{name}.attention.head_count_kv")
    attends = [kind == "full_attention" for kind in settings.layer_types]
    writer.add_head_count_kv([settings.num_key_value_heads * flag for flag in attends])
    if settings.model_type == "lfm2":
        values.pop("lfm2.feed_forward_length")
        writer.add_feed_forward_length(96)
    else:
        writer.add_leading_dense_block_count(settings.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_latent(writer: gguf.GGUFWriter, settings: Any) -> None:
    rank, rope = settings.kv_lora_rank, settings.qk_rope_head_dim
    if settings.q_lora_rank:
        writer.add_q_lora_rank(settings.q_lora_rank)
    writer.add_kv_lora_rank(rank)
    (values,) = writer.kv_data
    for name in ("head_count_kv", "key_length", "value_length"):
        values.pop(f"deepseek2.attention.{name}")
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(settings.qk_nope_head_dim + rope)
    writer.add_value_length_mla(settings.v_head_dim)
    if settings.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * settings.rope_parameters["mscale_all_dim"])


def _add_scales(writer: gguf.GGUFWriter, settings: Any) -> None:
    writer.add_attention_scale(settings.attention_multiplier)
    writer.add_embedding_scale(settings.embedding_multiplier)
    writer.add_residual_scale(settings.residual_multiplier)
    writer.add_logit_scale(settings.logits_scaling)


def _add_metadata(writer: gguf.GGUFWriter, hf: Any, changes: dict[str, Any]) -> None:
    settings = hf.config
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    if hasattr(settings, "intermediate_size"):
        writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_key_length(settings.head_dim)
    writer.add_value_length(settings.head_dim)
    convolves = settings.model_type in CONVOLUTIONS
    writer.add_layer_norm_rms_eps(settings.norm_eps if convolves else settings.rms_norm_eps)
    writer.add_vocab_size(settings.vocab_size)
    if settings.model_type == "phi3":
        writer.add_sliding_window(settings.sliding_window or 0)
    if settings.model_type.startswith("gemma"):
        writer.add_sliding_window(settings.sliding_window)
        if settings.model_type == "gemma2":
            writer.add_attn_logit_softcapping(settings.attn_logit_softcapping)
        if settings.final_logit_softcapping:
            writer.add_final_logit_softcapping(settings.final_logit_softcapping)
    if settings.model_type != "gemma4_text":
        _add_experts(writer, settings)
    if settings.model_type in GRANITES:
        _add_scales(writer, settings)
    _add_rope(writer, hf)
    if settings.model_type == "hunyuan_v1_dense":  # Its base is multiplied already.
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(256 * 1024)
    if settings.model_type == "gemma4_text":
        _add_gemma4(writer, settings)
    _add_tokenizer(writer)
    (values,) = writer.kv_data
    for key, value in changes.items():
        values.pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))


def interleaved(name: str, array: np.ndarray, settings: Any) -> np.ndarray:
    """llama.cpp's order of query and key rows: (half, i) -> (i, half) within each head."""
    if ".q_proj." in name:
        heads = settings.num_attention_heads
    elif ".k_proj." in name:
        heads = settings.num_key_value_heads
    else:
        return array
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


@cache
def _gguf_names(arch: str) -> Any:
    names = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(names[arch], 64)


def gguf_name(name: str, arch: str = "qwen3") -> str:
    """Canonical tensor name -> the GGUF one, by the gguf package's own table."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.replace("self_attn.sinks", "self_attn.sinks.weight")
    if arch == "gpt-oss":
        name = name.replace("mlp.gate.", "mlp.router.")
    if arch.startswith("lfm2"):
        name = name.replace("model.norm.", "model.embedding_norm.")
    if arch == "gemma4":
        return _gemma4_name(name)
    mapped = _gguf_names(arch).get_name(name, try_suffixes=(".weight", ".bias"))
    assert mapped is not None, name
    return str(mapped)


def _gemma4_name(name: str) -> str:
    """As the gguf package's table has them, by hand where llama.cpp's converter renames first."""
    named = {
        "moe.gate.weight": "ffn_gate_inp.weight",
        "moe.gate.scale": "ffn_gate_inp.scale",
        "moe.gate.per_expert_scale": "ffn_down_exps.scale",
        "layer_scalar": "layer_output_scale.weight",
        **{
            f"moe.experts.{part}_proj.weight": f"ffn_{part}_exps.weight"
            for part in ("gate", "up", "down")
        },
    }
    for end, stored in named.items():
        if name.endswith(end):
            return f"blk.{name.split('.')[2]}.{stored}"
    mapped = _gguf_names("gemma4").get_name(name, try_suffixes=(".weight",))
    assert mapped is not None, name
    return str(mapped)


def _add_gemma4(writer: gguf.GGUFWriter, settings: Any) -> None:
    """As llama.cpp's converter does."""
    shared, kinds = settings.num_kv_shared_layers, settings.layer_types
    each = [settings.per_layer_config[layer] for layer in range(len(kinds))]
    (values,) = writer.kv_data
    for name in ("head_count_kv", "key_length", "value_length"):
        values.pop(f"gemma4.attention.{name}")
    for name in ("feed_forward_length", "rope.dimension_count", "rope.freq_base"):
        values.pop(f"gemma4.{name}")
    width, wide = settings.intermediate_size, 1 + settings.use_double_wide_mlp
    first = len(kinds) - shared
    writer.add_feed_forward_length([width * (wide if i >= first else 1) for i in range(len(kinds))])
    writer.add_head_count_kv([about.num_key_value_heads for about in each])
    for size, end in (
        (each[kinds.index("full_attention")].head_dim, ""),
        (settings.head_dim, "_swa"),
    ):
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            writer.add_uint32(f"gemma4.{name}{end}", size)
    ropes = settings.rope_parameters
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_float32("gemma4.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(settings.hidden_size_per_layer_input or 0)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if settings.enable_moe_block:
        writer.add_expert_count(settings.num_experts)
        writer.add_expert_used_count(settings.top_k_experts)
        writer.add_expert_feed_forward_length(settings.moe_intermediate_size)
    half = each[kinds.index("full_attention")].head_dim // 2
    divisors = np.full(half, 1e30, np.float32)
    divisors[: int(half * ropes["full_attention"]["partial_rotary_factor"])] = 1
    writer.add_tensor("rope_freqs.weight", divisors)


def _add_rope(writer: gguf.GGUFWriter, hf: Any) -> None:
    rope = hf.config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    turned = rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(hf.config.head_dim * turned))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(hf.model.rotary_emb.attention_scaling)
        for kind in ("short", "long"):
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if rope["rope_type"] == "llama3":
        size = hf.config.head_dim
        plain = rope["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
        divisors = plain / hf.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", divisors.numpy().astype(np.float32))


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    spec = json.loads(tokenizer().to_str())
    added = {token["id"]: token["content"] for token in spec["added_tokens"]}
    texts = {index: text for text, index in spec["model"]["vocab"].items()} | added
    kinds = [3 if index < len(SPECIALS) else 4 if index in added else 1 for index in range(VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts[index] for index in range(VOCAB)])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def reference(checkpoint: Checkpoint, anew: bool = False) -> Any:
    """A transformers model holding the checkpoint's own weights: what logits must equal. anew: read
    from the folder where this process has written it, too.
    """
    arch = checkpoint.architecture
    if arch.family not in LLAMAS:
        when, saved = _SAVED.get(Path(checkpoint.path), (None, None))
        if saved is not None and not anew and when == _written(Path(checkpoint.path)):
            return copied(saved)  # What `from_pretrained` finds takes it seven times as long.
        settings = _CLASSES[arch.family][0].from_pretrained(checkpoint.path)
        made = _made(arch.family, settings)
        return (
            type(made)
            .from_pretrained(checkpoint.path, attn_implementation=settings._attn_implementation)
            .eval()
        )
    first, last = arch.layer_specs[0], arch.layer_specs[-1]
    changes: dict[str, Any] = {}
    if arch.family in ("llama", "qwen3"):
        changes["attention_bias"] = first.qkv_bias
    if arch.family == "llama":
        changes["mlp_bias"] = first.feed_forward.bias
    elif last.attention.window is not None:
        changes["sliding_window"] = last.attention.window
        kinds = ["sliding" if spec.attention.window else "full" for spec in arch.layer_specs]
        if arch.family != "mistral":
            changes |= {"use_sliding_window": True}
            changes |= {"layer_types": [f"{kind}_attention" for kind in kinds]}
    with no_init_weights():  # The checkpoint's follow.
        made = _made(arch.family, _config_of(arch, **changes))
    state = {name: torch.from_numpy(checkpoint.tensor(name).copy()) for name in checkpoint.names()}
    if arch.tied_head:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    made.load_state_dict(state)
    if isinstance(arch.rope.scaling, Divided):
        made.model.rotary_emb.inv_freq = torch.from_numpy(arch.rope.frequencies(arch.head_size))
    return made


def _config_of(arch: Architecture, **changes: Any) -> Any:
    rope: dict[str, Any] = {"rope_theta": arch.rope.theta}
    match arch.rope.scaling:
        case LinearScaling(factor):
            rope |= LINEAR | {"factor": factor}
        case Llama3(factor, low, high, original):
            rope |= LLAMA3 | {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            rope["original_max_position_embeddings"] = original
        case Yarn(factor, original, attention, fast, slow, truncate):
            rope |= YARN | {"factor": factor, "beta_fast": fast, "beta_slow": slow}
            rope |= {"original_max_position_embeddings": original, "truncate": truncate}
            rope["attention_factor"] = attention
    return config(
        arch.family,
        rope,
        vocab_size=arch.vocab,
        hidden_size=arch.hidden,
        intermediate_size=arch.ffn,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        num_key_value_heads=arch.kv_heads,
        head_dim=arch.head_size,
        max_position_embeddings=arch.context,
        rms_norm_eps=arch.norm_eps,
        tie_word_embeddings=arch.tied_head,
        **changes,
    )
