"""Parts that some layers have in addition to attention and one feed-forward (layer_spec.LayerSpec),
as pure functions with the results of torch/decoder/beside.py.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from forerun.executors.jax.network.experts import mixture
from forerun.executors.jax.network.layers import GATES, product, rms_norm
from forerun.executors.jax.network.weights import Params
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import BESIDE_NORMS, LayerSpec


def beside_experts(spec: LayerSpec, weights: Params, eps: float, x: Array, fed: Array) -> Array:
    """Return [R,N,H] for the residual stream x [R,N,H] and the feed-forward's output, with experts
    in parallel with it, each of the two with norms of its own.
    """
    about = spec.beside
    assert about is not None
    behind_fed, before, behind = (weights[name] for name in BESIDE_NORMS)
    routed = None
    if about.router.own_input:
        routed = rms_norm(x, weights["gate.scale"] * np.float32(x.shape[-1] ** -0.5), eps)
    mixed = mixture(weights, about, spec.activation, rms_norm(x, before, eps), routed)
    return rms_norm(fed, behind_fed, eps) + rms_norm(mixed.astype(x.dtype), behind, eps)


def token_vectors(arch: Architecture, params: Params, tokens: Array, x: Array) -> Array:
    """Return [R,N,L,D], each token's vectors for all layers, of tokens int32[R,N] and their
    embeddings [R,N,H], scaled.
    """
    shape = *tokens.shape, arch.layers, arch.token_vector
    vectors = product(x, params["token_projection"]) * np.asarray(arch.hidden**-0.5, x.dtype)
    vectors = rms_norm(vectors.reshape(shape), params["token_norm"], arch.norm_eps)
    rows = jnp.take(params["token_rows"], tokens, axis=0, mode="clip")
    rows = rows.reshape(shape) * np.asarray(arch.token_vector**0.5, x.dtype)
    return (vectors + rows) * np.asarray(2**-0.5, x.dtype)


def with_vector(spec: LayerSpec, weights: Params, eps: float, x: Array, vector: Array) -> Array:
    """Return the residual stream x [R,N,H] with a layer's function of the tokens' vectors [R,N,D]
    added.
    """
    gate = product(x, weights["per_layer_input_gate"])
    added = product(GATES[spec.activation](gate, vector), weights["per_layer_projection"])
    return x + rms_norm(added, weights["post_per_layer_input_norm"], eps)
