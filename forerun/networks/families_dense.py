"""Reads the layers of families without experts from config.json, with transformers' defaults."""

from dataclasses import replace

from forerun.networks.arch import ArchitectureSizes
from forerun.networks.family_parts import (
    FULL,
    SLIDING,
    Layers,
    optional_integer,
    plain_attention,
    slides_of,
    upper_windows,
    uses_windows,
)
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import AttentionSpec, Dense, LayerSpec
from forerun.networks.rope import Rope
from forerun.networks.rope_config import OF_IMAGES, rope_from, rope_of_fixed_alpha, ropes_by_kind


def llama(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Llama 2 and 3 (arXiv 2407.21783), all alike. Raises ModelError for a key
    that is missing or cannot be used.
    """
    biased = keys.flag("attention_bias", False)
    feed_forward = Dense(keys.integer("intermediate_size"), keys.flag("mlp_bias", False))
    rope = rope_from(keys, sizes.context)
    spec = LayerSpec(plain_attention(sizes), rope, feed_forward, qkv_bias=biased, o_bias=biased)
    return (spec,) * sizes.layers


def mistral(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Mistral (arXiv 2310.06825), all with its window, if there is one. Raises
    ModelError for a key that is missing or cannot be used.
    """
    window = optional_integer(keys, "sliding_window", 4096)
    feed_forward = Dense(keys.integer("intermediate_size"))
    rope = rope_from(keys, sizes.context)
    return (LayerSpec(plain_attention(sizes, window), rope, feed_forward),) * sizes.layers


_GROWING = "llama_4_scaling_beta"


def ministral_sizes(keys: Keys) -> ArchitectureSizes:
    """Return the sizes of Ministral 3, limited to its original context: beyond that its queries are
    scaled by position, which no layer here supports. Raises ModelError for a key that is missing or
    cannot be used.
    """
    context = keys.integer("max_position_embeddings")
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if isinstance(rope, dict) and rope.get(_GROWING):
        original = rope.get("original_max_position_embeddings", context)
        context = min(context, original) if isinstance(original, int) else context
    return ArchitectureSizes(
        layers=keys.integer("num_hidden_layers"),
        hidden=keys.integer("hidden_size"),
        heads=keys.integer("num_attention_heads"),
        kv_heads=keys.integer("num_key_value_heads"),
        head_size=keys.integer("head_dim", 128),
        vocab=keys.integer("vocab_size"),
        context=context,
    )


def ministral3(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of Ministral 3: Mistral's, with scaled positions. Raises ModelError for a key
    that is missing or cannot be used.
    """
    window = optional_integer(keys, "sliding_window", None)
    rope = rope_from(keys, sizes.context, theta=1e6, ignored=(_GROWING, "max_position_embeddings"))
    feed_forward = Dense(keys.integer("intermediate_size"))
    return (LayerSpec(plain_attention(sizes, window), rope, feed_forward),) * sizes.layers


def qwen2(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Qwen2 (arXiv 2407.10671): biases on q, k and v, windows in the upper
    layers if used. Raises ModelError for a key that is missing or cannot be used.
    """
    if sizes.head_size * sizes.heads != sizes.hidden:
        wanted = f"{sizes.hidden} / {sizes.heads} in a Qwen2 model"
        raise keys.unfit("head_dim", sizes.head_size, wanted)
    feed_forward = Dense(keys.integer("intermediate_size"))
    rope = rope_from(keys, sizes.context, ignored=OF_IMAGES)
    return tuple(
        LayerSpec(plain_attention(sizes, window), rope, feed_forward, qkv_bias=True)
        for window in upper_windows(keys, sizes)
    )


def qwen3(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Qwen3 (arXiv 2505.09388): norms on each head before the rotation. Raises
    ModelError for a key that is missing or cannot be used.
    """
    biased = keys.flag("attention_bias", False)
    rope = rope_from(keys, sizes.context, ignored=OF_IMAGES)
    feed_forward = Dense(keys.integer("intermediate_size"))
    return tuple(
        LayerSpec(
            plain_attention(sizes, window),
            rope,
            feed_forward,
            qk_norm=True,
            qkv_bias=biased,
            o_bias=biased,
        )
        for window in upper_windows(keys, sizes)
    )


def phi3(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Phi-3 and Phi-4 (arXiv 2412.08905), all alike. Raises ModelError for a key
    that is missing or cannot be used.
    """
    keys.get("auto_map")  # Code that is never run.
    for name in ("full_attn_mod", "interpolate_factor"):
        keys.require(name, 1)  # Phi-4-mini writes them; no code reads them.
    window = optional_integer(keys, "sliding_window", None)
    rope = rope_from(keys, sizes.context, head_size=sizes.head_size)
    feed_forward = Dense(keys.integer("intermediate_size"))
    return (LayerSpec(plain_attention(sizes, window), rope, feed_forward),) * sizes.layers


def smollm3(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of SmolLM3: Llama's, every fourth without positions. Raises ModelError for a
    key that is missing or cannot be used.
    """
    keys.get("max_window_layers")  # Transformers does not look at it in this family.
    used, window = uses_windows(keys), keys.integer("sliding_window", 4096)
    slides = slides_of(keys, sizes, [False] * sizes.layers, used)
    every = keys.integer("no_rope_layer_interval", 4)
    if every < 1:
        raise keys.unfit("no_rope_layer_interval", every, "positive")
    rotates = keys.get("no_rope_layers") or [
        int((layer + 1) % every != 0) for layer in range(sizes.layers)
    ]
    if not isinstance(rotates, list) or len(rotates) != sizes.layers or not {*rotates} <= {0, 1}:
        raise keys.unfit("no_rope_layers", rotates, f"{sizes.layers} times 0 or 1")
    if used and keys.get("layer_types") is None:
        raise keys.unfit("layer_types", None, "given where use_sliding_window is true")
    biased, rope = keys.flag("attention_bias", False), rope_from(keys, sizes.context, 2e6)
    feed_forward = Dense(keys.integer("intermediate_size"), keys.flag("mlp_bias", False))
    return tuple(
        LayerSpec(
            plain_attention(sizes, window if slide else None),
            rope if rotated else Rope(rope.theta, rotated=0),
            feed_forward,
            qkv_bias=biased,
            o_bias=biased,
        )
        for slide, rotated in zip(slides, rotates, strict=True)
    )


def granite(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Granite 3: Llama's, with scales of their own. Raises ModelError for a key
    that is missing or cannot be used.
    """
    feed_forward = Dense(keys.integer("intermediate_size"), keys.flag("mlp_bias", False))
    return _granite(keys, sizes, rope_from(keys, sizes.context), feed_forward)


def granite_hybrid(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of a Granite 4 with attention in all layers: Granite 3's. Raises ModelError
    for one with Mamba layers or experts, and for a key that is missing or cannot be used.
    """
    kinds = keys.get("layer_types") or keys.get("layers_block_type")
    if not isinstance(kinds, list) or {*map(str, kinds)} - {"attention", FULL}:
        raise keys.unfit("layer_types", kinds, "attention in every layer: Mamba does not run here")
    if len(kinds) != sizes.layers:
        raise keys.unfit("layer_types", kinds, f"one for each of {sizes.layers} layers")
    if count := keys.integer("num_local_experts", 8):
        raise keys.unfit("num_local_experts", count, "0 to run here")
    for name in _OF_MAMBA:
        keys.get(name)
    for name in ("num_experts_per_tok", "intermediate_size", "init_method"):
        keys.get(name)  # Of experts, or of training.
    keys.require("normalization_function", "rmsnorm")
    rotates = keys.get("position_embedding_type") == "rope"
    if not rotates:
        keys.require("position_embedding_type", "nope")
    rope = rope_from(keys, sizes.context)
    feed_forward = Dense(keys.integer("shared_intermediate_size", 1024))
    return _granite(keys, sizes, rope if rotates else Rope(rope.theta, rotated=0), feed_forward)


_OF_MAMBA = (
    *("mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state"),
    *("mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit"),
)
"""Keys about layers that not every Granite 4 has."""


def _granite(keys: Keys, sizes: ArchitectureSizes, rope: Rope, feed_forward: Dense) -> Layers:
    biased = keys.flag("attention_bias", False)
    spec = LayerSpec(
        AttentionSpec(keys.real("attention_multiplier", 1.0)),
        rope,
        feed_forward,
        qkv_bias=biased,
        o_bias=biased,
        residual=keys.real("residual_multiplier", 1.0),
    )
    return (spec,) * sizes.layers


def olmo2(keys: Keys, sizes: ArchitectureSizes, rope: Rope | None = None) -> Layers:
    """Return L layers of OLMo 2 (arXiv 2501.00656): norms after attention and feed-forward, and
    over all heads. rope: of OLMo 3; None: read from the keys.
    """
    biased = keys.flag("attention_bias", False)
    spec = LayerSpec(
        plain_attention(sizes),
        rope_from(keys, sizes.context) if rope is None else rope,
        Dense(keys.integer("intermediate_size")),
        norms="post",
        wide_qk_norm=True,
        qkv_bias=biased,
        o_bias=biased,
    )
    return (spec,) * sizes.layers


def olmo3(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of OLMo 3: OLMo 2's, three of four with a window and without the scaled
    positions of the fourth. Raises ModelError for a key that is missing or cannot be used.
    """
    theta, window = 5e5, optional_integer(keys, "sliding_window", 4096)
    if keys.get("rope_parameters") is not None:
        ropes = ropes_by_kind(keys, sizes.context, {FULL: theta, SLIDING: theta})
    else:
        whole = rope_from(keys, sizes.context, theta)
        ropes = {FULL: whole, SLIDING: Rope(whole.theta)}
    (spec,) = {*olmo2(keys, sizes, ropes[FULL])}
    local = replace(spec, attention=plain_attention(sizes, window), rope=ropes[SLIDING])
    slides = slides_of(keys, sizes, [(layer + 1) % 4 != 0 for layer in range(sizes.layers)])
    return tuple(local if slide else spec for slide in slides)


def seed_oss(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of Seed-OSS: Llama's with biases on queries, keys and values. Raises ModelError
    for a key that is missing or cannot be used.
    """
    spec = LayerSpec(
        plain_attention(sizes),
        rope_from(keys, sizes.context),
        Dense(keys.integer("intermediate_size"), keys.flag("mlp_bias", False)),
        qkv_bias=keys.flag("attention_bias", True),
        o_bias=keys.flag("attention_out_bias", False),
    )
    return (spec,) * sizes.layers


def exaone4(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of EXAONE 4 (arXiv 2507.11407): norms after attention and feed-forward; if some
    layers have windows, the others have no positions. Raises ModelError for a key that is missing
    or cannot be used.
    """
    window = optional_integer(keys, "sliding_window", 4096)
    slides = slides_of(keys, sizes, _exaone_slides(keys, sizes.layers, window), window is not None)
    rope = rope_from(keys, sizes.context)
    spec = LayerSpec(
        plain_attention(sizes),
        rope,
        Dense(keys.integer("intermediate_size")),
        norms="post",
        qk_norm=True,
    )
    if window is None:
        return (spec,) * sizes.layers
    local = replace(spec, attention=plain_attention(sizes, window))
    still = replace(spec, rope=Rope(rope.theta, rotated=0))
    return tuple(local if slide else still for slide in slides)


def hunyuan(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Hunyuan: Llama's, with norms on each head after the rotation. Raises
    ModelError for a key that is missing or cannot be used.
    """
    for name in ("use_qk_norm", "use_rotary_pos_emb"):
        if not keys.flag(name, True):
            raise keys.unfit(name, False, "true to run here")
    if (kind := keys.text("norm_type", "rms")) not in ("rms", "hf_rms"):
        raise keys.unfit("norm_type", kind, "rms")
    keys.require("attention_head_dim", sizes.head_size)
    keys.require("num_experts", 1)
    for name in _OF_LARGER_HUNYUANS:
        keys.get(name)
    biased = keys.flag("attention_bias", False)
    spec = LayerSpec(
        plain_attention(sizes),
        rope_of_fixed_alpha(keys, sizes.context, sizes.head_size),
        Dense(keys.integer("intermediate_size")),
        qk_norm=True,
        late_qk_norm=True,
        qkv_bias=biased,
        o_bias=biased,
    )
    return (spec,) * sizes.layers


_OF_LARGER_HUNYUANS = (
    *("cla_share_factor", "dense_list", "class_num", "pool_type", "org_vocab_size", "pad_id"),
    *("mask_init_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id"),
)
"""Keys of classifiers, shared caches and images, which other keys enable."""


def _exaone_slides(keys: Keys, layers: int, window: int | None) -> list[bool]:
    """Return for each layer whether it has a window, by `sliding_window_pattern`. A number n: every
    n-th layer has none. Letters: layers at a G have none. The last layer has none.
    """
    pattern = keys.get("sliding_window_pattern", 4)
    if window is None:
        return [False] * layers
    if type(pattern) is int and pattern > 0:
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    if not isinstance(pattern, str) or not pattern or {*pattern} - {"L", "G"}:
        raise keys.unfit("sliding_window_pattern", pattern, "a positive number, or letters L and G")
    slides = [pattern[layer % len(pattern)] == "L" for layer in range(layers)]
    return [*slides[:-1], False]
