"""The target model as a pure function: embeddings, L layers as their specs say, final norm, head.

How nodes see each other is not known here: `attend` gets a layer's number and spec, queries, keys
and values and returns the context. Layers run in a scan where they are stacked, else one after the
other; the arithmetic is the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.executors.jax.experts import mixture, shared
from forerun.executors.jax.kv import sanitised
from forerun.executors.jax.latent import enter, leave
from forerun.executors.jax.layers import GATES, product, rms_norm, rotate, rotation, softcapped
from forerun.executors.jax.sharding import Sharding
from forerun.executors.jax.weights import Params
from forerun.models.arch import Architecture
from forerun.models.layer_spec import NORM_NAMES, AttentionSpec, Dense, Latent, LayerSpec

Numbered = tuple[Any, AttentionSpec]
"""A layer's number, which is traced in a scan, and how it attends."""

Attend = Callable[[Numbered, Array, Array, Array], Array]
"""(layer, queries [R,N,A,E], keys [R,N,G,E], values [R,N,G,E]), rotated -> context [R,N,A,E]."""

Rotary = tuple[Array, Array]
"""Cos and sin, each float32[R,N,E/2]."""


class Forwarded(NamedTuple):
    """The result of a pass.

    last          [R,N,H] residual stream after the last layer
    keys, values  [L,R,N,G,E] of the nodes, ready to be cached; values of width 0 if keys begin with
                  them (latent attention)
    streams       [R,N,H] input of each requested layer
    """

    last: Array
    keys: Array
    values: Array
    streams: tuple[Array, ...]

    @property
    def features(self) -> Array:
        """[R,N,F*H]: the requested streams, concatenated; width 0 if there are none."""
        if not self.streams:
            return self.last[..., :0]
        return jnp.concatenate(self.streams, -1)


