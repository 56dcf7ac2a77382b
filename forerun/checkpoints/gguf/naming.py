"""The places of a model's tensors in a GGUF file: llama.cpp's names and row order."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from forerun.checkpoints.gguf.convolution import CONVOLUTIONS
from forerun.checkpoints.gguf.delta import DECAY, DELTA_FAMILIES, StoredALog, delta_part
from forerun.checkpoints.gguf.header import GgufFile, Value
from forerun.checkpoints.gguf.latent import ABSORBED, StoredKvB, stored_kv_b
from forerun.checkpoints.naming import (
    EXPERT,
    IN_LAYER,
    Order,
    StoredPart,
    StoredTensor,
    each_head,
    fused,
    order_of,
)
from forerun.networks.arch import Architecture, Family, expected_tensors
from forerun.networks.layer_spec import BESIDE_NORMS, NORM_NAMES, Experts, LayerSpec

AnyStored = StoredTensor | StoredKvB | StoredALog

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_FINAL_NORMS: dict[Family, str] = dict.fromkeys(CONVOLUTIONS, "token_embd_norm")
"""Names of output_norm in architectures that call it otherwise."""
_IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "moe.gate": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    **dict(
        zip(BESIDE_NORMS, ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"), strict=True)
    ),
}
_ALONE = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "moe.gate.scale": "ffn_gate_inp.scale",
    "moe.gate.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}
"""Vectors that do not belong to a matrix or norm."""
_AFTER_ATTENTION = "post_attention_norm"
_NORMS = {
    "before_attention": "attn_norm",
    "after_attention": _AFTER_ATTENTION,
    "before_feed_forward": "ffn_norm",
    "after_feed_forward": "post_ffw_norm",
}
"""Names of norms by their place in the layer (layer_spec.NormNames)."""
_AS_TRANSFORMERS: tuple[Family, ...] = ("glm4_moe", "gpt_oss", "seed_oss", *DELTA_FAMILIES)
"""Architectures in which the norm before the feed-forward has transformers' name."""
_INTERLEAVED: tuple[Family, ...] = ("llama", "mixtral", "smollm3", "granite", "ministral3")
"""Architectures in which llama.cpp rotates neighbouring pairs of queries and keys, and stores rows
in that order.
"""
_IGNORED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_FUSED = {
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
}
"""Phi-3's matrices that consist of several, by their names in folders."""


def stored_tensors(file: GgufFile, arch: Architecture) -> dict[str, AnyStored]:
    """Map each canonical name of `arch` to its stored tensor, whether the file has it or not."""
    tensors: dict[str, AnyStored] = {}
    for name, shape in expected_tensors(arch).items():
        inner = IN_LAYER.match(name)
        if inner is None:
            base, _, kind = name.rpartition(".")
            source = _TOP[base]
            if base == "model.norm":
                source = _FINAL_NORMS.get(arch.family, source)
            tensors[name] = StoredTensor(file, f"{source}.{kind}", StoredPart(name, shape, shape))
            continue
        spec, prefix = arch.layer_specs[int(inner[1])], f"blk.{inner[1]}."
        tensors[name] = stored_in_layer(file, arch, spec, prefix, name[inner.end() :], shape)
    return tensors


def stored_in_layer(
    file: GgufFile,
    arch: Architecture,
    spec: LayerSpec,
    prefix: str,
    name: str,
    shape: tuple[int, ...],
) -> AnyStored:
    """Return the stored tensor for one tensor of a layer, by its canonical name and shape; the
    file's names begin with `prefix`.
    """
    latent = spec.attention.latent
    if name == ABSORBED and latent is not None:
        return stored_kv_b(file, prefix, arch.heads, latent)
    stored = StoredTensor(file, *_part_of(file, arch, spec, prefix, name, shape))
    return StoredALog(stored) if name == DECAY else stored


Shapes = dict[str, tuple[int, ...]]
"""Shape by name in the file."""


