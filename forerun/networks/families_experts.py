"""Reads the layers of families with experts from config.json, with transformers' defaults."""

from dataclasses import replace

from forerun.networks.arch import ArchitectureSizes
from forerun.networks.family_parts import (
    Layers,
    optional_integer,
    plain_attention,
    slides_of,
    uses_windows,
)
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import (
    CLAMP,
    CLAMP_SLOPE,
    AttentionSpec,
    Dense,
    Experts,
    Latent,
    LayerSpec,
    Router,
)
from forerun.networks.rope import Yarn, yarn_attention_factor
from forerun.networks.rope_config import OF_IMAGES, rope_from


def qwen2_moe(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Qwen2-MoE, with one expert that all tokens share. Raises ModelError for a
    key that is missing or cannot be used.
    """
    biased, rope = keys.flag("qkv_bias", True), rope_from(keys, sizes.context)
    shared = keys.integer("shared_expert_intermediate_size")
    used, window = uses_windows(keys), keys.integer("sliding_window", 4096)
    keys.get("max_window_layers")  # Only makes the layer_types that are required here.
    if used and keys.get("layer_types") is None:
        # Versions of transformers disagree on which layers these would be.
        raise keys.unfit("layer_types", None, "given where use_sliding_window is true")
    slides = slides_of(keys, sizes, [False] * sizes.layers, used)
    return tuple(
        LayerSpec(
            plain_attention(sizes, window if slide else None), rope, feed_forward, qkv_bias=biased
        )
        for slide, feed_forward in zip(slides, qwen_experts(keys, sizes, shared), strict=True)
    )


def qwen3_moe(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Qwen3-MoE (arXiv 2505.09388). Raises ModelError for a key that is missing
    or cannot be used.
    """
    biased = keys.flag("attention_bias", False)
    rope = rope_from(keys, sizes.context, ignored=OF_IMAGES)
    used, window = uses_windows(keys), keys.integer("sliding_window", 4096)
    keys.get("max_window_layers")  # Transformers does not look at it in this family.
    keys.require("shared_expert_intermediate_size", 0)  # Qwen3-Coder writes it.
    if not keys.flag("use_qk_norm", True):
        raise keys.unfit("use_qk_norm", False, "true in a Qwen3-MoE model")
    slides = slides_of(keys, sizes, [used] * sizes.layers, used)
    if slides != [used] * sizes.layers:
        raise keys.unfit("layer_types", keys.get("layer_types"), "all of one kind in Qwen3-MoE")
    return tuple(
        LayerSpec(
            plain_attention(sizes, window if used else None),
            rope,
            feed_forward,
            qk_norm=True,
            qkv_bias=biased,
            o_bias=biased,
        )
        for feed_forward in qwen_experts(keys, sizes, shared=0)
    )


def mixtral(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Mixtral (arXiv 2401.04088). Raises ModelError for a key that is missing or
    cannot be used.
    """
    keys.get("router_jitter_noise")  # In training only.
    experts = Experts(
        keys.integer("num_local_experts", 8),
        keys.integer("num_experts_per_tok", 2),
        keys.integer("intermediate_size"),
        Router(normalised=True),
    )
    window = optional_integer(keys, "sliding_window", None)
    rope = rope_from(keys, sizes.context)
    return (LayerSpec(plain_attention(sizes, window), rope, experts),) * sizes.layers


def glm4_moe(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of GLM-4.5 and 4.6 (arXiv 2508.06471): DeepSeek-V3's experts, half of a head
    rotated. Raises ModelError for a key that is missing or cannot be used.
    """
    rope = rope_from(keys, sizes.context, head_size=sizes.head_size, share=0.5)
    spec = LayerSpec(
        plain_attention(sizes),
        rope,
        Dense(keys.integer("intermediate_size")),
        qk_norm=keys.flag("use_qk_norm", False),
        qkv_bias=keys.flag("attention_bias", False),
    )
    return _mixed(keys, sizes, spec, _sigmoids(keys, 1, 1), first=1)


def deepseek_sizes(keys: Keys) -> ArchitectureSizes:
    """Return the sizes of DeepSeek's models: one key/value head, as wide as the cache of a
    position. Raises ModelError for a key that is missing or cannot be used.
    """
    for name in ("num_key_value_heads", "head_dim", "qk_head_dim"):
        keys.get(name)  # Of the projections without absorption.
    return ArchitectureSizes(
        layers=keys.integer("num_hidden_layers"),
        hidden=keys.integer("hidden_size"),
        heads=keys.integer("num_attention_heads"),
        kv_heads=1,
        head_size=keys.integer("kv_lora_rank", 512) + keys.integer("qk_rope_head_dim", 64),
        vocab=keys.integer("vocab_size"),
        context=keys.integer("max_position_embeddings"),
    )


def deepseek_v3(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of DeepSeek-V3 and R1 (arXiv 2412.19437), and of models of their shape (Kimi
    K2). Raises ModelError for a key that is missing or cannot be used.
    """
    keys.require("scoring_func", "sigmoid")
    keys.require("topk_method", "noaux_tc")
    dense = _latent(keys, sizes, keys.flag("rope_interleave", True))
    return _mixed(keys, sizes, dense, _sigmoids(keys, 8, 4), first=3)


def glm4_moe_lite(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of GLM-4.7-Flash, which has DeepSeek-V3's shape. Raises ModelError for a key
    that is missing or cannot be used, including keys that are optional in DeepSeek's
    configurations.
    """
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        keys.integer(name)
    keys.real("routed_scaling_factor")
    keys.require("scoring_func", "sigmoid")
    keys.require("topk_method", "noaux_tc")
    kinds = keys.get("mlp_layer_types")
    first = keys.integer("first_k_dense_replace", 1)
    if kinds is not None:
        first = kinds.count("dense") if isinstance(kinds, list) else first
        if kinds != ["dense"] * first + ["sparse"] * (sizes.layers - first):
            wanted = f"dense layers, then sparse ones, {sizes.layers} in all"
            raise keys.unfit("mlp_layer_types", kinds, wanted)
        keys.require("first_k_dense_replace", first)
    dense = _latent(keys, sizes, keys.flag("rope_interleave", True))
    return _mixed(keys, sizes, dense, _sigmoids(keys, 1, 1), first=first)


def minimax_m2(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of MiniMax M2 (arXiv 2511.13594): norms over all heads at once, a part of each
    head rotated, experts by sigmoids. Raises ModelError for a key that is missing or cannot be
    used.
    """
    for name in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):
        keys.get(name)  # Announced; no file holds them.
    for name in ("router_jitter_noise", "mlp_intermediate_size", "shared_moe_mode"):
        keys.get(name)  # In training only, or of no layer.
    keys.require("scoring_func", "sigmoid")
    keys.require("qk_norm_type", "per_layer")
    keys.require("shared_intermediate_size", 0)
    for part in ("full_attention", "linear_attention", "mlp"):
        for factor in ("alpha", "beta"):
            keys.require(f"layernorm_{part}_{factor}", 1.0)  # Of MiniMax M1's residuals.
    for name in ("use_qk_norm", "use_routing_bias"):
        if not keys.flag(name, True):
            raise keys.unfit(name, False, "true in a MiniMax M2 model")
    kinds = keys.get("attn_type_list")
    if kinds not in (None, [1] * sizes.layers):
        raise keys.unfit("attn_type_list", kinds, f"{sizes.layers} times 1")
    share = keys.integer("rotary_dim", sizes.head_size) / sizes.head_size
    experts = Experts(
        keys.integer("num_local_experts", 256),
        keys.integer("num_experts_per_tok", 8),
        keys.integer("intermediate_size"),
        Router("sigmoid", normalised=True, correction=True),
    )
    rope = rope_from(keys, sizes.context, head_size=sizes.head_size, share=share)
    spec = LayerSpec(plain_attention(sizes), rope, experts, wide_qk_norm=True)
    return (spec,) * sizes.layers


def deepseek_v2(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of DeepSeek-V2 and V2-Lite (arXiv 2405.04434): a softmax over the experts,
    whose groups, if there are several, are ranked by their best expert. Raises ModelError for a key
    that is missing or cannot be used.
    """
    keys.require("scoring_func", "softmax")
    if keys.flag("norm_topk_prob", False):
        raise keys.unfit("norm_topk_prob", True, "false in a DeepSeek-V2 model")
    method = keys.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise keys.unfit("topk_method", method, "greedy or group_limited_greedy")
    groups = optional_integer(keys, "n_group", 1) or 1
    topk_group = optional_integer(keys, "topk_group", groups) or groups
    if method == "greedy":
        groups = topk_group = 1
    scale = keys.real("routed_scaling_factor", 1.0)
    router = Router("softmax", scale=scale, groups=groups, topk_group=topk_group, summed=1)
    return _mixed(keys, sizes, _latent(keys, sizes, True), router, first=0, shared=2)


def _latent(keys: Keys, sizes: ArchitectureSizes, paired: bool) -> LayerSpec:
    """Return DeepSeek's dense layers, with latent attention."""
    for name in ("ep_size", "aux_loss_alpha", "seq_aux", "auto_map"):
        keys.get(name)  # Of training, and code that is never run.
    keys.require("moe_layer_freq", 1)
    latent = Latent(
        keys.integer("kv_lora_rank", 512),
        keys.integer("qk_nope_head_dim", 128),
        keys.integer("qk_rope_head_dim", 64),
        keys.integer("v_head_dim", 128),
        optional_integer(keys, "q_lora_rank", 1536),
        paired,
    )
    scaling = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    rope = rope_from(keys, sizes.context)
    scale = (latent.nope + latent.rope) ** -0.5
    over_all = scaling.get("mscale_all_dim")
    if isinstance(rope.scaling, Yarn) and over_all:
        scale *= (over_all * (yarn_attention_factor(rope.scaling.factor) - 1) + 1) ** 2
    biased = keys.flag("attention_bias", False)
    return LayerSpec(
        AttentionSpec(scale, latent=latent),
        rope,
        Dense(keys.integer("intermediate_size")),
        qkv_bias=biased,
        o_bias=biased,
    )


def _sigmoids(keys: Keys, groups: int, topk_group: int) -> Router:
    """Return DeepSeek-V3's router. groups, topk_group: defaults of the keys."""
    return Router(
        "sigmoid",
        keys.flag("norm_topk_prob", True),
        keys.real("routed_scaling_factor", 1.0),
        correction=True,
        groups=keys.integer("n_group", groups),
        topk_group=keys.integer("topk_group", topk_group),
    )


def _mixed(
    keys: Keys,
    sizes: ArchitectureSizes,
    dense: LayerSpec,
    router: Router,
    first: int,
    shared: int = 1,
) -> Layers:
    """Return layers with DeepSeek's experts after the `first` dense ones; every token visits
    `shared` experts. Both numbers are defaults of the keys.
    """
    width = keys.integer("moe_intermediate_size")
    experts = Experts(
        keys.integer("n_routed_experts"),
        keys.integer("num_experts_per_tok", 8),
        width,
        router,
        shared=width * keys.integer("n_shared_experts", shared),
    )
    keys.require("num_local_experts", experts.count)  # transformers 5 writes it so.
    first = keys.integer("first_k_dense_replace", first)
    mixed = replace(dense, feed_forward=experts)
    return tuple(dense if layer < first else mixed for layer in range(sizes.layers))


def gpt_oss(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of gpt-oss (arXiv 2508.10925): sinks, a window in every other layer, clamped
    gates. Raises ModelError for a key that is missing or cannot be used.
    """
    keys.require("swiglu_limit", CLAMP)
    keys.require("swiglu_alpha", CLAMP_SLOPE)
    keys.get("initial_context_length")  # Repeats rope_scaling.
    biased = keys.flag("attention_bias", True)
    top_k = keys.integer("num_experts_per_tok", keys.get("experts_per_token", 4))
    keys.require("experts_per_token", top_k)
    experts = Experts(
        keys.integer("num_local_experts", 128),
        top_k,
        keys.integer("intermediate_size"),
        Router(normalised=True, bias=True),
        bias=True,
    )
    rope, window = rope_from(keys, sizes.context), keys.integer("sliding_window", 128)
    slides = slides_of(keys, sizes, [layer % 2 == 0 for layer in range(sizes.layers)])
    return tuple(
        LayerSpec(
            AttentionSpec(sizes.head_size**-0.5, window if slide else None, sinks=True),
            rope,
            experts,
            activation="clamped_silu",
            qkv_bias=biased,
            o_bias=biased,
        )
        for slide in slides
    )


def qwen_experts(
    keys: Keys, sizes: ArchitectureSizes, shared: int, normalised: bool = False
) -> list[Dense | Experts]:
    """Return each layer's feed-forward: experts in every decoder_sparse_step-th that is not listed.
    Raises ModelError for a key that is missing or cannot be used.

    shared      width of the expert that every token visits; 0 = none
    normalised  norm_topk_prob where it is absent
    """
    count = keys.integer("num_experts", keys.get("num_local_experts"))
    keys.require("num_local_experts", count)  # transformers 5 writes it so.
    experts = Experts(
        count,
        keys.integer("num_experts_per_tok"),
        keys.integer("moe_intermediate_size"),
        Router(normalised=keys.flag("norm_topk_prob", normalised)),
        shared,
        shared_gate=bool(shared),
    )
    dense = Dense(keys.integer("intermediate_size"))
    step, only = keys.integer("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    if step < 1:
        raise keys.unfit("decoder_sparse_step", step, "positive")
    if not isinstance(only, list) or any(type(layer) is not int for layer in only):
        raise keys.unfit("mlp_only_layers", only, "a list of layers")
    return [
        experts if count and layer not in only and (layer + 1) % step == 0 else dense
        for layer in range(sizes.layers)
    ]
