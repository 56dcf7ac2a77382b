"""Converts GGUF metadata to an Architecture. Every key of the model's namespace is supported or
rejected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.checkpoints.gguf.convolution import (
    CONVOLUTIONS,
    attending_heads,
    convolution_layers,
)
from forerun.checkpoints.gguf.delta import DELTA_FAMILIES, delta_layers
from forerun.checkpoints.gguf.experts import experts_of, scored_by_softmax
from forerun.checkpoints.gguf.gemma4 import gemma4_layers, gemma4_sizes
from forerun.checkpoints.gguf.header import GgufFile, Value
from forerun.checkpoints.gguf.latent import latent_attention, latent_of, latent_rope
from forerun.errors import ModelError
from forerun.networks.arch import Architecture, ArchitectureSizes, Family
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import AttentionSpec, Dense, Latent, LayerSpec
from forerun.networks.rope import (
    Divided,
    LinearScaling,
    LongRope,
    Rope,
    Scaling,
    Yarn,
    yarn_attention_factor,
)

_FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "glm4moe": "glm4_moe",
    "deepseek2": "deepseek_v3",
    "gpt-oss": "gpt_oss",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "seed_oss": "seed_oss",
    "minimax-m2": "minimax_m2",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "gemma4": "gemma4_text",
    "hunyuan-dense": "hunyuan_v1_dense",
    "exaone4": "exaone4",
    "mistral3": "ministral3",
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
}
"""general.architecture -> family. Files of Mistral have llama, or mistral3 without Ministral's
scaled queries; Mixtral llama, with experts; DeepSeek V2 the same as V3, with a softmax over the
experts; GLM-4.7-Flash that of V3; OLMo 3 olmo2, with windows; a Granite 4 without Mamba layers that
of Granite. Of multimodal models, the language model.
"""
_LACKS = {
    "llama4": "chunked attention, query and key norms without weights, attention scores scaled by "
    "position, and experts with weighted inputs",
}
"""Features of known architectures that no layer here supports."""
_LATENT: tuple[Family, ...] = ("deepseek_v2", "deepseek_v3")
_EXPERTS: tuple[Family, ...] = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_next"),
    *("qwen3_5_moe_text", "minimax_m2", "lfm2_moe"),
    *_LATENT,
)
_WINDOWS: tuple[Family, ...] = ("llama", "mixtral", "phi3")
"""Architectures with the window, if there is one, in all layers."""
_PARTLY_TURNED: tuple[Family, ...] = ("glm4_moe", "phi3", "minimax_m2", *DELTA_FAMILIES)
"""Architectures in which only a part of each head may be rotated."""
_NO_POSITIONS = 4
"""SmolLM3: llama.cpp assumes, without a key, that every fourth layer has no positions."""
_OF_MAMBA = tuple(
    f"ssm.{name}"
    for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)
"""Keys that Granite 4's converter also writes for models without Mamba layers."""
_WINDOWED = 4
"""OLMo 3, EXAONE 4: in every group of this many layers the last has no window."""
_GROWING = "attention.temperature_scale"
"""Ministral 3: the scaling of queries beyond the original context."""
_NORMED: tuple[Family, ...] = (
    *("qwen3", "qwen3_moe", "hunyuan_v1_dense", "exaone4"),
    *CONVOLUTIONS,
)
"""Architectures with norms on queries and keys, also if the first layer has no attention."""
_QWENS: tuple[Family, ...] = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
_OF_IMAGES = ("rope.dimension_sections", "n_deepstack_layers")
"""Keys without effect on text: all positions of a token of text are equal, and it has no features
of an image.
"""


@dataclass(frozen=True, slots=True)
class _Gemma:
    """llama.cpp's assumptions about a Gemma, for which there are no keys.

    pattern        the last of every `pattern` layers has no window; the others have one
    layers_of_27b  the model with this many layers scales its scores by sqrt(A/H), not sqrt(1/E)
    window, score_cap, logit_cap  defaults; 0 = none
    theta          default of rope.freq_base; None = required
    local_theta    of layers with a window, whose positions are not scaled; None = as in others
    """

    pattern: int
    layers_of_27b: int
    window: int = 0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    theta: float | None = None
    local_theta: float | None = None
    qk_norm: bool = False


