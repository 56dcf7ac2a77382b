"""Numbers a model's tensors and describes its layers, in the compiled core's terms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.drafts.block_config import BlockHead
from forerun.drafts.eagle_config import DraftHead
from forerun.executors.cpu import native
from forerun.executors.cpu.latent import numbered, sizes_of
from forerun.executors.cpu.states import net_sizes
from forerun.interface.executor import ExecutorLimits
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import (
    BESIDE_NORMS,
    NORM_NAMES,
    Activation,
    Dense,
    Experts,
    LayerSpec,
    ShortConvolution,
)
from forerun.networks.rope import Rope, frequency_table

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_NET = ("q_proj", "k_proj", "v_proj", "out_proj")
_CONVOLUTION = ("in_proj", "out_proj")
"""They take the numbers of attention's first and last matrix."""
_GATE, _NET_GATES = ("gate_proj",), ("z_proj", "b_proj", "a_proj")
"""Numbered after all other matrices of a layer."""
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
LAYER_MATRICES = (
    *(f"self_attn.{name}" for name in _ATTENTION),
    *(f"mlp.{name}" for name in _FEED_FORWARD),
)
"""The matrices of a draft network's layer, in the order of their numbers."""
_VECTORS = ("per_layer_input_gate", "per_layer_projection")
_FEED, _ROUTER, _SHARED_GATE, _EXPERTS = 4, 7, 8, 9
"""Numbers of a layer's matrices in csrc/model.cpp, `Model::matrix`; attention's come first."""
_HEAD = (-1, 1)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor: layer (-1 = the model's own) and number within the layer."""

    name: str
    layer: int
    which: int


def matrices(arch: Architecture) -> list[Place]:
    """Return the places of all matrices in the order in which a step reads them; names without
    `.weight`.
    """
    places = [Place("model.embed_tokens", -1, 0)]
    if arch.token_vector:
        places.append(Place("model.per_layer_model_projection", -1, 3))
    for layer, spec in enumerate(arch.layer_specs):
        prefix = f"model.layers.{layer}."
        places += _attention_matrices(prefix, spec, layer)
        match spec.feed_forward:
            case Dense():
                places += _placed(f"{prefix}mlp.", _FEED_FORWARD, layer, _FEED)
            case Experts() as experts:
                places += _expert_matrices(f"{prefix}mlp.", experts, layer)
        if spec.beside is not None:
            places += _expert_matrices(f"{prefix}moe.", spec.beside, layer)
        if spec.token_vector:
            places += _placed(prefix, _VECTORS, layer, _behind_experts(spec) + 3)
    return places if arch.tied_head else [*places, Place("lm_head", *_HEAD)]


def _behind_experts(spec: LayerSpec) -> int:
    """Return the first number after those of a layer's experts."""
    mixtures = (spec.feed_forward, spec.beside)
    count = sum(mixture.count for mixture in mixtures if isinstance(mixture, Experts))
    return _EXPERTS + len(_FEED_FORWARD) * count


def _attention_matrices(prefix: str, spec: LayerSpec, layer: int) -> list[Place]:
    latent, first = spec.attention.latent, _behind_experts(spec)
    if isinstance(spec.recurrent, ShortConvolution):
        return _placed(f"{prefix}conv.", _CONVOLUTION, layer, 0, step=_FEED - 1)
    if spec.recurrent is not None:
        net = f"{prefix}linear_attn."
        *into, out = _placed(net, _NET, layer, 0)
        return [*into, *_placed(net, _NET_GATES, layer, first), out]
    prefix += "self_attn."
    if latent is not None:
        return [Place(prefix + name, layer, which) for name, which in numbered(latent, first)]
    *into, out = _placed(prefix, _ATTENTION, layer, 0)
    own = 1 if spec.reads is not None else 2 if spec.attention.keyed_values else 3
    into = into[:own]
    return [*into, *_placed(prefix, _GATE[: spec.attention.gated], layer, first), out]


def _expert_matrices(prefix: str, experts: Experts, layer: int) -> list[Place]:
    places = [Place(f"{prefix}gate", layer, _ROUTER)]
    if experts.shared_gate:
        places.append(Place(f"{prefix}shared_expert_gate", layer, _SHARED_GATE))
    for expert in range(experts.count):
        first = _EXPERTS + len(_FEED_FORWARD) * expert
        places += _placed(f"{prefix}experts.{expert}.", _FEED_FORWARD, layer, first)
    if experts.shared:
        places += _placed(f"{prefix}shared_expert.", _FEED_FORWARD, layer, _FEED)
    return places


def _placed(
    prefix: str, names: tuple[str, ...], layer: int, first: int, step: int = 1
) -> list[Place]:
    return [Place(prefix + name, layer, first + step * i) for i, name in enumerate(names)]


def vectors(arch: Architecture) -> list[Place]:
    """Return the places of all vectors: the weight of each norm and a router's correction. The
    layer is -1 for the model's own, the number counts the layer's vectors.
    """
    places = []
    for layer, spec in enumerate(arch.layer_specs):
        prefix, norms = f"model.layers.{layer}.", NORM_NAMES[spec.norms]
        q_norm = k_norm = None
        net: tuple[str | None, ...] = ()
        if isinstance(spec.recurrent, ShortConvolution):
            bias = "conv.conv.bias" if spec.recurrent.bias else None
            net = ("conv.conv.weight", None, None, None, bias)
        elif spec.recurrent is not None:
            names = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
            net = tuple(f"linear_attn.{name}" for name in names)
        elif (latent := spec.attention.latent) is not None:
            q_norm = "self_attn.q_a_layernorm.weight" if latent.query_rank else None
            k_norm = "self_attn.kv_a_layernorm.weight"
        elif spec.qk_norm or spec.wide_qk_norm:
            q_norm = "self_attn.q_norm.weight"
            k_norm = "self_attn.k_norm.weight" if spec.reads is None else None
        experts, correction = spec.feed_forward, "mlp.gate.e_score_correction_bias"
        named = (
            f"{norms.before_attention}.weight" if norms.before_attention else None,
            f"{norms.before_feed_forward}.weight" if norms.before_feed_forward else None,
            q_norm,
            k_norm,
            f"{norms.after_attention}.weight" if norms.after_attention else None,
            f"{norms.after_feed_forward}.weight" if norms.after_feed_forward else None,
            correction if isinstance(experts, Experts) and experts.router.correction else None,
            "self_attn.sinks" if spec.attention.sinks else None,
            *(*net, *(None,) * (5 - len(net))),
            "post_per_layer_input_norm.weight" if spec.token_vector else None,
            "layer_scalar" if spec.scaled else None,
            *_beside_vectors(spec),
        )
        places += [Place(prefix + name, layer, i) for i, name in enumerate(named) if name]
    if arch.token_vector:
        places.append(Place("model.per_layer_projection_norm.weight", -1, 1))
    return [*places, Place("model.norm.weight", -1, 0)]


def _beside_vectors(spec: LayerSpec) -> tuple[str | None, ...]:
    """Return the names of vectors of experts next to a feed-forward: those of the router, and
    norms.
    """
    if spec.beside is None:
        return ()
    router = spec.beside.router
    return (
        "moe.gate.scale" if router.own_input else None,
        "moe.gate.per_expert_scale" if router.scaled else None,
        *(f"{name}.weight" for name in BESIDE_NORMS),
    )


def sizes_for(
    about: Architecture | DraftHead | BlockHead, limits: ExecutorLimits, layers: int, **more: Any
) -> native.Sizes:
    """Return the sizes of a native model of `layers` layers that uses another one's threads.

    more  further fields, and those that differ from the limits
    """
    if isinstance(about, Architecture):
        more = sizes_of(about.latent) | net_sizes(about, limits) | more
    return native.Sizes(
        layers=layers,
        hidden=about.hidden,
        heads=about.heads,
        kv_heads=about.kv_heads,
        head_size=about.head_size,
        ffn=about.ffn,
        norm_eps=about.norm_eps,
        page_size=limits.page_size,
        pages=limits.pages,
        **{
            "vocab": about.vocab,
            "max_nodes": limits.max_nodes,
            "context": limits.context,
            "threads": 1,
        }
        | more,
    )


_GATES: dict[Activation, int] = {"silu": 0, "clamped_silu": 1, "gelu_tanh": 2, "gelu": 3}
"""`Gate` of csrc/kernels.h."""


def layer_kind(arch: Architecture, layer: int) -> native.LayerKind:
    """Return the description of a layer for the core; `limits.refusal` must be None."""
    spec = arch.layer_specs[layer]
    kind = native.LayerKind(
        window=spec.attention.window or 0,
        gate=_GATES[spec.activation],
        rope=arch.ropes.index(arch.rope_of(spec)),
        wide_norms=spec.wide_qk_norm,
        late_norms=spec.late_qk_norm,
        recurrent=spec.recurrent is not None,
        kv_heads=arch.cache_of(spec).kv_heads,
        head_size=arch.cache_of(spec).head_size,
        reads=0 if spec.reads is None else spec.reads + 1,
        score_scale=spec.attention.scale,
        residual=spec.residual,
        softcap=spec.attention.softcap or 0.0,
    )
    kind.normed_values = spec.attention.normed_values
    kind.keyed_values = spec.attention.keyed_values
    experts = spec.beside
    match spec.feed_forward:
        case Dense(width) if experts is None:
            kind.ffn = width
        case Dense(width):
            kind.beside = width
        case Experts() as experts:
            pass
    if experts is not None:
        router = experts.router
        kind.ffn, kind.experts, kind.top_k = experts.width, experts.count, experts.top_k
        kind.shared, kind.sigmoid = experts.shared, router.scores == "sigmoid"
        kind.normalised, kind.router_scale = router.normalised, router.scale
        kind.groups, kind.kept, kind.summed = router.groups, router.topk_group, router.summed
    return kind


class RopeTable(native.Ropes):
    """Rotary frequencies of (rope, head size) pairs; owns the arrays it points to."""

    def __init__(self, ropes: Sequence[tuple[Rope, int]]) -> None:
        frequencies = np.ascontiguousarray(frequency_table(ropes))
        factors = np.array([rope.attention_factor for rope, _ in ropes], np.float32)
        self._held = frequencies, factors
        super().__init__(*frequencies.shape, *(each.ctypes.data for each in self._held))


_PRECISE = ("linear_attn.b_proj", "linear_attn.a_proj")


def routes(place: Place) -> bool:
    """Return whether a matrix keeps its own precision, because its product selects or weights
    experts, or gates a recurrent state.
    """
    weighs = place.which in (_ROUTER, _SHARED_GATE) or place.name.endswith(_PRECISE)
    return place.layer >= 0 and weighs
