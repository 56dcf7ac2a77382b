"""The target model as a pure function: embeddings, L layers as their specs describe, final norm,
head. Independent of pages and trees: `attend` gets a layer's number and spec, queries, keys and
values and returns the attention output.

Layers run in a scan if they are stacked, else one after the other, with the same arithmetic. Latent
attention (layer_spec.Latent) is absorbed, as in torch: a head's query is mapped to the latent
space, where one key serves all heads and its first elements are the value; the result is mapped
back.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.executors.jax.network.attention import Layer
from forerun.executors.jax.network.beside import beside_experts, token_vectors, with_vector
from forerun.executors.jax.network.experts import mixture, shared
from forerun.executors.jax.network.kv import CacheKind, kinds_of, sanitised
from forerun.executors.jax.network.layers import (
    GATES,
    product,
    products,
    rms_norm,
    rotate,
    rotation,
    softcapped,
)
from forerun.executors.jax.network.recurrent import Brought, Recur, inputs, no_states, opened
from forerun.executors.jax.network.sharding import Sharding
from forerun.executors.jax.network.weights import Params
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import (
    NORM_NAMES,
    Dense,
    Latent,
    LayerSpec,
)
from forerun.networks.rope import Rope

Weights = dict[str, Any]


def enter(
    weights: Weights, about: Latent, heads: int, x: Array, rotary: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Return queries [R,N,A,rank+rope] and keys [R,N,1,rank+rope] of x [R,N,H], rotated, keys ready
    for pages.

    weights  the layer's; heads: A; rotary: cos and sin of the nodes' positions
    """
    lower, name = x, "q_proj"
    if about.query_rank is not None:
        lower, name = product(x, weights["q_a_proj"], weights.get("q_a_proj.bias")), "q_b_proj"
        lower = rms_norm(lower, weights["q_a_layernorm"], about.norm_eps)
    projected = product(lower, weights[name]).reshape(*x.shape[:2], heads, -1)
    plain, turned = jnp.split(projected, [about.nope], -1)
    into = _of_heads(weights, about, heads)[..., : about.nope]
    queries = [products("rnad,kad->rnak", plain, into), rotate(turned, *rotary)]
    name = "kv_a_proj_with_mqa"
    latent_rows, key = jnp.split(
        product(x, weights[name], weights.get(f"{name}.bias")), [about.rank], -1
    )
    latent = rms_norm(latent_rows, weights["kv_a_layernorm"], about.norm_eps)
    keys = _sanitised(latent[:, :, None], rotate(key[:, :, None], *rotary))
    return jnp.concatenate(queries, -1), keys


def leave(weights: Weights, about: Latent, context: Array) -> Array:
    """Return o_proj's input, [R,N,A*value], from the heads' attention output in the latent space
    [R,N,A,rank].
    """
    out_of = _of_heads(weights, about, context.shape[2])[..., about.nope :]
    values = products("rnak,kad->rnad", context, out_of)
    return values.reshape(*values.shape[:2], -1)


def _of_heads(weights: Weights, about: Latent, heads: int) -> Array:
    """Return kv_b_proj by head, [rank,A,nope+value]."""
    matrix: Array = weights["kv_b_proj"]
    return matrix.reshape(about.rank, heads, -1)


def _sanitised(latent: Array, key: Array) -> Array:
    """Return keys that begin with their values, as kv.sanitised: a non-finite element of the latent
    becomes 0, and the rotated key NaN.
    """
    spoiled = (latent * 0).sum(-1, keepdims=True)
    clean = jnp.nan_to_num(latent, nan=0.0, posinf=0.0, neginf=0.0)
    return jnp.concatenate([clean, key + spoiled], -1)


KeysValues = tuple[Array, ...]

Attend = Callable[..., Array]
"""(Layer, queries [R,N,A,E], keys [R,N,G,E], values [R,N,G,E]), rotated -> attention output
[R,N,A,E]. Without keys and values the layer reads another model's (drafting.py).
"""

Rotary = tuple[Array, Array]
"""Cos and sin, each float32[R,N,E/2]."""