_GEMMAS: dict[Family, _Gemma] = {
    "gemma2": _Gemma(2, 46, window=4096, score_cap=50.0, logit_cap=30.0, theta=1e4),
    "gemma3_text": _Gemma(6, 62, local_theta=1e4, qk_norm=True),
}

_DIVISORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
"""Tensors that belong to the rope and not to a layer."""

_NEUTRAL: dict[str, tuple[Value, ...]] = {
    "rope.scale_linear": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth",),
}
"""Keys that change the model unless they have one of these values (or are 0 or False)."""


def architecture_of(file: GgufFile) -> Architecture:
    """Read the architecture. Raises ModelError naming the key that is missing or not supported."""
    metadata = file.metadata
    _check_kind(file)
    name = str(metadata["general.architecture"])
    keys = Keys(below(metadata, f"{name}."), f"{name}.")
    family = _FAMILIES[name]
    if family in _QWENS:
        for key in _OF_IMAGES:
            keys.get(key)
    if family == "llama" and keys.integer("expert_count", 0):
        family = "mixtral"
    if family == "deepseek_v3" and scored_by_softmax(keys):
        family = "deepseek_v2"
    if family == "olmo2" and _window(keys):
        family = "olmo3"
    if family == "ministral3" and not keys.real(_GROWING, 0.0):
        family = "llama"
    fourth = family == "gemma4_text"
    sizes = gemma4_sizes(keys, _vocab(file)) if fourth else _sizes(keys, file, family)
    latent = latent_of(keys, sizes) if family in _LATENT else None
    keys.require("vocab_size", sizes.vocab)
    gemma = _GEMMAS.get(family)
    if fourth:
        layers = gemma4_layers(keys, sizes, file, scaling_of(keys, sizes.context, file))
    else:
        keys.require("attention.value_length", latent.rank if latent else sizes.head_size)
        own = _gemma(keys, sizes, file, gemma) if gemma else None
        layers = own or _plain(keys, sizes, file, family, latent)
    window = _window(keys) if family in _QWENS else None
    arch = Architecture(
        family=family,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        vocab=sizes.vocab,
        # The file does not say which layers of a Qwen have the window: texts stay within it.
        context=min(sizes.context, window or sizes.context),
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        layer_specs=layers,
        tied_head="output.weight" not in file.tensors,
        # The converter adds Gemma's and Qwen3-Next's 1 to the norms that it writes.
        embedding_scale=sizes.hidden**0.5
        if gemma or fourth
        else _factor(keys, family, "embedding_scale"),
        final_softcap=_cap(keys, "final_logit_softcapping", gemma.logit_cap if gemma else 0.0)
        if gemma or fourth
        else None,
        logit_scale=1 / _factor(keys, family, "logit_scale"),
    )
    keys.refuse_the_rest(harmless)
    return arch


ASSISTANT = "gemma4-assistant"
"""general.architecture of Gemma 4's assistant (forerun/drafts/assistant.py)."""


def assistant_of(file: GgufFile) -> tuple[Architecture, int]:
    """Read the decoder of an assistant, as if it had keys and values of its own, and the width of
    its target's hidden states. Raises ModelError naming the key that is missing or not supported.
    """
    if file.metadata.get("general.architecture") != ASSISTANT:
        raise ModelError(f"it is no {ASSISTANT}")
    values, shared = below(file.metadata, f"{ASSISTANT}."), "attention.shared_kv_layers"
    keys = Keys(values, f"{ASSISTANT}.")
    layers, read = keys.integer("block_count"), keys.integer(shared, 0)
    if read not in (0, layers):
        raise keys.unfit(shared, read, f"{layers}: all layers read the target's")
    keys = Keys(values | {shared: 0}, keys.prefix)
    keys.require("nextn_predict_layers", layers)
    sizes = gemma4_sizes(keys, _vocab(file))
    keys.require("vocab_size", sizes.vocab)
    arch = Architecture(
        family="gemma4_text",
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        vocab=sizes.vocab,
        context=sizes.context,
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        layer_specs=gemma4_layers(keys, sizes, file, scaling_of(keys, sizes.context, file)),
        tied_head="output.weight" not in file.tensors,
    )
    hidden = keys.integer("embedding_length_out")
    keys.get("final_logit_softcapping")  # Its logits are not softened, as in llama.cpp.
    keys.refuse_the_rest(harmless)
    return arch, hidden


