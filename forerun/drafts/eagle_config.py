"""The description of a draft head, independent of any framework; every public format is converted
to it.

EAGLE-1/2 (arXiv 2401.15077, 2406.16858), EAGLE-3 (arXiv 2503.01840) and its 3.1 switches. The
projects that publish heads differ in names, defaults and the layers that features come from; here
each choice is an explicit field, and `eagle_folder.py` translates.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from forerun.errors import ModelError
from forerun.networks.arch import Architecture
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.rope import Rope

Algorithm = Literal["eagle1", "eagle3"]
FeatureNorm = Literal["none", "joint", "each"]

_MAPS = ("d2t",)

TARGET_TENSORS = ("embed_tokens.weight", "lm_head.weight")
"""Tensors that may be missing in a head's file: the target's own are used."""


@dataclass(frozen=True, slots=True)
class DraftHead:
    """One draft head: sizes and switches. Letters as in forerun/types.py.

    algorithm      eagle1: input cat(embedding, feature), feature = the target's hidden state
                   after its final norm. eagle3: features from inside the target, own norms
    target_hidden  H of the target, width of one feature
    hidden         H of the head
    vocab          Vd; `target_vocab` V. Equal: no vocabulary map
    features       indices of hidden states: 0 = embeddings, i = entering layer i (counted from
                   0), which is transformers' `hidden_states[i]`; raw residual stream
    feature_norm   none, one norm over all features (joint), or one per feature (each)
    normed_residual  the layer adds attention to the normed hidden state instead of the raw one
    normed_feedback  the next draft step receives the output after the final norm
    fc_bias        the matrix that combines the features has a bias
    trained_head   the file has its own output head; else the target's rows are used
    """

    algorithm: Algorithm
    target_hidden: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    target_vocab: int
    norm_eps: float
    rope: Rope
    context: int
    features: tuple[int, ...]
    feature_norm: FeatureNorm = "none"
    normed_residual: bool = False
    normed_feedback: bool = False
    fc_bias: bool = False
    trained_head: bool = True

    @property
    def input_width(self) -> int:
        """Columns of q/k/v: the head's width, doubled if the embedding is concatenated to it."""
        return self.hidden * (2 if self.algorithm == "eagle3" else 1)

    @property
    def cache(self) -> tuple[CacheLayer, ...]:
        """The cache of its one layer per position, as a tuple of one."""
        return (CacheLayer(self.kv_heads, self.head_size),)

    @property
    def parameters(self) -> int:
        """Number of weights that run, including the output head whether it is the target's or
        not.
        """
        own = {n: s for n, s in expected_draft_tensors(self).items() if n not in _MAPS}
        own["lm_head.weight"] = (self.vocab, self.hidden)
        return sum(math.prod(shape) for shape in own.values())

    def check_against(self, target: Architecture, where: str) -> None:
        """Raise ModelError, with the reason, if this head cannot serve `target`."""
        faults = foreign(self.target_hidden, self.target_vocab, target)
        if self.algorithm == "eagle1" and self.hidden != target.hidden:
            faults.append(f"an EAGLE-1 head of width {self.hidden} cannot use the target's head")
        beyond = [index for index in self.features if not 0 <= index <= target.layers]
        if beyond:
            faults.append(f"features {beyond} lie beyond the target's {target.layers} layers")
        if faults:
            raise ModelError(f"{where}: this draft does not fit the target: " + "; ".join(faults))


def foreign(hidden: int, vocab: int, target: Architecture) -> list[str]:
    """Return the mismatches of a draft for width `hidden` and vocabulary `vocab` with `target`."""
    faults = []
    if hidden != target.hidden:
        faults.append(f"it reads features of width {hidden}, the target's are {target.hidden}")
    if vocab != target.vocab:
        faults.append(
            f"it was made for a vocabulary of {vocab}, the target's is {target.vocab}: a draft for "
            "another tokenizer"
        )
    return faults


def default_features(layers: int) -> tuple[int, int, int]:
    """Return the layers where EAGLE-3 reads a target of L layers: the inputs of layers 2, L//2 and
    L-3.
    """
    return 2, layers // 2, layers - 3


def head_for(target: Architecture, vocab: int, algorithm: Algorithm = "eagle3") -> DraftHead:
    """Return the head that our trainer creates for `target`: its layer's shape, Vd = `vocab`.
    Raises ModelError if the target has too few layers for an EAGLE-3 head's features.
    """
    first, middle, last = default_features(target.layers)
    if algorithm == "eagle3" and not 0 < first < middle <= last:
        raise ModelError(
            f"a draft head reads the target near its start, middle and end; this target has "
            f"{target.layers} layers, at least 6 are needed"
        )
    return DraftHead(
        algorithm=algorithm,
        target_hidden=target.hidden,
        hidden=target.hidden,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_size=target.head_size,
        ffn=target.ffn,
        vocab=vocab,
        target_vocab=target.vocab,
        norm_eps=target.norm_eps,
        rope=replace(target.rope),
        context=target.context,
        features=(target.layers,) if algorithm == "eagle1" else (first, middle, last),
        trained_head=False,
    )


def expected_draft_tensors(head: DraftHead) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> shape of every tensor of a head, without the target's. Matrices are
    [out, in]. `d2t` has offsets: target id of draft id i = i + d2t[i].
    """
    wide, query, key = head.input_width, head.heads * head.head_size, head.kv_heads * head.head_size
    fused = head.hidden if head.algorithm == "eagle1" else head.target_hidden
    parts = 2 if head.algorithm == "eagle1" else len(head.features)
    tensors: dict[str, tuple[int, ...]] = {"fc.weight": (head.hidden, parts * fused)}
    if head.fc_bias:
        tensors["fc.bias"] = (head.hidden,)
    if head.feature_norm == "joint":
        tensors["input_norm.weight"] = (parts * fused,)
    if head.feature_norm == "each":
        tensors |= {f"fc_norm.{i}.weight": (fused,) for i in range(parts)}
    if head.algorithm == "eagle3":
        tensors["layers.0.input_layernorm.weight"] = (head.hidden,)
        tensors["layers.0.hidden_norm.weight"] = (head.hidden,)
        tensors["norm.weight"] = (head.hidden,)
    tensors |= {
        "layers.0.self_attn.q_proj.weight": (query, wide),
        "layers.0.self_attn.k_proj.weight": (key, wide),
        "layers.0.self_attn.v_proj.weight": (key, wide),
        "layers.0.self_attn.o_proj.weight": (head.hidden, query),
        "layers.0.post_attention_layernorm.weight": (head.hidden,),
        "layers.0.mlp.gate_proj.weight": (head.ffn, head.hidden),
        "layers.0.mlp.up_proj.weight": (head.ffn, head.hidden),
        "layers.0.mlp.down_proj.weight": (head.hidden, head.ffn),
    }
    if head.trained_head:
        tensors["lm_head.weight"] = (head.vocab, head.hidden)
    if head.vocab != head.target_vocab:
        tensors["d2t"] = (head.vocab,)
    return tensors
