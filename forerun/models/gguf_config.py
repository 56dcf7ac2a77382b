"""GGUF metadata -> Architecture. Every key of the model's namespace is honoured or refused."""

from collections.abc import Mapping
from typing import Any

from forerun.errors import ModelError
from forerun.models.arch import Architecture, Family
from forerun.models.gguf_header import GgufFile, Value
from forerun.models.keys import Keys
from forerun.models.rope import Divided, Linear, Rope, Scaling, Yarn, yarn_attention_factor

_FAMILIES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""general.architecture -> family. Mistral's files call themselves llama."""

_NEUTRAL: dict[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "rope.scale_linear": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth",),
}
"""Keys that change the model unless they have one of these values (or are 0 or False)."""


def architecture_of(file: GgufFile) -> Architecture:
    """Read the architecture, or raise ModelError naming the key that stands in the way."""
    metadata = file.metadata
    _check_kind(file)
    name = str(metadata["general.architecture"])
    keys = Keys(_below(metadata, f"{name}."), f"{name}.")
    head_count = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_size = keys.integer("attention.key_length", hidden // max(head_count, 1))
    keys.require("attention.value_length", head_size)
    keys.require("rope.dimension_count", head_size)
    context = keys.integer("context_length")
    window = keys.integer("attention.sliding_window", 0) or None
    vocab = _vocab(file)
    keys.require("vocab_size", vocab)
    family = _FAMILIES[name]
    arch = Architecture(
        family=family,
        layers=keys.integer("block_count"),
        hidden=hidden,
        heads=head_count,
        kv_heads=keys.integer("attention.head_count_kv", head_count),
        head_size=head_size,
        ffn=keys.integer("feed_forward_length"),
        vocab=vocab,
        context=min(context, window or context),
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        rope=Rope(keys.real("rope.freq_base", 10000.0), _scaling(keys, context, file)),
        qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=family == "qwen3",
        tied_head="output.weight" not in file.tensors,
        sliding_window=window,
    )
    keys.refuse_the_rest(_harmless)
    return arch


def _below(metadata: Mapping[str, Value], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): value for k, value in metadata.items() if k.startswith(prefix)}


def _check_kind(file: GgufFile) -> None:
    metadata, path = file.metadata, file.path
    kind = metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise ModelError(f"{path} holds {kind!r}, not a language model")
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _FAMILIES:
        raise ModelError(
            f"{path}: the architecture {name!r} does not run here; "
            f"these do: {', '.join(_FAMILIES)} (Mistral calls itself llama)"
        )
    parts = metadata.get("split.count", 0)
    if not isinstance(parts, int) or parts > 1:
        raise ModelError(f"{path} is one of {parts} parts; merge them with llama-gguf-split first")


def _vocab(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: missing token_embd.weight")
    return embedding.shape[0]


def _scaling(keys: Keys, context: int, file: GgufFile) -> Scaling | None:
    """How the context was stretched.

    llama.cpp multiplies YaRN's own attention factor by `attn_factor`; Llama 3's bands come as
    one divisor per frequency in the tensor rope_freqs.
    """
    factor = keys.real("rope.scaling.factor", 0.0) or 1.0
    kind = keys.text("rope.scaling.type", "linear" if factor != 1.0 else "none")
    original = keys.integer("rope.scaling.original_context_length", context)
    extra = keys.real("rope.scaling.attn_factor", 1.0)
    fast = keys.real("rope.scaling.yarn_beta_fast", 32.0)
    slow = keys.real("rope.scaling.yarn_beta_slow", 1.0)
    scaling: Scaling | None = None
    if kind == "linear":
        scaling = Linear(factor) if factor != 1.0 else None
    elif kind == "yarn":
        scaling = Yarn(factor, original, extra * yarn_attention_factor(factor), fast, slow)
    elif kind != "none":
        raise ModelError(f"{keys.prefix}rope.scaling.type is {kind!r}; known: none, linear, yarn")
    if extra != 1.0 and kind != "yarn":
        raise ModelError(f"{keys.prefix}rope.scaling.attn_factor is {extra} without YaRN")
    return _with_divisors(scaling, file)


def _with_divisors(scaling: Scaling | None, file: GgufFile) -> Scaling | None:
    stored = file.tensors.get("rope_freqs.weight")
    if stored is None:
        return scaling
    if stored.kind != "F32" or len(stored.shape) != 1 or scaling is not None:
        raise ModelError("rope_freqs.weight must be an F32 vector, and the only rope scaling")
    return Divided(tuple(file.floats("rope_freqs.weight").tolist()))


def _harmless(name: str, value: Value) -> bool:
    """Zero and False switch nothing on; some keys have other values that change nothing."""
    if not isinstance(value, int | float | str):
        return False
    return value in (0, False) or value in _NEUTRAL.get(name, ())