def _sizes(keys: Keys, file: GgufFile, family: Family) -> ArchitectureSizes:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    mixed, context = family in CONVOLUTIONS, keys.integer("context_length")
    if family == "ministral3":  # As in folders (families_dense.ministral_sizes).
        context = min(context, keys.integer("rope.scaling.original_context_length", context))
    return ArchitectureSizes(
        # Prediction layers are counted, and left aside here.
        layers=keys.integer("block_count") - keys.integer("nextn_predict_layers", 0),
        hidden=hidden,
        heads=heads,
        kv_heads=attending_heads(keys) if mixed else keys.integer("attention.head_count_kv", heads),
        head_size=keys.integer("attention.key_length", hidden // max(heads, 1)),
        vocab=_vocab(file),
        context=context,
    )


def _window(keys: Keys, absent: int = 0) -> int | None:
    return keys.integer("attention.sliding_window", absent) or None


def _cap(keys: Keys, name: str, absent: float) -> float | None:
    return keys.real(name, absent) or None


def _plain(
    keys: Keys,
    sizes: ArchitectureSizes,
    file: GgufFile,
    family: Family,
    latent: Latent | None,
) -> tuple[LayerSpec, ...]:
    """Return the layers of all other families."""
    window = _window(keys) if family in _WINDOWS else None
    width = keys.integer("feed_forward_length", 0 if family in _EXPERTS else None)
    if family == "granite":
        width = keys.integer("expert_shared_feed_forward_length", 0) or width
        for name in _OF_MAMBA:
            keys.get(name)
    own_scale = _factor(keys, family, "attention.scale", sizes.head_size**-0.5)
    normed = family in _NORMED or "blk.0.attn_q_norm.weight" in file.tensors
    wide = family in ("olmo2", "olmo3", "minimax_m2")
    attention = AttentionSpec(own_scale, window)
    if latent is not None:
        attention = latent_attention(keys, latent)
    spec = LayerSpec(
        attention,
        _rope(keys, sizes, file, family, latent),
        Dense(width, "blk.0.ffn_up.bias" in file.tensors),
        norms="post" if family in ("olmo2", "olmo3", "exaone4") else "pre",
        qk_norm=normed and not wide,
        wide_qk_norm=wide,
        late_qk_norm=family == "hunyuan_v1_dense",
        qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        residual=_factor(keys, family, "residual_scale"),
    )
    if family == "smollm3":
        still = replace(spec, rope=Rope(spec.rope.theta, rotated=0))
        return tuple(spec if (i + 1) % _NO_POSITIONS else still for i in range(sizes.layers))
    if family == "olmo3":
        return _olmo3(keys, sizes, spec)
    if family == "exaone4" and (window := _window(keys)):
        local = replace(spec, attention=replace(attention, window=window))
        still = replace(spec, rope=Rope(spec.rope.theta, rotated=0))
        return tuple(local if slide else still for slide in _slides(keys, sizes.layers, _WINDOWED))
    mixed = spec
    if family in _EXPERTS:
        mixed = replace(spec, feed_forward=experts_of(keys, sizes, file, family))
    if family in DELTA_FAMILIES:
        return delta_layers(keys, sizes, family, mixed)
    if family == "gpt_oss":
        return _gpt_oss(keys, sizes, mixed)
    dense = keys.integer("leading_dense_block_count", 0) if family in _EXPERTS else sizes.layers
    layers = tuple(spec if layer < dense else mixed for layer in range(sizes.layers))
    return convolution_layers(keys, sizes, layers) if family in CONVOLUTIONS else layers


def _olmo3(keys: Keys, sizes: ArchitectureSizes, full: LayerSpec) -> tuple[LayerSpec, ...]:
    """Return the layers with a window, and without scaled positions. Both factors that converters
    write are YaRN's whole factor, not an additional one: transformers' `attention_factor`.
    """
    named = ("attn_factor", "yarn_attn_factor")
    factor = next(filter(None, (keys.real(f"rope.scaling.{n}", 0.0) for n in named)), None)
    scaling = full.rope.scaling
    if isinstance(scaling, Yarn) and factor is not None:
        scaling = replace(scaling, attention_factor=factor)
        full = replace(full, rope=replace(full.rope, scaling=scaling))
    attention = replace(full.attention, window=_window(keys))
    rope = Rope(keys.real("rope.freq_base_swa", full.rope.theta))
    local = replace(full, attention=attention, rope=rope)
    slides = _slides(keys, sizes.layers, _WINDOWED)
    return tuple(local if slide else full for slide in slides)


def _slides(keys: Keys, layers: int, every: int) -> list[bool]:
    """Return which layers have a window: by a flag for each if there are any, else all but the last
    of every `every`, which llama.cpp assumes without a key.
    """
    name = "attention.sliding_window_pattern"
    flags = keys.get(name)
    if isinstance(flags, list) and len(flags) == layers and {*flags} <= {True, False}:
        return [bool(flag) for flag in flags]
    keys.require(name, every)
    return [bool((layer + 1) % every) for layer in range(layers)]


def _gpt_oss(keys: Keys, sizes: ArchitectureSizes, mixed: LayerSpec) -> tuple[LayerSpec, ...]:
    """Return the layers with sinks and clamped gates, every other one, from the first on, with a
    window. YaRN's interpolation starts from the original context, which llama.cpp rounds to whole
    dimensions.
    """
    scaling = mixed.rope.scaling
    if isinstance(scaling, Yarn):
        mixed = replace(mixed, rope=replace(mixed.rope, scaling=replace(scaling, truncate=False)))
    scale = mixed.attention.scale
    full = replace(mixed, attention=AttentionSpec(scale, sinks=True), activation="clamped_silu")
    local = replace(full, attention=AttentionSpec(scale, _window(keys), sinks=True))
    return tuple(full if layer % 2 else local for layer in range(sizes.layers))


def _factor(keys: Keys, family: Family, name: str, absent: float = 1.0) -> float:
    """Read one of Granite's own scales; `absent` if the key is missing or 0."""
    return (keys.real(name, 0.0) if family == "granite" else 0.0) or absent


def _rope(
    keys: Keys, sizes: ArchitectureSizes, file: GgufFile, family: Family, latent: Latent | None
) -> Rope:
    """Return the rope of queries and keys; in GLM-4.5 and some Phi models it rotates a part of each
    head.
    """
    if latent is not None:
        return latent_rope(keys, latent, scaling_of(keys, sizes.context, file))
    rotated = keys.integer("rope.dimension_count", sizes.head_size)
    if rotated != sizes.head_size and family not in _PARTLY_TURNED:
        raise keys.unfit("rope.dimension_count", rotated, f"{sizes.head_size} to run here")
    theta, scaling = keys.real("rope.freq_base", 10000.0), scaling_of(keys, sizes.context, file)
    if family == "granite" and not keys.flag("rope.scaling.finetuned", True):
        return Rope(theta, rotated=0)  # llama.cpp's switch of Granite's positions.
    return Rope(theta, scaling, None if rotated == sizes.head_size else rotated)


def _gemma(
    keys: Keys, sizes: ArchitectureSizes, file: GgufFile, about: _Gemma
) -> tuple[LayerSpec, ...]:
    """Return Gemma's layers, as llama.cpp runs them."""
    keys.require("rope.dimension_count", sizes.head_size)
    large = sizes.layers == about.layers_of_27b
    scale = ((sizes.hidden // sizes.heads) if large else sizes.head_size) ** -0.5
    slides = _slides(keys, sizes.layers, about.pattern)
    cap = _cap(keys, "attn_logit_softcapping", about.score_cap) if about.score_cap else None
    rope = Rope(keys.real("rope.freq_base", about.theta), scaling_of(keys, sizes.context, file))
    full = LayerSpec(
        AttentionSpec(scale, softcap=cap),
        rope,
        Dense(keys.integer("feed_forward_length")),
        norms="sandwich",
        activation="gelu_tanh",
        qk_norm=about.qk_norm,
    )
    window = _window(keys, about.window)
    if window is None:
        return (full,) * sizes.layers
    if about.local_theta is not None:
        rope = Rope(keys.real("rope.freq_base_swa", about.local_theta))
    local = replace(full, attention=AttentionSpec(scale, window, cap), rope=rope)
    return tuple(local if slide else full for slide in slides)


def below(metadata: Mapping[str, Value], prefix: str) -> dict[str, Any]:
    """Return the keys that begin with `prefix`, without it, and their values."""
    return {k.removeprefix(prefix): value for k, value in metadata.items() if k.startswith(prefix)}


def _check_kind(file: GgufFile) -> None:
    metadata, path = file.metadata, file.path
    kind = metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise ModelError(f"{path} holds {kind!r}, not a language model")
    name = metadata.get("general.architecture")
    if isinstance(name, str) and name in _LACKS:
        raise ModelError(f"{path}: a {name} model does not run here: it needs {_LACKS[name]}")
    if name == ASSISTANT:
        raise ModelError(
            f"{path} is an assistant, which drafts for a Gemma 4: name it with "
            "--speculative-draft-model-path beside that model"
        )
    if name == "eagle3":
        raise ModelError(
            f"{path} is an EAGLE-3 head: name it with --speculative-draft-model-path beside its "
            "model"
        )
    if not isinstance(name, str) or name not in _FAMILIES:
        raise ModelError(
            f"{path}: the architecture {name!r} does not run here; "
            f"these do: {', '.join(_FAMILIES)} (Mistral calls itself llama)"
        )


def _vocab(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: missing token_embd.weight")
    return embedding.shape[0]


def scaling_of(keys: Keys, context: int, file: GgufFile) -> Scaling | None:
    """Return the scaling of positions for longer contexts. llama.cpp multiplies YaRN's own
    attention factor by `attn_factor`, and divides it by that of the `yarn_log_multiplier`,
    transformers' mscale_all_dim. Llama 3's bands are one divisor per frequency in the tensor
    rope_freqs; LongRoPE's two sets are two tensors, and its factor is `attn_factor`.
    """
    factor = keys.real("rope.scaling.factor", 0.0) or 1.0
    kind = keys.text("rope.scaling.type", "linear" if factor != 1.0 else "none")
    original = keys.integer("rope.scaling.original_context_length", context)
    extra = keys.real("rope.scaling.attn_factor", 1.0)
    fast = keys.real("rope.scaling.yarn_beta_fast", 32.0)
    slow = keys.real("rope.scaling.yarn_beta_slow", 1.0)
    if _LONG in file.tensors or _SHORT in file.tensors:
        return LongRope(_divisors(file, _SHORT), _divisors(file, _LONG), original, extra)
    scaling: Scaling | None = None
    if kind == "linear":
        scaling = LinearScaling(factor) if factor != 1.0 else None
    elif kind == "yarn":
        attention_factor = extra * yarn_attention_factor(factor)
        lasting = keys.real("rope.scaling.yarn_log_multiplier", 0.0)
        attention_factor /= yarn_attention_factor(factor, lasting)
        scaling = Yarn(factor, original, attention_factor, fast, slow)
    elif kind != "none":
        raise ModelError(f"{keys.prefix}rope.scaling.type is {kind!r}; known: none, linear, yarn")
    if extra != 1.0 and kind != "yarn":
        raise ModelError(f"{keys.prefix}rope.scaling.attn_factor is {extra} without YaRN")
    return _with_divisors(scaling, file)


def _with_divisors(scaling: Scaling | None, file: GgufFile) -> Scaling | None:
    if _DIVISORS not in file.tensors:
        return scaling
    if scaling is not None:
        raise ModelError(f"{_DIVISORS} must be the only rope scaling")
    return Divided(_divisors(file, _DIVISORS))


def _divisors(file: GgufFile, name: str) -> tuple[float, ...]:
    stored = file.tensors.get(name)
    if stored is None or stored.kind != "F32" or len(stored.shape) != 1:
        raise ModelError(f"{name} must be an F32 vector")
    return tuple(file.floats(name).tolist())


def harmless(name: str, value: Value) -> bool:
    """Return whether an unread key can be ignored. Zero and False enable nothing, except that they
    disable causal attention; some keys have other values without effect.
    """
    if name in ("attention.causal", "pooling_type"):  # Of embeddings: checkpoints/pooling.py.
        return name == "pooling_type" or value is True
    if not isinstance(value, int | float | str):
        return False
    return value in (0, False) or value in _NEUTRAL.get(name, ())
