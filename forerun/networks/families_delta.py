"""Reads the layers of families with gated delta nets from config.json, with transformers'
defaults.
"""

from collections.abc import Sequence
from dataclasses import replace

from forerun.networks.arch import ArchitectureSizes
from forerun.networks.families_experts import qwen_experts
from forerun.networks.family_parts import FULL, LINEAR, Layers, kinds_of, plain_attention
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import Dense, Experts, GatedDelta, LayerSpec, Router
from forerun.networks.rope_config import OF_IMAGES, rope_from


def qwen3_next(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of Qwen3-Next: a gated delta net in three layers of four, gated attention in
    the fourth. Raises ModelError for a key that is missing or cannot be used.
    """
    shared = keys.integer("shared_expert_intermediate_size", 512)
    return _layers(keys, sizes, qwen_experts(keys, sizes, shared, normalised=True))


def qwen3_5(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of Qwen3.5, 3.6 and 3.8: Qwen3-Next's with dense feed-forwards. Raises
    ModelError for a key that is missing or cannot be used.
    """
    _read_common(keys)
    return _layers(keys, sizes, [Dense(keys.integer("intermediate_size"))] * sizes.layers)


def qwen3_5_moe(keys: Keys, sizes: ArchitectureSizes) -> Layers:
    """Return layers of Qwen3.5-MoE: Qwen3.5's with experts in every layer, whose weights are always
    normalised. Raises ModelError for a key that is missing or cannot be used.
    """
    _read_common(keys)
    keys.get("intermediate_size")  # Of no layer.
    if not keys.flag("norm_topk_prob", True):
        raise keys.unfit("norm_topk_prob", False, "true in a Qwen3.5 model")
    keys.require("decoder_sparse_step", 1)
    count = keys.integer("num_experts", keys.get("num_local_experts", 256))
    keys.require("num_local_experts", count)  # transformers 5 writes it so.
    experts = Experts(
        count,
        keys.integer("num_experts_per_tok", 8),
        keys.integer("moe_intermediate_size", 512),
        Router(normalised=True),
        keys.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    return _layers(keys, sizes, [experts] * sizes.layers)


def _read_common(keys: Keys) -> None:
    """Read the keys that Qwen3.5's configurations have and Qwen3-Next's do not."""
    if not keys.flag("attn_output_gate", True):
        raise keys.unfit("attn_output_gate", False, "true in a Qwen3.5 model")
    keys.get("mtp_use_dedicated_embeddings")  # The tensors determine it.
    keys.get("mamba_ssm_dtype")  # States are float32 here.


def _layers(
    keys: Keys, sizes: ArchitectureSizes, feed_forwards: Sequence[Dense | Experts]
) -> Layers:
    biased = keys.flag("attention_bias", False)
    delta = GatedDelta(
        keys.integer("linear_num_key_heads", 16),
        keys.integer("linear_num_value_heads", 32),
        keys.integer("linear_key_head_dim", 128),
        keys.integer("linear_value_head_dim", 128),
        keys.integer("linear_conv_kernel_dim", 4),
    )
    attention = replace(plain_attention(sizes), gated=True)
    rope = rope_from(keys, sizes.context, head_size=sizes.head_size, share=0.25, ignored=OF_IMAGES)
    layers = []
    for kind, feed_forward in zip(_kinds(keys, sizes), feed_forwards, strict=True):
        spec = LayerSpec(attention, rope, feed_forward)
        if kind == LINEAR:
            layers.append(replace(spec, recurrent=delta))
        else:
            layers.append(replace(spec, qk_norm=True, qkv_bias=biased, o_bias=biased))
    return tuple(layers)


def _kinds(keys: Keys, sizes: ArchitectureSizes) -> list[str]:
    """Return LINEAR or FULL for each layer; at least one layer must be FULL."""
    every = keys.integer("full_attention_interval", 4)
    if every < 1:
        raise keys.unfit("full_attention_interval", every, "positive")
    default = [LINEAR if (layer + 1) % every else FULL for layer in range(sizes.layers)]
    return kinds_of(keys, sizes, LINEAR, default)
