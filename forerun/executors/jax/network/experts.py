"""Mixtures of experts as pure functions (arXiv 1701.06538, as in Qwen2-MoE and DeepSeek). Every
expert runs every row, and a row adds each expert's output by its router weight, which is mostly
zero: shapes are then constant, and each shard runs its own experts. It costs count / top_k times
the products that are needed.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.jax.network.layers import GATES, product, products
from forerun.networks.layer_spec import Experts, Router

Weights = dict[str, Any]


def mixture(
    weights: Weights, about: Experts, activation: str, x: Array, routed: Array | None = None
) -> Array:
    """Return the weighted sum of the experts' outputs, float32[R,N,H], without the shared expert.

    weights  the layer's, `gate` [H,count], its correction and stacked `experts.*`
    about    number of experts, and of experts per row
    x        [R,N,H]
    routed   the router's input, [R,N,H]; None: x
    """
    # DeepSeek's scores are so close that 16 bits would choose other experts.
    sigmoid = about.router.scores == "sigmoid"
    seen = x if routed is None else routed
    read, gate = (a.astype(jnp.float32) if sigmoid else a for a in (seen, weights["gate"]))
    logits = product(read, gate, weights.get("gate.bias")).astype(jnp.float32)
    correction = weights.get("gate.e_score_correction_bias")
    taken, chosen = routes(logits, about.router, about.top_k, correction)
    if about.router.scaled:
        taken = taken * weights["gate.per_expert_scale"][chosen]
    every = jnp.arange(about.count)
    share = ((chosen[..., None] == every) * taken[..., None]).sum(-2)

    def each(what: str, name: str, x: Array) -> Array:
        return products(what, x, weights[name], weights.get(f"{name}.bias"))

    gate, up = (each("rnh,xih->rnxi", f"experts.{name}_proj", x) for name in ("gate", "up"))
    wide = GATES[activation](gate, up)
    down = each("rnxi,xhi->rnxh", "experts.down_proj", wide).astype(jnp.float32)
    # The output of an expert that a row does not use may be infinite.
    down = jnp.where(share[..., None] > 0, down, 0.0)
    return (down * share[..., None]).sum(-2)


def routes(
    logits: Array, router: Router, top_k: int, correction: Array | None
) -> tuple[Array, Array]:
    """Return each row's expert weights float32[...,k] and numbers int32[...,k], best first.

    logits  float32[...,count]; correction: float32[count], if the router has one
    """
    if router.scores == "sigmoid":
        scores = 1 / (1 + jnp.exp(-logits))
    else:
        scores = jnp.exp(logits - logits.max(-1, keepdims=True))
        scores = scores / scores.sum(-1, keepdims=True)
    ranked = scores if correction is None else scores + correction
    if router.groups > 1:
        grouped = ranked.reshape(*ranked.shape[:-1], router.groups, -1)
        _, best = lax.top_k(lax.top_k(grouped, router.summed)[0].sum(-1), router.topk_group)
        kept = (best[..., None] == jnp.arange(router.groups)).any(-2)
        ranked = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(ranked.shape)
    _, chosen = lax.top_k(ranked, top_k)
    taken = jnp.take_along_axis(scores, chosen, -1)
    if router.normalised:
        taken = taken / (taken.sum(-1, keepdims=True) + _LEAST)
    return taken * router.scale, chosen


_LEAST = 1e-20
"""Keeps a sum of sigmoids above zero."""


def shared(weights: Weights, activation: str, x: Array) -> Array:
    """Return float32[R,N,H], the output of the expert that every row runs, times the sigmoid of its
    gate, if it has one.
    """
    wide = GATES[activation](
        product(x, weights["shared.gate_proj"]), product(x, weights["shared.up_proj"])
    )
    made = product(wide, weights["shared.down_proj"]).astype(jnp.float32)
    if "shared_expert_gate" not in weights:
        return made
    score = product(x.astype(jnp.float32), weights["shared_expert_gate"].astype(jnp.float32))
    return made / (1 + jnp.exp(-score))
