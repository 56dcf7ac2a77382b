"""The families as a table: what each one's config.json says, with transformers' defaults.

A new family is a row of READERS and the function that reads its layers (docs/families.md). Every
key that changes the model is asked for; config_json.py refuses the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.models.arch import Architecture, Family, Sizes
from forerun.models.keys import Keys
from forerun.models.layer_spec import AttentionSpec, Dense, Experts, LayerSpec
from forerun.models.rope import Rope
from forerun.models.rope_config import rope_from, ropes_by_kind

FULL, SLIDING = "full_attention", "sliding_attention"

_GELU = "gelu_pytorch_tanh"

Layers = tuple[LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class Reader:
    """How one family's config.json becomes an Architecture.

    class_name  the only value of `architectures` that is this family
    layers      reads what concerns the layers
    head_size   head_dim where it is absent; None = hidden / heads
    every_head  where num_key_value_heads is absent, every head has its own keys
    gemma       Gemma's model-wide facts: tied by default, norms stored without their 1,
                embeddings scaled by sqrt(H), GELU, capped logits
    """

    class_name: str
    layers: Callable[[Keys, Sizes], Layers]
    head_size: int | None = None
    every_head: bool = False
    gemma: bool = False

    def read(self, family: Family, keys: Keys) -> Architecture:
        """Raises ModelError naming the key that is missing or cannot be used."""
        classes = keys.get("architectures", [self.class_name])
        if classes != [self.class_name]:
            raise keys.unfit("architectures", classes, f"[{self.class_name!r}] to run here")
        if self.gemma:
            keys.require("hidden_activation", _GELU)
        keys.require("hidden_act", _GELU if self.gemma else "silu")
        sizes = self._sizes(keys)
        return Architecture(
            family=family,
            hidden=sizes.hidden,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_size=sizes.head_size,
            vocab=sizes.vocab,
            context=sizes.context,
            norm_eps=keys.real("rms_norm_eps", 1e-6),
            layer_specs=self.layers(keys, sizes),
            tied_head=keys.flag("tie_word_embeddings", self.gemma),
            norm_offset=float(self.gemma),
            embedding_scale=sizes.hidden**0.5 if self.gemma else 1.0,
            final_softcap=_final_softcap(keys, family) if self.gemma else None,
        )

    def _sizes(self, keys: Keys) -> Sizes:
        hidden = keys.integer("hidden_size")
        heads = keys.integer("num_attention_heads")
        return Sizes(
            layers=keys.integer("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=keys.integer("num_key_value_heads", heads if self.every_head else None),
            head_size=keys.integer("head_dim", self.head_size or hidden // max(heads, 1)),
            vocab=keys.integer("vocab_size"),
            context=keys.integer("max_position_embeddings"),
        )


def _llama(keys: Keys, sizes: Sizes) -> Layers:
    biased = keys.flag("attention_bias", False)
    feed_forward = Dense(keys.integer("intermediate_size"), keys.flag("mlp_bias", False))
    rope = rope_from(keys, sizes.context)
    spec = LayerSpec(_attention(sizes), rope, feed_forward, qkv_bias=biased, o_bias=biased)
    return (spec,) * sizes.layers


def _mistral(keys: Keys, sizes: Sizes) -> Layers:
    window = _optional_integer(keys, "sliding_window", 4096)
    feed_forward = Dense(keys.integer("intermediate_size"))
    rope = rope_from(keys, sizes.context)
    return (LayerSpec(_attention(sizes, window), rope, feed_forward),) * sizes.layers


def _qwen2(keys: Keys, sizes: Sizes) -> Layers:
    if sizes.head_size * sizes.heads != sizes.hidden:
        wanted = f"{sizes.hidden} / {sizes.heads} in a Qwen2 model"
        raise keys.unfit("head_dim", sizes.head_size, wanted)
    feed_forward, rope = Dense(keys.integer("intermediate_size")), rope_from(keys, sizes.context)
    return tuple(
        LayerSpec(_attention(sizes, window), rope, feed_forward, qkv_bias=True)
        for window in _upper_windows(keys, sizes)
    )


def _qwen3(keys: Keys, sizes: Sizes) -> Layers:
    biased = keys.flag("attention_bias", False)
    feed_forward, rope = Dense(keys.integer("intermediate_size")), rope_from(keys, sizes.context)
    return tuple(
        LayerSpec(
            _attention(sizes, window),
            rope,
            feed_forward,
            qk_norm=True,
            qkv_bias=biased,
            o_bias=biased,
        )
        for window in _upper_windows(keys, sizes)
    )


def _qwen2_moe(keys: Keys, sizes: Sizes) -> Layers:
    biased, rope = keys.flag("qkv_bias", True), rope_from(keys, sizes.context)
    shared = keys.integer("shared_expert_intermediate_size")
    used, window = _uses_windows(keys), keys.integer("sliding_window", 4096)
    keys.get("max_window_layers")  # Only makes the layer_types that are required here.
    if used and keys.get("layer_types") is None:
        # Versions of transformers disagree on which layers these would be.
        raise keys.unfit("layer_types", None, "given where use_sliding_window is true")
    slides = _slides(keys, sizes, [False] * sizes.layers, used)
    return tuple(
        LayerSpec(_attention(sizes, window if slide else None), rope, feed_forward, qkv_bias=biased)
        for slide, feed_forward in zip(slides, _experts(keys, sizes, shared), strict=True)
    )


def _qwen3_moe(keys: Keys, sizes: Sizes) -> Layers:
    biased, rope = keys.flag("attention_bias", False), rope_from(keys, sizes.context)
    used, window = _uses_windows(keys), keys.integer("sliding_window", 4096)
    keys.get("max_window_layers")  # Transformers does not look at it in this family.
    slides = _slides(keys, sizes, [used] * sizes.layers, used)
    if slides != [used] * sizes.layers:
        raise keys.unfit("layer_types", keys.get("layer_types"), "all of one kind in Qwen3-MoE")
    return tuple(
        LayerSpec(
            _attention(sizes, window if used else None),
            rope,
            feed_forward,
            qk_norm=True,
            qkv_bias=biased,
            o_bias=biased,
        )
        for feed_forward in _experts(keys, sizes, shared=0)
    )


def _gemma2(keys: Keys, sizes: Sizes) -> Layers:
    softcap = _optional_real(keys, "attn_logit_softcapping", 50.0)
    slides = _slides(keys, sizes, [layer % 2 == 0 for layer in range(sizes.layers)])
    rope = rope_from(keys, sizes.context)
    return _gemma(keys, sizes, slides, {FULL: rope, SLIDING: rope}, softcap, qk_norm=False)


def _gemma3(keys: Keys, sizes: Sizes) -> Layers:
    pattern = keys.integer("sliding_window_pattern", 6)
    if pattern < 1:
        raise keys.unfit("sliding_window_pattern", pattern, "positive")
    slides = _slides(keys, sizes, [bool((layer + 1) % pattern) for layer in range(sizes.layers)])
    thetas = {FULL: 1e6, SLIDING: 1e4}
    if keys.get("rope_parameters") is not None:
        return _gemma(keys, sizes, slides, ropes_by_kind(keys, sizes.context, thetas))
    local = rope_from(Keys({}, keys.prefix), sizes.context, keys.real("rope_local_base_freq", 1e4))
    ropes = {FULL: rope_from(keys, sizes.context, thetas[FULL]), SLIDING: local}
    return _gemma(keys, sizes, slides, ropes)


def _gemma(
    keys: Keys,
    sizes: Sizes,
    slides: Sequence[bool],
    ropes: dict[str, Rope],
    softcap: float | None = None,
    qk_norm: bool = True,
) -> Layers:
    """The layers of Gemma 3, and with other values of the last two of Gemma 2.

    slides  which layers have a window; ropes  of the layers with and without one
    """
    scalar = keys.real("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise keys.unfit("query_pre_attn_scalar", scalar, "positive")
    window = keys.integer("sliding_window", 4096)
    biased = keys.flag("attention_bias", False)
    feed_forward = Dense(keys.integer("intermediate_size"))
    return tuple(
        LayerSpec(
            AttentionSpec(scalar**-0.5, window if slide else None, softcap),
            ropes[SLIDING if slide else FULL],
            feed_forward,
            norms="sandwich",
            activation="gelu_tanh",
            qk_norm=qk_norm,
            qkv_bias=biased,
            o_bias=biased,
        )
        for slide in slides
    )


def _attention(sizes: Sizes, window: int | None = None) -> AttentionSpec:
    return AttentionSpec(sizes.head_size**-0.5, window)


def _final_softcap(keys: Keys, family: Family) -> float | None:
    return _optional_real(keys, "final_logit_softcapping", 30.0 if family == "gemma2" else None)


def _optional_real(keys: Keys, name: str, default: float | None) -> float | None:
    """None where the key is null, and where it is absent the default."""
    if keys.get(name) is None and (keys.has(name) or default is None):
        return None
    return keys.real(name, default)


def _optional_integer(keys: Keys, name: str, default: int) -> int | None:
    """None where the key is null, and where it is absent the default."""
    if keys.get(name) is None and keys.has(name):
        return None
    return keys.integer(name, default)


def _uses_windows(keys: Keys) -> bool:
    """Qwen's switch. A window that is null switches off too, as in transformers."""
    used = keys.flag("use_sliding_window", False)
    return used and not (keys.has("sliding_window") and keys.get("sliding_window") is None)


