"""The target model: embeddings, L layers as their specs describe, final norm, head. Used for all
families, in serving and in training. Independent of pages and trees: `attend` gets a layer's
queries, keys and values and returns the attention output.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.checkpoints.adapter import LoraAdapter
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.executors.torch.decoder.adapters import Adapting, RowAdapters
from forerun.executors.torch.decoder.beside import BesideExperts, TokenVector, TokenVectors
from forerun.executors.torch.decoder.elementwise import (
    PLAIN,
    AnyHeads,
    Elementwise,
    Heads,
    Rotary,
    opened,
    rotation,
    softcapped,
)
from forerun.executors.torch.decoder.experts import Mixture
from forerun.executors.torch.decoder.few_bits_layers import feed_forward
from forerun.executors.torch.decoder.latent import LatentProjections
from forerun.executors.torch.decoder.layers import (
    FeedForward,
    Linear,
    MakeProduct,
    Product,
    alone,
    invariant_sizes,
    padded_rows,
)
from forerun.executors.torch.decoder.recurrent import (
    Recur,
    RecurrentProjections,
    no_states,
    recurrent_projections,
)
from forerun.executors.torch.decoder.weights import Weights
from forerun.executors.torch.group import Group
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import NORM_NAMES, AttentionSpec, Dense, LayerSpec
from forerun.networks.rope import frequency_table

Attend = Callable[[int, AnyHeads], Tensor]
"""(layer, its heads) -> attention output [M,A,E]; for latent heads [M,A,rank]. Layers are counted
from 0 among those with attention.
"""


def attention_over(
    layers: Sequence[tuple[Any, Any]],
    specs: Sequence[AttentionSpec | None],
    seen: Sequence[Any],
    enter: Callable[[AnyHeads, tuple[Any, Any], Tensor], Tensor],
    attend: Callable[..., Tensor],
    slots: Tensor | None = None,
) -> Attend:
    """Return the attention of one pass: `enter` writes the nodes' keys and values of a layer, then
    `attend` reads them.

    layers, specs, seen  of each layer: keys and values, how scores are computed, and what nodes
                         attend to, in the form that `attend` reads
    slots  where nodes' keys and values are written; None: the slots of `seen`
    """

    def of_layer(layer: int, heads: AnyHeads) -> Tensor:
        held, mine = layers[layer], seen[layer]
        queries = enter(heads, held, mine.slots if slots is None else slots)
        return attend(queries, *held, mine, specs[layer], sinks=heads.sinks)

    return of_layer


class HeadsProjections:
    """The products q_proj, k_proj, v_proj and o_proj, and gate_proj if attention is gated."""

    def __init__(
        self, weights: Weights, prefix: str, spec: LayerSpec, arch: Architecture, parts: Elementwise
    ) -> None:
        self._arch, self._parts, self._wide = arch, parts, spec.wide_qk_norm
        self._late = spec.late_qk_norm
        normed, cached = spec.qk_norm or spec.wide_qk_norm, arch.cache_of(spec)
        own = "q" if spec.reads is not None else "qk" if spec.attention.keyed_values else "qkv"
        self._prefix, self._own = prefix, own
        self._size, self._kv_heads = cached.head_size, cached.kv_heads if "k" in own else 0
        self._q_norm = weights.norm(f"{prefix}.q_norm.weight") if normed else None
        self._k_norm = self._q_norm  # Unused if another layer's keys are read.
        if normed and "k" in own:
            self._k_norm = weights.norm(f"{prefix}.k_norm.weight")
        self._qkv = weights.block_linear(*(f"{prefix}.{part}_proj" for part in own))
        self._keyed = spec.attention.keyed_values
        self._v_norm: Tensor | None = None
        if spec.attention.normed_values and self._kv_heads:
            self._v_norm = torch.ones(self._size, device=weights.device)
        self._out = weights.block_linear(f"{prefix}.o_proj")
        self._gate: Product | None = None
        if spec.attention.gated:
            self._gate = weights.block_linear(f"{prefix}.gate_proj")
        self._sinks = weights.vector(f"{prefix}.sinks") if spec.attention.sinks else None

    @property
    def linears(self) -> tuple[Product, ...]:
        """Its matrix products."""
        return self._qkv, self._out, *([] if self._gate is None else [self._gate])

    def adapt(self, adapting: Adapting) -> None:
        """Apply adapters to the products."""
        heads = {"q": self._arch.heads, "k": self._kv_heads, "v": self._kv_heads}
        widths = {f"{self._prefix}.{part}_proj": self._size * heads[part] for part in self._own}
        self._qkv = adapting(self._qkv, list(widths.items()))
        self._out = adapting(self._out, [(f"{self._prefix}.o_proj", self._arch.hidden)])
        if self._gate is not None:
            gate = f"{self._prefix}.gate_proj", self._size * self._arch.heads
            self._gate = adapting(self._gate, [gate])

    def heads(self, x: Tensor, rotary: Rotary) -> Heads:
        """Return the heads, before norm and rotation, of rows [M,H] at the positions of
        `rotary`.
        """
        arch, qkv = self._arch, self._qkv(x)
        q_norm, k_norm = self._q_norm, self._k_norm
        if q_norm is not None and k_norm is not None and self._wide:
            qkv, q_norm, k_norm = self._normed(qkv, q_norm, k_norm), None, None
        each = qkv.view(len(qkv), -1, self._size)
        if self._v_norm is not None:
            values = each[:, -self._kv_heads :]
            others = each if self._keyed else each[:, : -self._kv_heads]
            values = self._parts.norm(values, self._v_norm, arch.norm_eps)
            each = torch.cat([others, values], 1)
        return Heads(
            *(each, self._kv_heads, q_norm, k_norm, arch.norm_eps, rotary, self._parts),
            self._sinks,
            None if self._gate is None else self._gate(x),
            self._late,
        )

    def _normed(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        """Return [M,(A+2G)*E], with all query heads normalised as one row, and all key heads."""
        arch, norm = self._arch, self._parts.norm
        keys = self._kv_heads * self._size
        q, k, v = qkv.split([arch.heads * self._size, keys, keys], -1)
        return torch.cat([norm(q, q_norm, arch.norm_eps), norm(k, k_norm, arch.norm_eps), v], -1)

    def out(self, context: Tensor, gate: Tensor | None) -> Tensor:
        """Return [M,H] for the attention output [M,A,E]; gate [M,A*E], None: not gated."""
        rows = context.flatten(1)
        return self._out(rows if gate is None else opened(rows, gate))


class Block:
    """One decoder layer, as `spec` describes, or a rank's part of it.

    group  the ranks that have the other parts, if there are any
    """

    def __init__(
        self,
        weights: Weights,
        layer: int,
        spec: LayerSpec,
        arch: Architecture,
        parts: Elementwise,
        group: Group | None = None,
    ) -> None:
        prefix, names = f"model.layers.{layer}", NORM_NAMES[spec.norms]
        self._sum = self._sum_fed = group.sum if group else alone
        alike = [each.recurrent is None for each in arch.layer_specs[:layer]]
        self._layer = alike.count(spec.recurrent is None)
        self._spec, self._arch, self._parts = spec, arch, parts

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else weights.norm(f"{prefix}.{name}.weight")

        self._before_attention = norm(names.before_attention)
        self._after_attention = norm(names.after_attention)
        self._before_feed_forward = norm(names.before_feed_forward)
        self._after_feed_forward = norm(names.after_feed_forward)
        self._attention = _projections(weights, prefix, spec, arch, parts)
        self._beside: BesideExperts | None = None
        if spec.beside is not None:
            self._beside = BesideExperts(weights, prefix, spec, arch.norm_eps, parts)
        self._vector: TokenVector | None = None
        if spec.token_vector:
            self._vector = TokenVector(weights, prefix, spec, arch.norm_eps, parts)
        self._scalar = weights.required(f"{prefix}.layer_scalar").item() if spec.scaled else 1.0
        gate, mlp = parts.gate_for(spec.activation), f"{prefix}.mlp"
        self._feed_forward: FeedForward | Mixture
        if isinstance(spec.feed_forward, Dense):
            self._feed_forward = feed_forward(weights.feed_forward(mlp), gate, spec.activation)
            return
        self._feed_forward = Mixture(weights, mlp, spec.feed_forward, parts, spec.activation, group)
        self._sum_fed = alone

    @property
    def linears(self) -> tuple[Product, ...]:
        """Its matrix products."""
        more = [part for part in (self._beside, self._vector) if part is not None]
        own = *self._attention.linears, *self._feed_forward.linears
        return *own, *(linear for part in more for linear in part.linears)

    def adapt(self, adapting: Adapting, layer: int) -> None:
        """Apply adapters to the products of this layer."""
        prefix = f"model.layers.{layer}"
        self._attention.adapt(adapting)
        if isinstance(self._feed_forward, Mixture):
            self._feed_forward.adapt(adapting, f"{prefix}.mlp")
        else:
            self._feed_forward = adapting.feed_forward(self._feed_forward, f"{prefix}.mlp")
        if self._beside is not None:
            self._beside.adapt(adapting, f"{prefix}.moe")
        if self._vector is not None:
            self._vector.adapt(adapting, prefix)

    def enter(self, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the residual stream [M,H] entering this layer, x + more, and the input of its
        attention.
        """
        return self._joined(x, more, self._before_attention)

    def __call__(
        self,
        x: Tensor,
        normed: Tensor,
        rotary: Rotary,
        attend: Attend,
        sizes: tuple[int, ...],
        recur: Recur = no_states,
        vector: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return two parts [M,H] of the residual stream after this layer, from the results of
        `enter`. The next layer adds them, together with its norm; None: the first is the whole
        stream.

        sizes   row counts at which experts' products may run; empty = any
        vector  [M,D] the tokens' own vectors for this layer, if it has any
        """
        if isinstance(self._attention, RecurrentProjections):
            inputs = self._attention.inputs(normed)
            mixed = self._attention.out(recur(self._layer, inputs), inputs.gate)
        else:
            heads = self._attention.heads(normed, rotary)
            mixed = self._attention.out(attend(self._layer, heads), heads.gate)
        attended = self._added(self._sum(mixed), self._after_attention)
        x, normed = self._joined(x, attended, self._before_feed_forward)
        fed = self._sum_fed(self._feed_forward(normed, sizes))
        if self._beside is not None:
            fed = self._beside(x, fed, sizes)
        more = self._added(fed, self._after_feed_forward)
        if self._vector is None and self._scalar == 1.0:
            return x, more
        x = x + more
        if self._vector is not None and vector is not None:
            x = self._vector(x, vector)
        return x * self._scalar, None

    def _joined(
        self, x: Tensor, more: Tensor | None, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum, and the normalised sum if there is a weight, else the sum again."""
        parts, eps = self._parts, self._arch.norm_eps
        if weight is None:
            x = x if more is None else x + more
            return x, x
        if more is None:
            return x, parts.norm(x, weight, eps)
        return parts.add_norm(x, more, weight, eps)

    def _added(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return the term to add to the residual stream: `x`, normalised if there is a weight."""
        x = x if weight is None else self._parts.norm(x, weight, self._arch.norm_eps)
        return x if self._spec.residual == 1.0 else x * self._spec.residual


def _projections(
    weights: Weights, prefix: str, spec: LayerSpec, arch: Architecture, parts: Elementwise
) -> HeadsProjections | LatentProjections | RecurrentProjections:
    """Return the projections of the layer that `spec` describes; its tensors begin with
    `prefix`.
    """
    if spec.recurrent is not None:
        return recurrent_projections(weights, prefix, spec.recurrent, arch, parts)
    latent, prefix = spec.attention.latent, f"{prefix}.self_attn"
    if latent is None:
        return HeadsProjections(weights, prefix, spec, arch, parts)
    return LatentProjections(weights, prefix, spec, latent, arch, parts)


class Ends:
    """The embedding, final norm and head of a model. In a rank's part of a model, embedding and
    head have the rows of some tokens.

    embedding  [V,H]
    head       [n,H] -> [n,V]
    row_sizes  as of Decoder
    """

    def __init__(self, weights: Weights, arch: Architecture, parts: Elementwise = PLAIN) -> None:
        self.arch, self.dtype, self._parts = arch, weights.dtype, parts
        self._as_they_are = arch.final_softcap is None and arch.logit_scale == 1.0
        self.embedding = weights.matrix("model.embed_tokens.weight")
        self._norm = weights.norm("model.norm.weight")
        self.head = weights.head(self.embedding)
        self.row_sizes: tuple[int, ...] = ()

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype in which logits lose no precision: the head's own, or that of the softcap."""
        return self.dtype if self._as_they_are else torch.float32

    def final_norm(self, last: Tensor) -> Tensor:
        """Return [n,H], the head's input, from residual streams [n,H] after the last layer."""
        return self._parts.norm(last, self._norm, self.arch.norm_eps)

    def logits(self, last: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32[n,V] from residual streams [n,H] after the last layer; or write them to
        `out` [n,V].
        """
        count = len(last)
        padding = padded_rows(count, self.row_sizes) - count
        normed = self.final_norm(F.pad(last, (0, 0, 0, padding)) if padding else last)
        if out is not None and isinstance(self.head, Linear) and self._as_they_are:
            return self.head.into(normed[:count], out)
        logits = self.read(normed)[:count]
        return logits.float() if out is None else out.copy_(logits)

    def read(self, normed: Tensor) -> Tensor:
        """Return [n,V] logits of the results of `final_norm`, [n,H], in `logits_dtype`; n as M in
        `forward`.
        """
        logits, cap, scale = self.head(normed), self.arch.final_softcap, self.arch.logit_scale
        if scale != 1.0:
            logits = logits.float() * scale
        return logits if cap is None else softcapped(logits.float(), cap)


class Decoder(Ends):
    """A target's weights, or a rank's part of them, and its forward pass over M flat nodes.

    products   class of the blocks' matrix products: Linear, or TrainingLinear for whole sequences
    parts      the operations between the products
    keep       whether weights that are quantised in the file stay so if kernels can read them
    narrow     whether the blocks' weights are rounded to float8; embedding and head stay in `dtype`
    group      the ranks that have the other parts, if there are any
    ropes, frequencies  as Architecture.ropes, and their rope.frequency_table
    row_sizes  row counts at which its products may run (see layers.padded_rows); empty if bits may
               depend on the batch: in all cases except Linear's float32 on the CPU with PLAIN
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        products: MakeProduct = Linear,
        parts: Elementwise = PLAIN,
        *,
        group: Group | None = None,
        keep: bool = False,
        narrow: bool = False,
    ) -> None:
        arch, few_bits = checkpoint.architecture, parts.few_bits if keep or narrow else None
        weights = Weights(checkpoint, device, dtype, products, few_bits=few_bits, narrow=narrow)
        super().__init__(weights, arch, parts)
        self._group, self._first = group, group.tp.span(arch.vocab).start if group else 0
        self._scale = torch.tensor(arch.embedding_scale).to(dtype).item()
        self._vectors = TokenVectors(weights, arch, parts) if arch.token_vector else None
        self._blocks = [
            Block(weights, layer, spec, arch, parts, group)
            for layer, spec in enumerate(arch.layer_specs)
        ]
        self.ropes = arch.ropes
        self._rope_of = [self.ropes.index(arch.rope_of(spec)) for spec in arch.layer_specs]
        self.frequencies = torch.from_numpy(frequency_table(self.ropes)).to(device)
        self.adapters = RowAdapters()
        in_float32 = device.type == "cpu" and dtype == torch.float32
        if in_float32 and products is Linear and parts is PLAIN:
            linears = [linear for block in self._blocks for linear in block.linears]
            linears += [] if self._vectors is None else self._vectors.linears
            self.row_sizes = invariant_sizes([*linears, self.head])

    def adapt(self, adapters: tuple[LoraAdapter, ...]) -> None:
        """Apply these adapters to the rows of a step that `adapters` assigns them to."""
        adapting = Adapting(adapters, self.adapters, self.embedding.device, self.dtype)
        for layer, block in enumerate(self._blocks):
            block.adapt(adapting, layer)
        if self.row_sizes:
            alike = set(invariant_sizes(adapting.linears))
            self.row_sizes = tuple(size for size in self.row_sizes if size in alike)

    def rotary(self, positions: Tensor) -> tuple[Rotary, ...]:
        """Return cos and sin, float32[M,E/2] each, of positions int64[M]; in the order of
        `ropes`.
        """
        return tuple(
            rotation(positions, frequencies[: size // 2], rope.attention_factor)
            for (rope, size), frequencies in zip(self.ropes, self.frequencies, strict=True)
        )

    def by_layer_shape(self, rotary: tuple[Rotary, ...]) -> tuple[Rotary, ...]:
        """Return cos and sin in the size of each of `ropes`, from such that all have the size of
        the widest heads.
        """
        halves = (size // 2 for _, size in self.ropes)
        return tuple(
            pair
            if pair[0].shape[1] == half
            else (pair[0][:, :half].contiguous(), pair[1][:, :half].contiguous())
            for pair, half in zip(rotary, halves, strict=True)
        )

    def forward(
        self,
        tokens: Tensor,
        rotary: tuple[Rotary, ...],
        attend: Attend,
        features: tuple[int, ...] = (),
        recur: Recur = no_states,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the residual stream [M,H] after the last layer, for tokens int[M] at the positions
        of `rotary`.

        M must be a result of `padded_rows`. Also returns the input stream [M,H] of each layer of
        `features`, in that order (transformers' hidden_states; L = after the last layer).
        """
        x = self.embed(tokens)
        if self._scale != 1.0:
            x = x * self._scale
        vectors = None if self._vectors is None else self._vectors(tokens, x)
        more: Tensor | None = None
        kept: dict[int, Tensor] = {}
        for number, (which, block) in enumerate(zip(self._rope_of, self._blocks, strict=True)):
            x, normed = block.enter(x, more)
            if number in features:
                kept[number] = x
            vector = None if vectors is None else vectors[:, number]
            x, more = block(x, normed, rotary[which], attend, self.row_sizes, recur, vector)
        x = x if more is None else x + more
        kept[len(self._blocks)] = x
        return x, [kept[layer] for layer in features]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return [M,H] for tokens int64[M]: rows of the embedding, not scaled."""
        if self._group is None:
            return F.embedding(tokens, self.embedding)
        tokens = tokens - self._first
        mine = (tokens >= 0) & (tokens < len(self.embedding))
        found = F.embedding(torch.where(mine, tokens, 0), self.embedding)
        return self._group.sum(torch.where(mine.unsqueeze(1), found, 0))
