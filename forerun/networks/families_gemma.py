"""Reads the layers of Gemma from config.json, with transformers' defaults."""

from collections.abc import Sequence
from typing import Any

from forerun.networks.arch import ArchitectureSizes
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.family_parts import FULL, SLIDING, Layers, optional_real, slides_of
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import (
    Activation,
    AttentionSpec,
    Dense,
    Experts,
    LayerSpec,
    Router,
)
from forerun.networks.rope import Proportional, Rope
from forerun.networks.rope_config import rope_from, ropes_by_kind

_GELUS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""transformers' names -> ours."""


def gemma2(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Gemma 2 (arXiv 2408.00118): windows in every second layer, capped scores.
    Raises ModelError for a key that is missing or cannot be used.
    """
    softcap = optional_real(keys, "attn_logit_softcapping", 50.0)
    slides = slides_of(keys, sizes, [layer % 2 == 0 for layer in range(sizes.layers)])
    rope = rope_from(keys, sizes.context)
    return _gemma(keys, sizes, slides, {FULL: rope, SLIDING: rope}, softcap, qk_norm=False)


def gemma3(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return L layers of Gemma 3 (arXiv 2503.19786): windows in five of six layers, with another
    rope. Raises ModelError for a key that is missing or cannot be used.
    """
    pattern = keys.integer("sliding_window_pattern", 6)
    if pattern < 1:
        raise keys.unfit("sliding_window_pattern", pattern, "positive")
    slides = slides_of(keys, sizes, [bool((layer + 1) % pattern) for layer in range(sizes.layers)])
    thetas = {FULL: 1e6, SLIDING: 1e4}
    if keys.get("rope_parameters") is not None:
        return _gemma(keys, sizes, slides, ropes_by_kind(keys, sizes.context, thetas))
    local = rope_from(Keys({}, keys.prefix), sizes.context, keys.real("rope_local_base_freq", 1e4))
    ropes = {FULL: rope_from(keys, sizes.context, thetas[FULL]), SLIDING: local}
    return _gemma(keys, sizes, slides, ropes)


def _gemma(
    keys: Keys,
    sizes: ArchitectureSizes,
    slides: Sequence[bool],
    ropes: dict[str, Rope],
    softcap: float | None = None,
    qk_norm: bool = True,
) -> Layers:
    """Return the layers of Gemma 3; with other values of the last two parameters, of Gemma 2.

    slides  which layers have a window; ropes  of the layers with and without one
    """
    scalar = keys.real("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise keys.unfit("query_pre_attn_scalar", scalar, "positive")
    window = keys.integer("sliding_window", 4096)
    biased = keys.flag("attention_bias", False)
    feed_forward, activation = Dense(keys.integer("intermediate_size")), _gelu(keys)
    return tuple(
        LayerSpec(
            AttentionSpec(scalar**-0.5, window if slide else None, softcap),
            ropes[SLIDING if slide else FULL],
            feed_forward,
            norms="sandwich",
            activation=activation,
            qk_norm=qk_norm,
            qkv_bias=biased,
            o_bias=biased,
        )
        for slide in slides
    )


def _gelu(keys: Keys) -> Activation:
    """Read `hidden_activation`; `hidden_act`, which transformers ignores, must agree."""
    name = keys.text("hidden_activation", "gelu_pytorch_tanh")
    if name not in _GELUS:
        raise keys.unfit("hidden_activation", name, f"one of {', '.join(_GELUS)}")
    keys.require("hidden_act", name)
    return _GELUS[name]


_EVERY = 6
"""The last layer in every group of this many layers of Gemma 4 has no window."""


def gemma4(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of Gemma 4: those without a window have wider heads, and possibly values
    computed from the keys; the last ones may read keys and values of others. Raises ModelError for
    a key that is missing or cannot be used.
    """
    if keys.get("use_bidirectional_attention") not in (None, "vision"):  # Of images alone.
        raise keys.unfit("use_bidirectional_attention", "all", "null or vision to run here")
    slides = slides_of(keys, sizes, [bool((i + 1) % _EVERY) for i in range(sizes.layers)])
    slides[-1] = False  # As in transformers, whatever layer_types are.
    ropes = {FULL: Rope(1e6, Proportional(0.25)), SLIDING: Rope(1e4)}
    if keys.get("rope_parameters") is not None:
        ropes = ropes_by_kind(keys, sizes.context, {FULL: 1e6, SLIDING: 1e4})
    keyed, wide = keys.flag("attention_k_eq_v", False), keys.flag("use_double_wide_mlp", False)
    window, biased = keys.integer("sliding_window", 512), keys.flag("attention_bias", False)
    width, activation = keys.integer("intermediate_size"), _gelu(keys)
    reads, shapes = _readings(keys, slides), _shapes(keys, sizes, slides, keyed)
    vector, beside = _token_vector(keys, sizes), _gemma4_experts(keys)
    return tuple(
        LayerSpec(
            AttentionSpec(
                1.0,
                window if slide else None,
                normed_values=True,
                keyed_values=keyed and not slide,
            ),
            ropes[SLIDING if slide else FULL],
            Dense(width * (2 if wide and source is not None else 1)),
            norms="sandwich",
            activation=activation,
            qk_norm=True,
            qkv_bias=biased,
            o_bias=biased,
            cache=shape,
            reads=source,
            token_vector=vector,
            scaled=True,
            beside=beside,
        )
        for slide, source, shape in zip(slides, reads, shapes, strict=True)
    )


def _readings(keys: Keys, slides: Sequence[bool]) -> list[int | None]:
    """Return for each layer the number of the layer whose keys and values it reads, None for its
    own: the last `num_kv_shared_layers` read those of the last layer before them that has a window
    if they do, and none if they do not.
    """
    count = keys.integer("num_kv_shared_layers", 0)
    own = list(slides[: len(slides) - count])
    if count and not (count > 0 and set(own) == set(slides)):
        wanted = "so many that a layer with a window and one without are left"
        raise keys.unfit("num_kv_shared_layers", count, wanted)
    last = {slide: len(own) - 1 - own[::-1].index(slide) for slide in set(own)}
    return [None] * len(own) + [last[slide] for slide in slides[len(own) :]]


def _shapes(
    keys: Keys, sizes: ArchitectureSizes, slides: Sequence[bool], keyed: bool
) -> list[CacheLayer]:
    """Return the shape of each layer's cache: from two keys, as published, or as transformers 5
    writes it.
    """
    size, heads = keys.integer("global_head_dim", 512), sizes.kv_heads
    if keyed:
        heads = keys.integer("num_global_key_value_heads", heads)
    keys.get("num_global_key_value_heads")
    local = CacheLayer(sizes.kv_heads, sizes.head_size)
    written = keys.get("per_layer_config")
    if written is None:
        return [local if slide else CacheLayer(heads, size) for slide in slides]
    shapes = [local] * len(slides)
    for layer, about in _numbered(keys, written, len(slides)).items():
        kv_heads = about.integer("num_key_value_heads", sizes.kv_heads)
        shapes[layer] = CacheLayer(kv_heads, about.integer("head_dim", sizes.head_size))
        about.refuse_the_rest(lambda name, value: False)
    return shapes


def _numbered(keys: Keys, written: Any, layers: int) -> dict[int, Keys]:
    """Return the objects of per_layer_config by their layers' numbers."""
    found: dict[int, Keys] = {}
    unfit = keys.unfit("per_layer_config", written, "objects by numbers of layers")
    if not isinstance(written, dict):
        raise unfit
    for name, about in written.items():
        number = str(name).isdecimal() and len(name) < 10
        if not number or int(name) >= layers or not isinstance(about, dict):
            raise unfit
        found[int(name)] = Keys(about, f"{keys.prefix}per_layer_config.{name}.")
    return found


def _token_vector(keys: Keys, sizes: ArchitectureSizes) -> int:
    """Return how many numbers a token has for each layer, 0 if none."""
    numbers = keys.integer("hidden_size_per_layer_input", 256)
    vocab = keys.integer("vocab_size_per_layer_input", 262_144)
    if numbers and vocab != sizes.vocab:
        raise keys.unfit("vocab_size_per_layer_input", vocab, f"{sizes.vocab}, as vocab_size")
    return numbers


def _gemma4_experts(keys: Keys) -> Experts | None:
    """Return the experts in parallel with each layer's feed-forward."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not keys.flag("enable_moe_block", False):
        for name in names:
            keys.get(name)
        return None
    router = Router(normalised=True, own_input=True, scaled=True)
    count, top_k, width = (keys.integer(name) for name in names)
    return Experts(count, top_k, width, router)