def _upper_windows(keys: Keys, sizes: Sizes) -> list[int | None]:
    """Each layer's window in Qwen2 and Qwen3: those from max_window_layers on have one."""
    used = _uses_windows(keys)
    window = keys.integer("sliding_window", 4096)
    first = keys.integer("max_window_layers", 28)
    slides = _slides(keys, sizes, [used and layer >= first for layer in range(sizes.layers)], used)
    return [window if slide else None for slide in slides]


def _slides(keys: Keys, sizes: Sizes, default: list[bool], used: bool = True) -> list[bool]:
    """Which layers have a window: what layer_types says, else the default.

    used  windows are switched on; without, layer_types must not name any
    """
    kinds = keys.get("layer_types")
    if kinds is None:
        return default
    named = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not named or len(kinds) != sizes.layers:
        raise keys.unfit("layer_types", kinds, f"{sizes.layers} times {FULL} or {SLIDING}")
    if SLIDING in kinds and not used:
        raise keys.unfit("use_sliding_window", used, "true where layer_types say so")
    return [kind == SLIDING for kind in kinds]


def _experts(keys: Keys, sizes: Sizes, shared: int) -> list[Dense | Experts]:
    """Each layer's feed-forward: experts in every decoder_sparse_step-th that is not listed.

    shared  width of the expert that every token visits; 0 = none
    """
    count = keys.integer("num_experts", keys.get("num_local_experts"))
    keys.require("num_local_experts", count)  # transformers 5 writes it so.
    experts = Experts(
        count,
        keys.integer("num_experts_per_tok"),
        keys.integer("moe_intermediate_size"),
        keys.flag("norm_topk_prob", False),
        shared,
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


READERS: dict[Family, Reader] = {
    "llama": Reader("LlamaForCausalLM", _llama, every_head=True),
    "mistral": Reader("MistralForCausalLM", _mistral),
    "qwen2": Reader("Qwen2ForCausalLM", _qwen2),
    "qwen3": Reader("Qwen3ForCausalLM", _qwen3, head_size=128),
    "qwen2_moe": Reader("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3_moe": Reader("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma2": Reader("Gemma2ForCausalLM", _gemma2, head_size=256, gemma=True),
    "gemma3_text": Reader("Gemma3ForCausalLM", _gemma3, head_size=256, gemma=True),
}
