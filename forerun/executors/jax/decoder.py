"""The target model as a pure function: embeddings, L pre-norm blocks, final norm, head.

How nodes see each other is not known here: `attend` gets a layer's number, queries, keys and values
and returns the context. Layers run in a scan where they are stacked, else one after the other; the
arithmetic is the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.jax.kv import sanitised
from forerun.executors.jax.layers import product, rms_norm, rotate, rotation, swiglu
from forerun.executors.jax.sharding import Sharding
from forerun.executors.jax.weights import Params
from forerun.models.arch import Architecture

Attend = Callable[[Any, Array, Array, Array], Array]
"""(layer, queries [R,N,A,E], keys [R,N,G,E], values [R,N,G,E]), rotated -> context [R,N,A,E]."""


class Forwarded(NamedTuple):
    """What a pass gives.

    last          [R,N,H] residual stream after the last layer
    keys, values  [L,R,N,G,E] of the nodes, ready to be kept
    streams       tuple of [R,N,H] entering the layers that were asked for
    """

    last: Array
    keys: Array
    values: Array
    streams: tuple[Array, ...]


class Decoder(NamedTuple):
    """What does not change: the model's description and where its arrays lie."""

    arch: Architecture
    sharding: Sharding

    def forward(
        self,
        params: Params,
        tokens: Array,
        positions: Array,
        attend: Attend,
        aux_layers: tuple[int, ...] = (),
    ) -> Forwarded:
        """Run tokens and positions int32[R,N]. aux_layers as transformers' hidden_states."""
        arch = self.arch
        rotary = rotation(positions, params["frequencies"], arch.rope.attention_factor)
        x = self.sharding.put(self.embed(params, tokens), None, None, None)

        def layer(x: Array, numbered: tuple[Params, Array]) -> tuple[Array, tuple[Array, ...]]:
            weights, number = numbered
            context, kept = self._attention(weights, x, rotary, lambda *qkv: attend(number, *qkv))
            after = x + context
            after = after + self._mlp(weights, after)
            return after, (*kept, x) if aux_layers else kept

        last, kept = _over_layers(layer, x, params["layers"], arch.layers)
        entering = kept[2] if aux_layers else None
        streams = tuple(
            last if index == arch.layers or entering is None else entering[index]
            for index in aux_layers
        )
        return Forwarded(last, kept[0], kept[1], streams)

    def embed(self, params: Params, tokens: Array) -> Array:
        """[...,H] for tokens int32[...]."""
        return jnp.take(params["embed"], tokens, axis=0, mode="clip")

    def logits(self, params: Params, last: Array) -> Array:
        """float32[n,V] from residual streams [n,H] after the last layer."""
        head = params.get("head", params["embed"])
        normed = rms_norm(last, params["norm"], self.arch.norm_eps)
        return self.sharding.put(product(normed, head).astype(jnp.float32), None, None)

    def _attention(
        self, weights: Params, x: Array, rotary: tuple[Array, Array], attend: Callable[..., Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        arch, put = self.arch, self.sharding.put
        normed = rms_norm(x, weights["input_layernorm"], arch.norm_eps)

        def heads(name: str, count: int) -> Array:
            made = product(normed, weights[f"{name}_proj"], weights.get(f"{name}_proj.bias"))
            return put(made.reshape(*x.shape[:2], count, -1), None, None, "model", None)

        q, k, v = heads("q", arch.heads), heads("k", arch.kv_heads), heads("v", arch.kv_heads)
        if arch.qk_norm:
            q = rms_norm(q, weights["q_norm"], arch.norm_eps)
            k = rms_norm(k, weights["k_norm"], arch.norm_eps)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        k, v = sanitised(k, v)
        context = attend(q, k, v).reshape(*x.shape[:2], -1)
        return self._summed(weights, "o_proj", context), (k, v)

    def _mlp(self, weights: Params, x: Array) -> Array:
        normed = rms_norm(x, weights["post_attention_layernorm"], self.arch.norm_eps)
        gate, up = (
            product(normed, weights[name], weights.get(f"{name}.bias"))
            for name in ("gate_proj", "up_proj")
        )
        wide = self.sharding.put(swiglu(gate, up), None, None, "model")
        return self._summed(weights, "down_proj", wide)

    def _summed(self, weights: Params, name: str, x: Array) -> Array:
        """A product whose inputs are cut by shard: the sum over the shards, then the bias."""
        made = self.sharding.put(product(x, weights[name]), None, None, None)
        bias = weights.get(f"{name}.bias")
        return made if bias is None else (made + bias).astype(made.dtype)


def _over_layers(
    layer: Callable[..., tuple[Array, tuple[Array, ...]]], x: Array, layers: Any, count: int
) -> tuple[Array, tuple[Array, ...]]:
    """The stream after the last layer, and what each layer gave, [L, ...]."""
    if isinstance(layers, dict):
        return lax.scan(layer, x, (layers, jnp.arange(count)))
    given = []
    for number, weights in enumerate(layers):
        x, kept = layer(x, (weights, number))
        given.append(kept)
    return x, tuple(jnp.stack(each) for each in zip(*given, strict=True))
