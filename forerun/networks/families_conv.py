"""Reads the layers of families with short convolutions from config.json, with transformers'
defaults.
"""

from collections.abc import Sequence
from dataclasses import replace

from forerun.networks.arch import ArchitectureSizes
from forerun.networks.family_parts import (
    CONV,
    FULL,
    Layers,
    kinds_of,
    optional_real,
    plain_attention,
)
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import Dense, Experts, LayerSpec, Router, ShortConvolution
from forerun.networks.rope_config import rope_from

_THETA = 1e6


def lfm2(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of LFM2 and LFM2.5 (arXiv 2511.23404): short convolutions, and attention in a
    few. Raises ModelError for a key that is missing or cannot be used.
    """
    for name, same in (("block_dim", sizes.hidden), ("num_heads", sizes.heads)):
        keys.require(name, same)
    for name in ("block_use_swiglu", "use_pos_enc"):
        if not keys.flag(name, True):
            raise keys.unfit(name, False, "true in an LFM2 model")
    keys.require("block_norm_eps", keys.real("rms_norm_eps", 1e-5))
    for name in ("block_mlp_init_scale", "block_out_init_scale"):
        keys.get(name)  # In training only.
    for name in ("block_use_xavier_init", "conv_use_xavier_init"):
        keys.get(name)  # The same.
    dense = Dense(_adjusted(keys, keys.integer("intermediate_size")))
    listed = keys.get("full_attn_idxs")
    return _layers(keys, sizes, [dense] * sizes.layers, listed)


def lfm2_moe(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of LFM2-8B-A1B: LFM2's with experts after the first dense layers, and widths
    that are not adjusted. Raises ModelError for a key that is missing or cannot be used.
    """
    keys.require("num_heads", sizes.heads)
    dense = Dense(keys.integer("intermediate_size"))
    count = keys.integer("num_experts", keys.get("num_local_experts", 32))
    keys.require("num_local_experts", count)  # transformers 5 writes it so.
    experts = Experts(
        count,
        keys.integer("num_experts_per_tok", 4),
        keys.integer("moe_intermediate_size"),
        Router(
            "sigmoid",
            normalised=keys.flag("norm_topk_prob", True),
            scale=keys.real("routed_scaling_factor", 1.0),
            correction=keys.flag("use_expert_bias", True),
        ),
    )
    first = keys.integer("num_dense_layers", 2)
    each = [dense if layer < first else experts for layer in range(sizes.layers)]
    return _layers(keys, sizes, each, None)


def _adjusted(keys: Keys, width: int) -> int:
    """Return a feed-forward's width: two thirds of the configured width, times a factor, rounded
    up, unless `block_auto_adjust_ff_dim` is off.
    """
    multiple = keys.integer("block_multiple_of", 256)
    factor = optional_real(keys, "block_ffn_dim_multiplier", 1.0)
    if multiple < 1:
        raise keys.unfit("block_multiple_of", multiple, "positive")
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _layers(
    keys: Keys, sizes: ArchitectureSizes, feed_forwards: Sequence[Dense | Experts], listed: object
) -> Layers:
    """Return the layers. listed: numbers of those with attention, if there is no `layer_types`."""
    for name in ("conv_dim", "conv_dim_out"):
        keys.require(name, sizes.hidden)
    convolution = ShortConvolution(
        sizes.hidden, keys.integer("conv_L_cache", 3), keys.flag("conv_bias", False)
    )
    rope = rope_from(keys, sizes.context, theta=keys.real("theta", _THETA))
    keys.require("theta", rope.theta)
    layers = []
    for kind, feed_forward in zip(_kinds(keys, sizes, listed), feed_forwards, strict=True):
        spec = LayerSpec(plain_attention(sizes), rope, feed_forward)
        attends = kind == FULL
        layers.append(
            replace(spec, qk_norm=True) if attends else replace(spec, recurrent=convolution)
        )
    return tuple(layers)


def _kinds(keys: Keys, sizes: ArchitectureSizes, listed: object) -> list[str]:
    """Return FULL or CONV for each layer. Raises ModelError unless at least one has attention."""
    if listed is None:
        return kinds_of(keys, sizes, CONV, [FULL] * sizes.layers)
    if not isinstance(listed, list) or not {*listed} <= {*range(sizes.layers)}:
        raise keys.unfit("full_attn_idxs", listed, f"a list of layers, of {sizes.layers}")
    default = [FULL if layer in listed else CONV for layer in range(sizes.layers)]
    kinds = kinds_of(keys, sizes, CONV, default)
    if kinds != default:
        raise keys.unfit("full_attn_idxs", listed, "what layer_types says")
    return kinds