class JaxDecoder(NamedTuple):
    """The fixed parts of a model: its description and its arrays' sharding."""

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
        """One forward pass over tokens and positions, int32[R,N] each.

        params      of the model (weights.py)
        attend      how nodes see pages and each other
        aux_layers  hidden states to keep, numbered as transformers' hidden_states (L = after the
                    last)

        The activations' dtype is the parameters'. Pure: writes no pages.
        """
        specs = self.arch.layer_specs
        rotary = {
            rope: rotation(positions, frequencies, rope.attention_factor)
            for rope, frequencies in zip(self.arch.ropes, params["frequencies"], strict=True)
        }
        x = self.sharding.put(self.embed(params, tokens), None, None, None)
        if self.arch.embedding_scale != 1.0:
            # Rounded to the dtype first, as the models' own code has it.
            x = x * np.asarray(self.arch.embedding_scale, x.dtype)
        layers = params["layers"]
        if isinstance(layers, dict):
            last, kept = self._scanned(layers, x, rotary[specs[0].rope], attend, bool(aux_layers))
        else:
            last, kept = x, []
            for number, (spec, weights) in enumerate(zip(specs, layers, strict=True)):
                entering, turned = last, rotary[spec.rope]
                last, own = self.layer(spec, weights, last, turned, _of(attend, number, spec))
                kept.append((*own, entering) if number in aux_layers else own)
            streams = {number: own[2] for number, own in enumerate(kept) if len(own) > 2}
            keys, values = (jnp.stack([own[part] for own in kept]) for part in range(2))
            kept = keys, values, streams
        asked = tuple(last if layer == len(specs) else kept[2][layer] for layer in aux_layers)
        return Forwarded(last, kept[0], kept[1], asked)

    def _scanned(
        self, layers: Params, x: Array, rotary: Rotary, attend: Attend, entering: bool
    ) -> Any:
        """Return the last stream; keys, values and, if requested, the input of each layer, [L,
        ...].
        """
        spec = self.arch.layer_specs[0]

        def layer(x: Array, numbered: tuple[Params, Array]) -> tuple[Array, tuple[Array, ...]]:
            weights, number = numbered
            after, kept = self.layer(spec, weights, x, rotary, _of(attend, number, spec))
            return after, (*kept, x) if entering else kept

        return lax.scan(layer, x, (layers, jnp.arange(self.arch.layers)))

    def embed(self, params: Params, tokens: Array) -> Array:
        """[...,H] rows of the embedding for tokens int32[...], without embedding_scale; ids out of
        range are clipped.
        """
        return jnp.take(params["embed"], tokens, axis=0, mode="clip")

    def logits(self, params: Params, last: Array) -> Array:
        """float32[n,V] from residual streams [n,H] after the last layer: `final_norm`, then
        `read`.
        """
        return self.read(params, self.final_norm(params, last))

    def final_norm(self, params: Params, last: Array) -> Array:
        """[...,H]: the final RMSNorm of residual streams [...,H] after the last layer."""
        return rms_norm(last, params["norm"], self.arch.norm_eps)

    def read(self, params: Params, normed: Array) -> Array:
        """float32[n,V] logits from normed hidden states [n,H], with the model's final soft cap, if
        it has one.
        """
        head: Array = params["embed"] if self.arch.tied_head else params["head"]
        made = self.sharding.put(product(normed, head.T).astype(jnp.float32), None, None)
        return softcapped(made, self.arch.final_softcap)

    def layer(
        self,
        spec: LayerSpec,
        weights: Params,
        x: Array,
        rotary: Rotary,
        attend: Callable[..., Array],
    ) -> tuple[Array, tuple[Array, Array]]:
        """One decoder layer: the residual stream [R,N,H] after it, and its keys and values
        [R,N,G,E] each, rotated and ready for pages.

        spec     what the layer is
        weights  its parameters by short name
        x        [R,N,H] the stream that enters
        rotary   cos and sin of the nodes' positions
        attend   called with queries, keys, values; gives the context
        """
        names = NORM_NAMES[spec.norms]
        before = self._normed(x, weights, names.before_attention)
        context, kept = self._attention(spec, weights, before, rotary, attend)
        x = x + self._normed(context, weights, names.after_attention)
        before = self._normed(x, weights, names.before_feed_forward)
        fed = self._feed_forward(spec, weights, before)
        return x + self._normed(fed, weights, names.after_feed_forward), kept

    def _normed(self, x: Array, weights: Params, name: str | None) -> Array:
        return x if name is None else rms_norm(x, weights[name], self.arch.norm_eps)

    def _attention(
        self,
        spec: LayerSpec,
        weights: Params,
        x: Array,
        rotary: Rotary,
        attend: Callable[..., Array],
    ) -> tuple[Array, tuple[Array, Array]]:
        arch, put = self.arch, self.sharding.put
        if spec.attention.latent is not None:
            return self._latent(spec.attention.latent, weights, x, rotary, attend)

        def heads(name: str, count: int) -> Array:
            made = product(x, weights[f"{name}_proj"], weights.get(f"{name}_proj.bias"))
            return put(made.reshape(*x.shape[:2], count, -1), None, None, "model", None)

        q, k, v = heads("q", arch.heads), heads("k", arch.kv_heads), heads("v", arch.kv_heads)
        if spec.qk_norm:
            q, k = self._normed(q, weights, "q_norm"), self._normed(k, weights, "k_norm")
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        k, v = sanitised(k, v)
        context = attend(q, k, v).reshape(*x.shape[:2], -1)
        return self._summed(weights, "o_proj", context), (k, v)

    def _latent(
        self,
        about: Latent,
        weights: Params,
        x: Array,
        rotary: Rotary,
        attend: Callable[..., Array],
    ) -> tuple[Array, tuple[Array, Array]]:
        """Run latent attention as `_attention` does, with keys that contain the values."""
        queries, keys = enter(weights, about, self.arch.heads, x, rotary)
        kept = keys, keys[..., :0]
        found = leave(weights, about, attend(queries, *kept))
        return self._summed(weights, "o_proj", found), kept

    def _feed_forward(self, spec: LayerSpec, weights: Params, x: Array) -> Array:
        match spec.feed_forward:
            case Dense():
                gate, up = (
                    product(x, weights[name], weights.get(f"{name}.bias"))
                    for name in ("gate_proj", "up_proj")
                )
                wide = self.sharding.put(GATES[spec.activation](gate, up), None, None, "model")
                return self._summed(weights, "down_proj", wide)
            case about:
                mixed = mixture(weights, about, spec.activation, x)
                if about.shared:
                    mixed = mixed + shared(weights, spec.activation, x)
                return self.sharding.put(mixed, None, None, None).astype(x.dtype)

    def _summed(self, weights: Params, name: str, x: Array) -> Array:
        """Return a product whose inputs are sharded: the sum over the shards, then the bias."""
        made = self.sharding.put(product(x, weights[name]), None, None, None)
        bias = weights.get(f"{name}.bias")
        return made if bias is None else (made + bias).astype(made.dtype)


def _of(attend: Attend, number: Any, spec: LayerSpec) -> Callable[..., Array]:
    return lambda *qkv: attend((number, spec.attention), *qkv)