class Forwarded(NamedTuple):
    """The result of a pass.

    last          [R,N,H] residual stream after the last layer
    keys, values  of each of `JaxDecoder.kinds` [L,R,N,G,E] of the nodes, ready to be cached;
                  values of width 0 if keys begin with them (latent attention)
    streams       [R,N,H] input of each requested layer
    brought       the nodes' inputs to the states of each recurrent layer
    """

    last: Array
    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    streams: tuple[Array, ...]
    brought: tuple[Brought, ...] = ()

    @property
    def features(self) -> Array:
        """[R,N,F*H]: the requested streams, concatenated; width 0 if there are none."""
        if not self.streams:
            return self.last[..., :0]
        return jnp.concatenate(self.streams, -1)


class JaxDecoder(NamedTuple):
    """The constants of a model: its description and its arrays' sharding. windowed: whether
    sliding-window layers have window pages.
    """

    arch: Architecture
    sharding: Sharding
    windowed: bool = False

    @property
    def kinds(self) -> tuple[CacheKind, ...]:
        """The kinds of its layers' keys and values, as State has them."""
        return tuple(kinds_of(self.arch, self.windowed))

    @property
    def table_numbers(self) -> tuple[int, ...]:
        """The number of the page table of each kind: 1 of window pages, else 0."""
        return tuple(int(kind.near) for kind in self.kinds)

    def kind(self, spec: LayerSpec) -> int:
        """Return the index in `kinds` of a layer's keys and values, or of those that it reads."""
        return self.kinds.index(CacheKind.of(self.arch, spec, self.windowed))

    def forward(
        self,
        params: Params,
        tokens: Array,
        positions: Array,
        attend: Attend,
        aux_layers: tuple[int, ...] = (),
        recur: Recur = no_states,
    ) -> Forwarded:
        """Run one forward pass over tokens and positions, int32[R,N] each.

        params      of the model (weights.py)
        attend      attention over pages and the other nodes
        aux_layers  hidden states to keep, numbered as transformers' hidden_states (L = after the
                    last)
        recur       how recurrent layers read states

        The activations' dtype is the parameters'. Pure: writes no pages.
        """
        arch, specs = self.arch, self.arch.layer_specs
        rotary = {
            which: rotation(positions, frequencies, which[0].attention_factor)
            for which, frequencies in zip(arch.ropes, params["frequencies"], strict=True)
        }
        x = self.sharding.put(self.embed(params, tokens), None, None, None)
        if self.arch.embedding_scale != 1.0:
            # Rounded to the dtype first, as in the models' own code.
            x = x * np.asarray(self.arch.embedding_scale, x.dtype)
        vectors = token_vectors(arch, params, tokens, x) if arch.token_vector else None
        # A function of layers that are alike is traced and lowered once.
        each = {
            spec: jax.jit(
                partial(self._numbered, spec, attend)
                if spec.recurrent is None
                else partial(self._recurring, spec, recur)
            )
            for spec in set(specs)
        }
        brought: list[Brought] = []
        last, number = x, 0
        caches: list[list[KeysValues]] = [[] for _ in self.kinds]
        fresh: dict[int | None, KeysValues] = {}
        streams: dict[int, Array] = {}
        for part in params["layers"]:
            if isinstance(part, dict):
                spec = specs[number]
                streams[number] = last
                if spec.recurrent is not None:
                    last, made = each[spec](part, last, len(brought))
                    brought.append(made)
                    number += 1
                    continue
                at, source = self.place(number), fresh.get(spec.reads)
                vector = None if vectors is None else vectors[:, :, number]
                turned = rotary[arch.rope_of(spec)]
                last, own = each[spec](part, last, turned, at, (source, vector))
                if source is None:
                    fresh[number] = own
                    caches[self.kind(spec)].append((own[0][None], own[1][None]))
                number += 1
                continue
            last, found, entered = self._scanned(
                part, number, last, rotary, attend, bool(aux_layers)
            )
            for kind, own in found.items():
                caches[kind].append(own)
            streams |= {number + at: stream for at, stream in enumerate(entered)}
            number += sum(len(keys) for keys, _ in found.values())
        aux_hidden = tuple(last if layer == len(specs) else streams[layer] for layer in aux_layers)
        keys, values = (
            tuple(jnp.concatenate([own[which] for own in mine]) for mine in caches)
            for which in (0, 1)
        )
        return Forwarded(last, keys, values, aux_hidden, tuple(brought))

    def place(self, number: int) -> int:
        """Return the index of a layer's keys and values, or of those that it reads, among those of
        their kind.
        """
        specs, spec = self.arch.layer_specs, self.arch.layer_specs[number]
        before = specs[: number if spec.reads is None else spec.reads]
        owners = [each for each in before if each.reads is None and each.recurrent is None]
        kinds = [CacheKind.of(self.arch, each, self.windowed) for each in owners]
        return kinds.count(CacheKind.of(self.arch, spec, self.windowed))

    def _scanned(
        self,
        pattern: tuple[Params, ...],
        number: int,
        x: Array,
        rotary: dict[tuple[Rope, int], Rotary],
        attend: Attend,
        entering: bool,
    ) -> tuple[Array, dict[int, KeysValues], KeysValues]:
        """Run all repetitions of a pattern of layers, from layer `number` on. Returns the last
        residual stream; keys and values by kind, [layers, ...] each; and, if requested, the input
        of each layer.
        """
        specs = self.arch.layer_specs[number : number + len(pattern)]
        kinds = [self.kind(spec) for spec in specs]
        times = len(jax.tree.leaves(pattern)[0])

        def once(x: Array, given: tuple[tuple[Params, ...], Array]) -> tuple[Array, Any]:
            entered: list[Array] = []
            found: dict[int, list[KeysValues]] = {kind: [] for kind in kinds}
            for at, (spec, weights) in enumerate(zip(specs, given[0], strict=True)):
                entered += [x] * entering
                own_number = self.place(number + at) + given[1] * kinds.count(kinds[at])
                turned = rotary[self.arch.rope_of(spec)]
                x, own = self._numbered(spec, attend, weights, x, turned, own_number)
                found[kinds[at]].append(own)
            stacked = {
                kind: tuple(jnp.stack(part) for part in zip(*own, strict=True))
                for kind, own in found.items()
            }
            return x, (stacked, jnp.stack(entered) if entering else ())

        last, each = lax.scan(once, x, (pattern, jnp.arange(times)))
        found, entered = jax.tree.map(lambda part: lax.collapse(part, 0, 2), each)
        return last, found, entered

    def _numbered(
        self,
        spec: LayerSpec,
        attend: Attend,
        weights: Params,
        x: Array,
        rotary: Rotary,
        number: Any,
        given: tuple[KeysValues | None, Array | None] = (None, None),
    ) -> tuple[Array, KeysValues]:
        """Run a layer as `layer` does; number: of its keys and values, or of its source's; given:
        its source and vector.
        """
        how = Layer(number, spec.attention, self.kind(spec), weights.get("self_attn.sinks"))
        return self.layer(spec, weights, x, rotary, partial(attend, how), *given)

    def embed(self, params: Params, tokens: Array) -> Array:
        """Return [...,H], rows of the embedding for tokens int32[...], without embedding_scale; ids
        out of range are clipped.
        """
        return jnp.take(params["embed"], tokens, axis=0, mode="clip")

    def logits(self, params: Params, last: Array) -> Array:
        """Return float32[n,V] from residual streams [n,H] after the last layer: `final_norm`, then
        `read`.
        """
        return self.read(params, self.final_norm(params, last))

    def final_norm(self, params: Params, last: Array) -> Array:
        """Return [...,H], the final RMSNorm of residual streams [...,H] after the last layer."""
        return rms_norm(last, params["norm"], self.arch.norm_eps)

    def read(self, params: Params, normed: Array) -> Array:
        """Return logits float32[n,V] for normalised hidden states [n,H]."""
        return self.read_rows(params["embed" if self.arch.tied_head else "head"], normed)

    def read_rows(self, head: Array, normed: Array) -> Array:
        """Return logits float32[n,Vd] of the tokens whose rows are in the head [Vd,H], for
        normalised hidden states [n,H]; scaled, and with the model's final softcap, if it has one.
        """
        made = self.sharding.put(product(normed, head.T).astype(jnp.float32), None, None)
        return softcapped(made * np.float32(self.arch.logit_scale), self.arch.final_softcap)

    def layer(
        self,
        spec: LayerSpec,
        weights: Params,
        x: Array,
        rotary: Rotary,
        attend: Callable[..., Array],
        source: KeysValues | None = None,
        vector: Array | None = None,
    ) -> tuple[Array, KeysValues]:
        """Run one decoder layer. Returns the residual stream [R,N,H] after it, and its keys and
        values [R,N,G,E] each, rotated and ready for pages.

        spec     of the layer
        weights  its parameters by short name
        x        [R,N,H] its input
        rotary   cos and sin of the nodes' positions
        attend   called with queries, keys, values; returns the attention output
        source   the nodes' keys and values of the layer that it reads, if it has none of its own;
                 () if that is another model's
        vector   [R,N,D] the tokens' own vectors for this layer, if it has any
        """
        before = self._normed(x, weights, NORM_NAMES[spec.norms].before_attention)
        context, kept = self._attention(spec, weights, before, rotary, attend, source)
        return self._after(spec, weights, x, context, vector), kept

    def _recurring(
        self, spec: LayerSpec, recur: Recur, weights: Params, x: Array, number: Any
    ) -> tuple[Array, Brought]:
        """Run a layer with a recurrent state. Returns the residual stream after it, and the nodes'
        inputs to its states.
        """
        about, eps = spec.recurrent, self.arch.norm_eps
        assert about is not None
        before = self._normed(x, weights, NORM_NAMES[spec.norms].before_attention)
        made, gate = inputs(about, weights, before)
        found, made = recur(number, weights, made)
        found = self._summed(weights, "out_proj", opened(about, weights, found, gate, eps))
        return self._after(spec, weights, x, found), made

    def _after(
        self,
        spec: LayerSpec,
        weights: Params,
        x: Array,
        context: Array,
        vector: Array | None = None,
    ) -> Array:
        """Run the part of a layer after attention or recurrence."""
        names = NORM_NAMES[spec.norms]
        x = x + self._added(spec, weights, names.after_attention, context)
        before = self._normed(x, weights, names.before_feed_forward)
        fed, eps = self._feed_forward(spec, weights, before), self.arch.norm_eps
        if spec.beside is not None:
            fed = beside_experts(spec, weights, eps, x, fed)
        x = x + self._added(spec, weights, names.after_feed_forward, fed)
        if vector is not None:
            x = with_vector(spec, weights, eps, x, vector)
        return x * weights["layer_scalar"].astype(x.dtype) if spec.scaled else x

    def _added(self, spec: LayerSpec, weights: Params, name: str | None, made: Array) -> Array:
        """Return the term that a layer adds to the residual stream for the output of one of its
        parts.
        """
        made = self._normed(made, weights, name)
        return made if spec.residual == 1.0 else made * np.asarray(spec.residual, made.dtype)

    def _normed(self, x: Array, weights: Params, name: str | None) -> Array:
        return x if name is None else rms_norm(x, weights[name], self.arch.norm_eps)

    def _attention(
        self,
        spec: LayerSpec,
        weights: Params,
        x: Array,
        rotary: Rotary,
        attend: Callable[..., Array],
        source: KeysValues | None,
    ) -> tuple[Array, KeysValues]:
        arch, put, own = self.arch, self.sharding.put, spec.attention
        if spec.attention.latent is not None:
            return self._latent(spec.attention.latent, weights, x, rotary, attend)

        def heads(name: str, count: int) -> Array:
            made = product(x, weights[f"{name}_proj"], weights.get(f"{name}_proj.bias"))
            if spec.wide_qk_norm and name != "v":
                made = self._normed(made, weights, f"{name}_norm")
            return put(made.reshape(*x.shape[:2], count, -1), None, None, "model", None)

        def turned(name: str, made: Array) -> Array:
            norm = f"{name}_norm" if spec.qk_norm else None
            if spec.late_qk_norm:
                return self._normed(rotate(made, *rotary), weights, norm)
            return rotate(self._normed(made, weights, norm), *rotary)

        queries, kept = turned("q", heads("q", arch.heads)), source
        if kept is None:
            count = arch.cache_of(spec).kv_heads
            keys = heads("k", count)
            values = keys if own.keyed_values else heads("v", count)
            if own.normed_values:
                values = rms_norm(values, jnp.ones(values.shape[-1]), arch.norm_eps)
            kept = sanitised(turned("k", keys), values)
        context = attend(queries, *kept).reshape(*x.shape[:2], -1)
        if own.gated:
            gate = product(x, weights["heads_gate_proj"]).astype(jnp.float32)
            context = (context / (1 + jnp.exp(-gate))).astype(x.dtype)
        return self._summed(weights, "o_proj", context), kept

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
