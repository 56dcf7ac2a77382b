"""Reads sizes and layers of Gemma 4 from GGUF files (llama.cpp's gemma4)."""

from dataclasses import replace
from typing import Any

import numpy as np

from forerun.checkpoints.gguf.header import GgufFile
from forerun.networks.arch import ArchitectureSizes
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import AttentionSpec, Dense, Experts, LayerSpec, Router
from forerun.networks.rope import Divided, Proportional, Rope, Scaling

_ENDLESS = 1e20
"""Divisors from this one on mean that a frequency is 0: the converter writes 1e30."""


def gemma4_sizes(keys: Keys, vocab: int) -> ArchitectureSizes:
    """Return the sizes; those of layers with a window if layers differ. Raises ModelError naming
    the key that is missing or cannot be used.
    """
    layers = keys.integer("block_count")
    heads = _each(keys, "attention.head_count_kv", layers)
    slides = _slides(keys, layers)
    return ArchitectureSizes(
        layers=layers,
        hidden=keys.integer("embedding_length"),
        heads=keys.integer("attention.head_count"),
        kv_heads=heads[slides.index(True) if True in slides else 0],
        head_size=keys.integer("attention.key_length_swa"),
        vocab=vocab,
        context=keys.integer("context_length"),
    )


def gemma4_layers(
    keys: Keys, sizes: ArchitectureSizes, file: GgufFile, scaling: Scaling | None
) -> tuple[LayerSpec, ...]:
    """Return the L layer specs of Gemma 4 from a GGUF file's metadata. Raises ModelError naming the
    key that is missing or cannot be used.

    scaling  RoPE scaling of full-attention layers; None = none
    """
    count, size = sizes.layers, keys.integer("attention.key_length")
    for name, numbers in (("", size), ("_swa", sizes.head_size)):
        keys.require(f"attention.value_length{name}", numbers)
        keys.require(f"rope.dimension_count{name}", numbers)
    heads = _each(keys, "attention.head_count_kv", count)
    widths = _each(keys, "feed_forward_length", count)
    slides, window = _slides(keys, count), keys.integer("attention.sliding_window")
    full = Rope(keys.real("rope.freq_base"), proportional(scaling))
    local = Rope(keys.real("rope.freq_base_swa", 1e4))
    attention = AttentionSpec(1.0, normed_values=True)
    shared = keys.integer("attention.shared_kv_layers", 0)
    if not 0 <= shared < count:
        raise keys.unfit("attention.shared_kv_layers", shared, f"below {count}")
    spec = LayerSpec(
        attention,
        full,
        Dense(1),
        norms="sandwich",
        activation="gelu_tanh",
        qk_norm=True,
        beside=_experts(keys),
        token_vector=keys.integer("embedding_length_per_layer_input", 0),
        scaled=True,
    )
    last = {slide: layer for layer, slide in enumerate(slides[: count - shared])}
    layers = []
    for layer, slide in enumerate(slides):
        source = last.get(slide) if layer >= count - shared else None
        if layer >= count - shared and source is None:
            raise keys.unfit("attention.shared_kv_layers", shared, "fewer: a layer reads none")
        keyed = source is None and f"blk.{layer}.attn_v.weight" not in file.tensors
        layers.append(
            replace(
                spec,
                attention=replace(attention, window=window if slide else None, keyed_values=keyed),
                rope=local if slide else full,
                feed_forward=Dense(widths[layer]),
                cache=CacheLayer(heads[layer], sizes.head_size if slide else size),
                reads=source,
            )
        )
    return tuple(layers)


def proportional(scaling: Scaling | None) -> Scaling | None:
    """Return `Proportional` for divisors that are 1 first and above _ENDLESS after that; any other
    scaling unchanged.
    """
    if not isinstance(scaling, Divided):
        return scaling
    divisors = np.array(scaling.divisors)
    kept = int((divisors < _ENDLESS).sum())
    if kept == len(divisors) or (divisors[:kept] != 1).any():
        return scaling
    # Half a frequency more: no rounding makes it one fewer.
    return Proportional((kept + 0.25) / len(divisors))


def _experts(keys: Keys) -> Experts | None:
    count = keys.integer("expert_count", 0)
    if not count:
        keys.get("expert_feed_forward_length")
        return None
    router = Router(normalised=True, own_input=True, scaled=True)
    top_k, width = keys.integer("expert_used_count"), keys.integer("expert_feed_forward_length")
    return Experts(count, top_k, width, router)


def _slides(keys: Keys, layers: int) -> list[bool]:
    """Return which layers have a window."""
    flags = keys.get("attention.sliding_window_pattern")
    if not isinstance(flags, list) or len(flags) != layers or not {*flags} <= {True, False}:
        wanted = f"{layers} times true or false"
        raise keys.unfit("attention.sliding_window_pattern", flags, wanted)
    return [bool(flag) for flag in flags]


def _each(keys: Keys, name: str, layers: int) -> list[int]:
    """Read a whole number for each layer, or one for all. Raises ModelError naming the key."""
    value: Any = keys.get(name)
    values = value if isinstance(value, list) else [value] * layers
    if len(values) != layers or any(type(one) is not int or one < 1 for one in values):
        raise keys.unfit(name, value, f"a positive whole number, or {layers} of them")
    return values
