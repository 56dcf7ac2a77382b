"""A mixture of experts as one pure function (arXiv 1701.06538, as in Qwen2-MoE and Qwen3-MoE).

Every expert runs every row, and a row takes from each what its router gives it, mostly nothing:
shapes then depend on nothing, and each shard runs its own experts. It costs count / top_k times the
products that are needed.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.jax.layers import GATES, product
from forerun.models.layer_spec import Experts

Weights = dict[str, Any]


def mixture(weights: Weights, about: Experts, activation: str, x: Array) -> Array:
    """The weighted sum of the experts' outputs, float32[R,N,H], without the shared expert.

    weights  the layer's, `gate` [H,count] and stacked `experts.*`
    about    how many there are, and how many a row takes
    x        [R,N,H]
    """
    chances = product(x, weights["gate"]).astype(jnp.float32)
    chances = jnp.exp(chances - chances.max(-1, keepdims=True))
    chances = chances / chances.sum(-1, keepdims=True)
    taken, chosen = lax.top_k(chances, about.top_k)
    if about.router.normalised:
        taken = taken / taken.sum(-1, keepdims=True)
    every = jnp.arange(about.count)
    share = ((chosen[..., None] == every) * taken[..., None]).sum(-2)
    gate = _each("rnh,xih->rnxi", x, weights["experts.gate_proj"])
    up = _each("rnh,xih->rnxi", x, weights["experts.up_proj"])
    wide = GATES[activation](gate, up)
    down = _each("rnxi,xhi->rnxh", wide, weights["experts.down_proj"]).astype(jnp.float32)
    # What a row does not take may be infinite.
    down = jnp.where(share[..., None] > 0, down, 0.0)
    return (down * share[..., None]).sum(-2)


def shared(weights: Weights, activation: str, x: Array) -> Array:
    """float32[R,N,H]: the output of the expert that every row runs, times the sigmoid of
    its gate.
    """
    wide = GATES[activation](
        product(x, weights["shared.gate_proj"]), product(x, weights["shared.up_proj"])
    )
    score = product(x.astype(jnp.float32), weights["shared_expert_gate"].astype(jnp.float32))
    return product(wide, weights["shared.down_proj"]).astype(jnp.float32) / (1 + jnp.exp(-score))


def _each(what: str, x: Array, weights: Array) -> Array:
    made = jnp.einsum(
        what,
        x,
        weights,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return made.astype(x.dtype)
