"""The description of a decoder, independent of any framework: its sizes, its layers, its tensors.

Layers are described in layer_spec.py; what all layers of a model share is here. families.py has the
families, and how their configurations are read.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from forerun.errors import ModelError
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.keys import MOST_LAYERS
from forerun.networks.layer_spec import (
    AttentionSpec,
    Dense,
    Experts,
    GatedDelta,
    Latent,
    LayerSpec,
    Recurrent,
    ShortConvolution,
    check_factor,
)
from forerun.networks.layer_tensors import tensors_of
from forerun.networks.rope import LongRope, Rope

__all__ = ["FAMILIES", "Architecture", "Family", "Rope", "expected_tensors"]

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v2",
    "gpt_oss",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "seed_oss",
    "olmo3",
    "exaone4",
    "glm4_moe_lite",
    "minimax_m2",
    "ministral3",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid",
    "gemma4_text",
    "hunyuan_v1_dense",
]
"""Names of families, as in config.json's model_type."""
FAMILIES: tuple[Family, ...] = get_args(Family)

_MOST = {
    "layers": MOST_LAYERS,
    "hidden": 1 << 18,
    "heads": 4096,
    "kv_heads": 4096,
    "head_size": 4096,
    "vocab": 1 << 24,
    "context": 1 << 30,
}
"""Larger than any existing model; a file with more is damaged or hostile."""