def divided(file: GgufFile, arch: Architecture) -> tuple[Shapes, Shapes]:
    """Divide the file's tensors into the model's and those of prediction layers, which come after
    the others. Leaves out tables that are read with the metadata and tensors for keys and values
    that no layer reads.
    """
    layers = range(announced_layers(file.metadata))
    prefixes = tuple(f"blk.{arch.layers + layer}." for layer in layers)
    behind = {n: stored.shape for n, stored in file.tensors.items() if n.startswith(prefixes)}
    unread = {
        f"blk.{layer}.{name}.weight"
        for layer, spec in enumerate(arch.layer_specs)
        if spec.reads is not None
        for name in ("attn_k", "attn_v", "attn_k_norm")
    }
    own = file.tensors.keys() - behind.keys() - {*_IGNORED} - unread
    return {n: stored.shape for n, stored in file.tensors.items() if n in own}, behind


def announced_layers(metadata: Mapping[str, Value]) -> int:
    """Return the number of prediction layers in the file's metadata; 0 without one."""
    count = metadata.get(f"{metadata['general.architecture']}.nextn_predict_layers", 0)
    return count if isinstance(count, int) else 0


def _part_of(
    file: GgufFile,
    arch: Architecture,
    spec: LayerSpec,
    prefix: str,
    name: str,
    shape: tuple[int, ...],
) -> tuple[str, StoredPart]:
    """Return (name in the file, part of that tensor) for one tensor of a layer."""
    if name in _ALONE:
        return prefix + _ALONE[name], StoredPart(name, shape, shape)
    base, _, kind = name.rpartition(".")
    if expert := EXPERT.fullmatch(name):
        about = spec.beside or spec.feed_forward
        assert isinstance(about, Experts)
        return _of_expert(file, prefix, int(expert[1]), expert[2], kind, about, shape)
    if arch.family in DELTA_FAMILIES and (part := delta_part(file, arch, spec, prefix, name)):
        return part
    if arch.family == "phi3":
        piece = fused(name, StoredPart(name, shape, shape), arch, spec)
        if piece.stored in _FUSED:
            order = order_of(name, arch, spec)
            return prefix + _FUSED[piece.stored], replace(piece, order=order)
    stored_shape = shape[1:] if base == "mlp.shared_expert_gate" else shape
    if base == "conv.conv":
        stored_shape = shape[::2]
    order = _interleaved(base, arch)
    if order is None:
        order = order_of(name, arch, spec)
    source = _IN_LAYER.get(base) or _norm(base, arch, spec)
    return f"{prefix}{source}.{kind}", StoredPart(name, shape, stored_shape, order=order)


def _of_expert(
    file: GgufFile,
    prefix: str,
    expert: int,
    part: str,
    kind: str,
    about: Experts,
    shape: tuple[int, ...],
) -> tuple[str, StoredPart]:
    """Return the stored name and part of one expert's matrix: all experts' matrices are one tensor,
    possibly gates above ups; in files of early 2024 each has its own.
    """
    stacked, alone = f"{prefix}ffn_{part}_exps.{kind}", f"{prefix}ffn_{part}.{expert}.{kind}"
    both = f"{prefix}ffn_gate_up_exps.{kind}"
    if part != "down" and both in file.tensors:
        height, *columns = shape
        rows = slice(0, height) if part == "gate" else slice(height, 2 * height)
        stored_shape = about.count, 2 * height, *columns
        return both, StoredPart(both, shape, stored_shape, expert=expert, rows=rows)
    if stacked not in file.tensors and alone in file.tensors:
        return alone, StoredPart(alone, shape, shape)
    return stacked, StoredPart(stacked, shape, (about.count, *shape), expert=expert)


def _norm(base: str, arch: Architecture, spec: LayerSpec) -> str:
    norms = NORM_NAMES[spec.norms]
    (where,) = (place for place in _NORMS if getattr(norms, place) == base)
    if where == "before_feed_forward" and arch.family in _AS_TRANSFORMERS:
        return _AFTER_ATTENTION
    return _NORMS[where]


def _interleaved(base: str, arch: Architecture) -> Order | None:
    """Return the order that undoes llama.cpp's interleaving of a query or key head's two halves."""
    heads = {"self_attn.q_proj": arch.heads, "self_attn.k_proj": arch.kv_heads}.get(base)
    if heads is None or arch.family not in _INTERLEAVED:
        return None
    return each_head(np.arange(arch.head_size).reshape(-1, 2).T.ravel(), heads)
