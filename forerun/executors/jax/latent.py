"""Multi-head latent attention, absorbed (forerun.models.layer_spec.Latent), as pure functions: what
torch's projections do. A head's query is brought into the latent's space, where one key serves all
heads and its first numbers are the value; what is found there is brought out again.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from forerun.executors.jax.layers import product, products, rms_norm, rotate
from forerun.models.layer_spec import Latent

Weights = dict[str, Any]


def enter(
    weights: Weights, about: Latent, heads: int, x: Array, rotary: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Queries [R,N,A,rank+rope] and keys [R,N,1,rank+rope] of x [R,N,H], rotated, keys ready for
    pages.

    weights  the layer's; heads: A; rotary: cos and sin of the nodes' positions
    """
    lower, name = x, "q_proj"
    if about.query_rank is not None:
        lower, name = product(x, weights["q_a_proj"], weights.get("q_a_proj.bias")), "q_b_proj"
        lower = rms_norm(lower, weights["q_a_layernorm"], about.norm_eps)
    made = product(lower, weights[name]).reshape(*x.shape[:2], heads, -1)
    plain, turned = jnp.split(made, [about.nope], -1)
    into = _of_heads(weights, about, heads)[..., : about.nope]
    queries = [products("rnad,kad->rnak", plain, into), rotate(turned, *rotary)]
    name = "kv_a_proj_with_mqa"
    kept, key = jnp.split(product(x, weights[name], weights.get(f"{name}.bias")), [about.rank], -1)
    latent = rms_norm(kept, weights["kv_a_layernorm"], about.norm_eps)
    keys = _sanitised(latent[:, :, None], rotate(key[:, :, None], *rotary))
    return jnp.concatenate(queries, -1), keys


def leave(weights: Weights, about: Latent, context: Array) -> Array:
    """Return o_proj's input, [R,N,A*value], from the heads' context in the latent space
    [R,N,A,rank].
    """
    out_of = _of_heads(weights, about, context.shape[2])[..., about.nope :]
    values = products("rnak,kad->rnad", context, out_of)
    return values.reshape(*values.shape[:2], -1)


def _of_heads(weights: Weights, about: Latent, heads: int) -> Array:
    """[rank,A,nope+value]"""
    matrix: Array = weights["kv_b_proj"]
    return matrix.reshape(about.rank, heads, -1)


def _sanitised(latent: Array, key: Array) -> Array:
    """kv.sanitised of keys that begin with their values: what is no number in the latent becomes 0,
    and the rotated key NaN.
    """
    spoiled = (latent * 0).sum(-1, keepdims=True)
    clean = jnp.nan_to_num(latent, nan=0.0, posinf=0.0, neginf=0.0)
    return jnp.concatenate([clean, key + spoiled], -1)