@dataclass(frozen=True, slots=True)
class ArchitectureSizes:
    """The sizes of a model; letters as in Architecture, `layers` is L. Raises ModelError for
    impossible sizes.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    context: int

    def __post_init__(self) -> None:
        """Raise ModelError for impossible sizes, so that every ArchitectureSizes is valid."""
        for name, limit in _MOST.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ModelError(f"the model's {name} is {value}; it must be 1 to {limit}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly"
            )
        if self.head_size % 2:
            raise ModelError(f"the head size {self.head_size} is odd; RoPE rotates pairs")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers an executor needs to run a checkpoint.

    hidden H, heads A, kv_heads G, head_size E, vocab V; in latent attention G is 1 and E the
    numbers cached per position (layer_spec.Latent), so that heads, cache and kernels are as in any
    model

    context          longest sequence the model was trained for, in tokens
    norm_eps         added to the mean square in every RMSNorm
    layer_specs      the L layers
    tied_head        the output head is the embedding
    norm_offset      added to every stored norm weight: 1 in the files of Gemma and Qwen3-Next
    embedding_scale  multiplies the embeddings, rounded to the activations' dtype first (Gemma)
    final_softcap    logits become final_softcap * tanh(logits / final_softcap); None = unchanged
    logit_scale      multiplies the logits (Granite)
    borrows          no layer has keys and values of its own: `LayerSpec.reads` are layers of
                     another model, for which this one drafts (Gemma 4's assistant)
    """

    family: Family
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    context: int
    norm_eps: float
    layer_specs: tuple[LayerSpec, ...]
    tied_head: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    logit_scale: float = 1.0
    borrows: bool = False

    @property
    def head_tensor(self) -> str:
        """The name of the output head's matrix [V,H]."""
        return "model.embed_tokens.weight" if self.tied_head else "lm_head.weight"

    def __post_init__(self) -> None:
        """Raise ModelError for impossible numbers."""
        ArchitectureSizes(**{name: getattr(self, name) for name in _MOST})
        if not (math.isfinite(self.norm_eps) and 0 < self.norm_eps < 1):
            raise ModelError(f"the norm's epsilon is {self.norm_eps}; it must be in (0, 1)")
        check_factor("embedding scale", self.embedding_scale)
        check_factor("final logit softcap", self.final_softcap or 1.0)
        check_factor("scale of logits", self.logit_scale)
        self._check_caches()
        for spec in dict.fromkeys(self.layer_specs):
            spec.check(self.cache_of(spec).head_size)
        if len({spec.token_vector for spec in self.layer_specs}) > 1:
            raise ModelError("tokens must have equally many numbers for each layer")
        latent = self.latent
        states = {spec.recurrent for spec in self.layer_specs} - {None}
        if len({spec.attention.latent for spec in self.layer_specs}) > 1 or len(states) > 1:
            raise ModelError("layers with caches of different shapes are not supported")
        if latent and (self.kv_heads, self.head_size) != (1, latent.rank + latent.rope):
            raise ModelError("latent attention must cache one head of rank + rope numbers")

    def _check_caches(self) -> None:
        """Raise ModelError if layers' own shapes are impossible, or if a layer reads keys and
        values that do not exist.
        """
        for number, spec in enumerate(self.layer_specs):
            if spec.cache is not None:
                own = {"kv_heads": spec.cache.kv_heads, "head_size": spec.cache.head_size}
                sizes = {name: getattr(self, name) for name in _MOST}
                ArchitectureSizes(**sizes | own)
            if spec.reads is None or self.borrows:
                continue
            source = self.layer_specs[spec.reads] if 0 <= spec.reads < number else None
            if source is None or source.reads is not None or source.cache != spec.cache:
                raise ModelError(
                    f"layer {number} cannot read the keys and values of layer {spec.reads}"
                )

    @property
    def layers(self) -> int:
        """L, the number of decoder layers, without prediction layers."""
        return len(self.layer_specs)

    @property
    def latent(self) -> Latent | None:
        """Its latent attention, the same in all layers; None if attention is not latent."""
        return self.layer_specs[0].attention.latent

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of the layers that cache keys and values, in their order."""
        return tuple(spec.attention for spec in self.layer_specs if spec.recurrent is None)

    @property
    def recurrent(self) -> Recurrent | None:
        """The kind and shape of its recurrent layers, the same in all; None if there are none."""
        return next((spec.recurrent for spec in self.layer_specs if spec.recurrent), None)

    @property
    def recurrent_layers(self) -> int:
        """Number of layers with a state instead of keys and values."""
        return self.layers - len(self.attention_specs)

    @property
    def state_bytes(self) -> int:
        """Bytes, in float32, of a text's states in all recurrent layers; 0 if there are none."""
        return 4 * self.recurrent_layers * self.recurrent.state_numbers if self.recurrent else 0

    @property
    def draft_state_numbers(self) -> int:
        """Numbers that recurrent layers store for a draft token until it is accepted or
        rejected.
        """
        return self.recurrent_layers * self.recurrent.draft_numbers if self.recurrent else 0

    @property
    def cache_layer(self) -> CacheLayer:
        """The cache of an attention layer that has no shape of its own."""
        latent = self.latent
        value_size = None if latent is None else latent.rank
        return CacheLayer(self.kv_heads, self.head_size, value_size)

    def cache_of(self, spec: LayerSpec) -> CacheLayer:
        """Return the shape of a layer's cache, or of the cache of the layer whose keys and values
        it reads.
        """
        return spec.cache or self.cache_layer

    @property
    def caches(self) -> tuple[CacheLayer, ...]:
        """The caches of the layers with keys and values of their own, in their order."""
        owners = (s for s in self.layer_specs if s.recurrent is None and s.reads is None)
        return tuple(self.cache_of(spec) for spec in owners)

    @property
    def widest_window(self) -> int:
        """The most tokens that a sliding-window layer sees, if the pages behind it can be freed; 0
        without such a layer, with recurrent layers, or if a layer without a window reads its keys.
        """
        if self.recurrent is not None or self.latent is not None or self.borrows:
            return 0
        windows = [spec.attention.window or 0 for spec in self.layer_specs]
        for spec, window in zip(self.layer_specs, windows, strict=True):
            if spec.reads is not None and windows[spec.reads] and not window:
                return 0
        return max(windows)

    @property
    def windowed_caches(self) -> tuple[CacheLayer, ...]:
        """The caches of sliding-window layers with keys and values of their own."""
        owners = (s for s in self.layer_specs if s.attention.window and s.reads is None)
        return tuple(self.cache_of(spec) for spec in owners)

    @property
    def cache_places(self) -> tuple[int, ...]:
        """For each layer with attention, in order, the index in `caches` of the cache that it
        reads.
        """
        owners: dict[int, int] = {}
        places = []
        for number, spec in enumerate(self.layer_specs):
            if spec.recurrent is None:
                if spec.reads is None:
                    owners[number] = len(owners)
                places.append(owners[number if spec.reads is None else spec.reads])
        return tuple(places)

    @property
    def cache_shapes(self) -> tuple[CacheLayer, ...]:
        """The different shapes of its layers' keys and values, in the order of first use."""
        attending = (spec for spec in self.layer_specs if spec.recurrent is None)
        return tuple(dict.fromkeys(self.cache_of(spec) for spec in attending))

    @property
    def rope_size(self) -> int:
        """The most elements of a head that may be rotated, in layers without a shape of their
        own.
        """
        return self.head_size if self.latent is None else self.latent.rope

    def rope_of(self, spec: LayerSpec) -> tuple[Rope, int]:
        """Return a layer's rope, and the size of the heads that it rotates."""
        return spec.rope, spec.cache.head_size if spec.cache else self.rope_size

    @property
    def ffn(self) -> int:
        """Width of the widest feed-forward that a token runs through. Scratch is planned for it,
        and a draft head for this model has this width.
        """
        return max(spec.active_width for spec in self.layer_specs)

    @property
    def expert_rows(self) -> int:
        """Rows of H numbers for the inputs and outputs of a node's experts, in the layer with the
        most; 0 for a dense model.
        """
        mixtures = (m for s in self.layer_specs for m in (s.feed_forward, s.beside))
        rows = [2 * m.top_k + bool(m.shared) for m in mixtures if isinstance(m, Experts)]
        return max(rows, default=0)

    @property
    def latent_numbers(self) -> int:
        """Elements of a node between latent attention's products: the queries' latent, queries,
        these in the latent space, the context there, the heads' inputs, and values. 0 if attention
        is not latent.
        """
        about = self.latent
        if about is None:
            return 0
        each = about.nope + about.rope + 2 * self.head_size + about.value
        each += max(about.nope, about.rank)
        return self.heads * each + 3 * self.head_size + (about.query_rank or 0)

    @property
    def token_vector(self) -> int:
        """Numbers that each token has for each layer (LayerSpec.token_vector), the same in all
        layers; 0 if none.
        """
        return self.layer_specs[0].token_vector

    @property
    def token_numbers(self) -> int:
        """Numbers in the table of per-layer token vectors; 0 if there is none."""
        return self.vocab * self.layers * self.token_vector

    @property
    def ropes(self) -> tuple[tuple[Rope, int], ...]:
        """The different rotary positions of its layers, as `rope_of` returns them, in the order of
        first use.
        """
        return tuple(dict.fromkeys(self.rope_of(spec) for spec in self.layer_specs))

    @property
    def rope(self) -> Rope:
        """The rope for a draft head of this model: that of the last layer without a window, else of
        the last layer, skipping layers without positions if others have them.
        """
        turned = [spec for spec in self.layer_specs if spec.rope.rotated != 0] or self.layer_specs
        full = [spec for spec in turned if spec.attention.window is None]
        return (full or turned)[-1].rope

    def for_context(self, context: int | None) -> "Architecture":
        """Return the model for texts of up to `context` tokens; None: up to the original context.
        LongRoPE has other factors for texts longer than the original context, and with them the
        keys of a text would change while it grows: therefore `context` decides for all texts.
        """
        scalings = [spec.rope.scaling for spec in self.layer_specs]
        limits = [s.original_context for s in scalings if isinstance(s, LongRope)]
        if not limits:
            return self
        if context is None or context <= min(limits):
            return replace(self, context=min(self.context, *limits))
        return replace(self, layer_specs=tuple(map(_stretched, self.layer_specs)))

    @property
    def unstretched(self) -> str | None:
        """A note for users if texts could be longer with another --context (for_context)."""
        scalings = [spec.rope.scaling for spec in self.layer_specs]
        if not any(isinstance(s, LongRope) and not s.stretched for s in scalings):
            return None
        return (
            "this model uses other RoPE factors (LongRoPE) for texts longer than "
            f"{self.context:,} tokens, which is the longest context here; to use those factors for "
            "all texts, set --context above that."
        )

    @property
    def parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        return sum(math.prod(shape) for shape in expected_tensors(self).values())

    def beyond_llama(self) -> list[str]:
        """Return what an executor must support besides Llama's block to run this model, as texts.

        That block: one pre-norm layer repeated, 1/sqrt(E) scores, one rope, dense SwiGLU; with or
        without biases and norms on queries and keys. Windows are not listed: they
        change the mask, not the block. Empty if the block suffices.
        """
        specs = self.layer_specs
        needs = {
            "mixture-of-experts layers": any(isinstance(s.feed_forward, Experts) for s in specs),
            "norms after attention and feed-forward": any(s.norms != "pre" for s in specs),
            "a GELU gate": any("gelu" in s.activation for s in specs),
            "a clamped gate": any(s.activation == "clamped_silu" for s in specs),
            "latent attention": self.latent is not None,
            "a gated delta net": isinstance(self.recurrent, GatedDelta),
            "short convolutions": isinstance(self.recurrent, ShortConvolution),
            "gated attention": any(s.attention.gated for s in specs),
            "attention sinks": any(s.attention.sinks for s in specs),
            "norms over all heads at once": any(s.wide_qk_norm for s in specs),
            "norms of heads behind their rotation": any(s.late_qk_norm for s in specs),
            "scaled residuals": any(s.residual != 1.0 for s in specs),
            "scaled logits": self.logit_scale != 1.0,
            "capped attention scores": any(s.attention.softcap for s in specs),
            "capped logits": self.final_softcap is not None,
            "its own scale of attention scores": any(
                s.attention.scale != self.head_size**-0.5 for s in specs
            ),
            "keys and values of different shapes": len(self.cache_shapes) > 1,
            "layers that read other layers' keys and values": any(
                s.reads is not None for s in specs
            ),
            "normed values": any(s.attention.normed_values for s in specs),
            "experts beside a feed-forward": any(s.beside for s in specs),
            "embeddings for each layer": self.token_vector > 0,
            "scaled layers": any(s.scaled for s in specs),
            "scaled embeddings": self.embedding_scale != 1.0,
            "norm weights stored without their 1": self.norm_offset != 0.0,
            "a rope per layer": len(self.ropes) > 1,
            "layers that differ": len({(s.feed_forward, s.qk_norm) for s in specs}) > 1,
        }
        return [what for what, there in needs.items() if there]


