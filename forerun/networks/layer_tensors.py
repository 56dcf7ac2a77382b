"""Names and shapes of a layer's tensors, derived from its description (layer_spec.py)."""

from forerun.networks.cache_layer import CacheLayer
from forerun.networks.layer_spec import (
    BESIDE_NORMS,
    NORM_NAMES,
    Dense,
    Experts,
    LayerSpec,
)


def tensors_of(
    spec: LayerSpec, hidden: int, heads: int, cache: CacheLayer
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors, for `heads` query heads and a cache of this shape, by
    canonical name without the layer's prefix, in the order of computation.
    """
    tensors, names = _Tensors(), NORM_NAMES[spec.norms]
    tensors.norm(names.before_attention, hidden)
    if spec.recurrent is not None:
        tensors.found |= spec.recurrent.tensors(hidden)
    elif spec.attention.latent is None:
        _heads_tensors(tensors, spec, hidden, heads, cache)
    else:
        _latent_tensors(tensors, spec, hidden, heads)
    if spec.attention.sinks:
        tensors.found["self_attn.sinks"] = (heads,)
    tensors.norm(names.after_attention, hidden)
    tensors.norm(names.before_feed_forward, hidden)
    match spec.feed_forward:
        case Dense(width, bias):
            tensors.feed_forward("mlp", width, hidden, bias)
        case Experts() as experts:
            _experts_tensors(tensors, hidden, experts)
    if spec.beside is not None:
        tensors.norm(BESIDE_NORMS[0], hidden)
        tensors.norm(BESIDE_NORMS[1], hidden)
        _experts_tensors(tensors, hidden, spec.beside, "moe")
        tensors.norm(BESIDE_NORMS[2], hidden)
    tensors.norm(names.after_feed_forward, hidden)
    if spec.token_vector:
        tensors.matrix("per_layer_input_gate", spec.token_vector, hidden)
        tensors.matrix("per_layer_projection", hidden, spec.token_vector)
        tensors.norm("post_per_layer_input_norm", hidden)
    if spec.scaled:
        tensors.found["layer_scalar"] = (1,)
    return tensors.found


class _Tensors:
    """Names and shapes, in the order in which they are added."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, ...]] = {}

    def norm(self, name: str | None, width: int) -> None:
        if name is not None:
            self.found[f"{name}.weight"] = (width,)

    def matrix(self, name: str, rows: int, columns: int, bias: bool = False) -> None:
        self.found[f"{name}.weight"] = (rows, columns)
        if bias:
            self.found[f"{name}.bias"] = (rows,)

    def feed_forward(self, name: str, width: int, hidden: int, bias: bool = False) -> None:
        self.matrix(f"{name}.gate_proj", width, hidden, bias)
        self.matrix(f"{name}.up_proj", width, hidden, bias)
        self.matrix(f"{name}.down_proj", hidden, width, bias)


def _heads_tensors(
    tensors: _Tensors, spec: LayerSpec, hidden: int, heads: int, cache: CacheLayer
) -> None:
    queries, keys = heads * cache.head_size, cache.kv_heads * cache.head_size
    own = [] if spec.reads is not None else [("k", keys), ("v", keys)]
    own = own[:1] if spec.attention.keyed_values else own
    gate = [("gate", queries)] if spec.attention.gated else []
    for part, width in (("q", queries), *own, *gate):
        tensors.matrix(f"self_attn.{part}_proj", width, hidden, spec.qkv_bias)
    if spec.qk_norm or spec.wide_qk_norm:
        for part, width in (("q", queries), *own[:1]):
            tensors.norm(f"self_attn.{part}_norm", width if spec.wide_qk_norm else cache.head_size)
    tensors.matrix("self_attn.o_proj", hidden, queries, spec.o_bias)


def _latent_tensors(tensors: _Tensors, spec: LayerSpec, hidden: int, heads: int) -> None:
    latent = spec.attention.latent
    assert latent is not None
    queries = heads * (latent.nope + latent.rope)
    if latent.query_rank is None:
        tensors.matrix("self_attn.q_proj", queries, hidden)
    else:
        tensors.matrix("self_attn.q_a_proj", latent.query_rank, hidden, spec.qkv_bias)
        tensors.norm("self_attn.q_a_layernorm", latent.query_rank)
        tensors.matrix("self_attn.q_b_proj", queries, latent.query_rank)
    width = latent.rank + latent.rope
    tensors.matrix("self_attn.kv_a_proj_with_mqa", width, hidden, spec.qkv_bias)
    tensors.norm("self_attn.kv_a_layernorm", latent.rank)
    out_of = heads * (latent.nope + latent.value)
    tensors.matrix("self_attn.kv_b_proj", out_of, latent.rank)
    tensors.matrix("self_attn.o_proj", hidden, heads * latent.value, spec.o_bias)


def _experts_tensors(tensors: _Tensors, hidden: int, experts: Experts, room: str = "mlp") -> None:
    router = experts.router
    tensors.matrix(f"{room}.gate", experts.count, hidden, router.bias)
    if router.own_input:
        tensors.found[f"{room}.gate.scale"] = (hidden,)
    if router.scaled:
        tensors.found[f"{room}.gate.per_expert_scale"] = (experts.count,)
    if router.correction:
        tensors.found[f"{room}.gate.e_score_correction_bias"] = (experts.count,)
    for expert in experts.here:
        tensors.feed_forward(f"{room}.experts.{expert}", experts.width, hidden, experts.bias)
    if experts.shared:
        tensors.feed_forward(f"{room}.shared_expert", experts.shared, hidden)
        if experts.shared_gate:
            tensors.matrix(f"{room}.shared_expert_gate", 1, hidden)