def _stretched(spec: LayerSpec) -> LayerSpec:
    scaling = spec.rope.scaling
    if not isinstance(scaling, LongRope):
        return spec
    return replace(spec, rope=replace(spec.rope, scaling=replace(scaling, stretched=True)))


def plain_layers(
    count: int, head_size: int, ffn: int, rope: Rope, qk_norm: bool = False
) -> tuple[LayerSpec, ...]:
    """Return `count` layers of Llama (or, with `qk_norm`, of Qwen3), without biases and windows."""
    spec = LayerSpec(AttentionSpec(head_size**-0.5), rope, Dense(ffn), qk_norm=qk_norm)
    return (spec,) * count


PER_LAYER_ROWS = "model.embed_tokens_per_layer"
"""The matrix, without `.weight`, whose rows are each token's vectors for all layers."""


def expected_tensors(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> shape of every tensor of the model, in the order of computation.
    Matrices are [out, in], as in `y = W x`.
    """
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab, arch.hidden)}
    if arch.token_vector:
        numbers = arch.layers * arch.token_vector
        tensors[f"{PER_LAYER_ROWS}.weight"] = (arch.vocab, numbers)
        tensors["model.per_layer_model_projection.weight"] = (numbers, arch.hidden)
        tensors["model.per_layer_projection_norm.weight"] = (arch.token_vector,)
    of_spec = {spec: layer_tensors(arch, spec) for spec in dict.fromkeys(arch.layer_specs)}
    for index, spec in enumerate(arch.layer_specs):
        prefix = f"model.layers.{index}."
        tensors |= {f"{prefix}{name}": shape for name, shape in of_spec[spec].items()}
    tensors["model.norm.weight"] = (arch.hidden,)
    if not arch.tied_head:
        tensors["lm_head.weight"] = (arch.vocab, arch.hidden)
    return tensors


def layer_tensors(arch: Architecture, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
    """Return canonical name without the layer's prefix -> shape of every tensor of one layer."""
    return tensors_of(spec, arch.hidden, arch.heads, arch.cache_of(spec))
