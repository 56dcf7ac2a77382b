"""The description of a block drafter, independent of any framework; every public format is
converted to it.

DFlash (block diffusion): a few decoder layers whose context is computed from the target's features.
Its input is a block, the root followed by mask tokens; one pass predicts all of the block's tokens.
JetSpec is the same with a causal block; DSpark adds a bias that depends on the token before, and a
confidence for each token (executors/pair_scores.py). DFlash2 mixes neighbouring places by
convolutions around attention and feed-forward, whose kernels depend on the place, and chooses among
the most probable tokens by the one before.
"""

import math
from dataclasses import dataclass
from typing import Literal

from forerun.drafts.eagle_config import foreign
from forerun.errors import ModelError
from forerun.networks.arch import Architecture
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.rope import Rope

PairRule = Literal["", "vanilla", "gated", "rnn", "selector"]
"""How the token above changes the scores of a draft token: DSpark's names, or DFlash2's selector;
"": not at all.
"""


@dataclass(frozen=True, slots=True)
class BlockHead:
    """One block drafter: sizes and switches. Letters as in forerun/types.py.

    layers       decoder layers, pre-norm, each with its own keys and values of the features
    hidden       H, also of the target, unless the drafter has embedding and output head of its own
    vocab        Vd; `target_vocab` V. Equal: no vocabulary map
    features     indices of hidden states: 0 = embeddings, i = entering layer i (counted from 0),
                 which is transformers' `hidden_states[i]`; raw residual stream
    places       number of places in a block: the root and the masks
    anchored     the root's place predicts a token too; else only the masks do, each the token at
                 its own position
    mask         target id of the places after the root
    causal       a place attends to itself and those before it; else to all of its block. Either
                 attends to all features
    qk_norm      RMSNorm over E on each query and key head, before the rotation
    own_embedding, own_head, own_mask  the file has these tensors; else they are the target's (of
                 its output head, the rows of the draft vocabulary), and the mask is a row of the
                 embedding
    pair         how a draft token's scores depend on the one above it; rank: r, of its tables
    confidence   inputs of a confidence head: H, or H + r with the token above; 0 = there is none
    interleaved  the file rotates adjacent elements of a head instead of halves
    top_k        of a selector: number of a place's most probable tokens that it chooses among
    convolved    channels of the stream that share a dynamic kernel of a convolution; 0 = there are
                 no convolutions
    windows      of each layer: a place at p attends to positions > p - window; () = to all
    embedding_scale  multiplies rows of the embedding, as stored in the target's file; None =
                 unknown, 1 with a target that does not scale them
    logit_scale, logit_cap  multiply logits, and cap them by tanh after that; 0.0 = no cap
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    target_vocab: int
    target_hidden: int
    norm_eps: float
    rope: Rope
    context: int
    features: tuple[int, ...]
    places: int
    mask: int
    anchored: bool = False
    causal: bool = False
    qk_norm: bool = True
    own_embedding: bool = False
    own_head: bool = False
    own_mask: bool = False
    pair: PairRule = ""
    rank: int = 0
    confidence: int = 0
    interleaved: bool = False
    top_k: int = 0
    convolved: int = 0
    windows: tuple[int | None, ...] = ()
    embedding_scale: float | None = None
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    @property
    def algorithm(self) -> str:
        """The name of its kind: "dspark" if draft tokens depend on the one above or have a
        confidence, "dflash2" if a selector chooses them or places are convolved.
        """
        if self.pair == "selector" or self.convolved:
            return "dflash2"
        return "dspark" if self.pair or self.confidence else "dflash"

    @property
    def depth(self) -> int:
        """The most draft tokens that a block proposes."""
        return self.places if self.anchored else self.places - 1

    @property
    def first(self) -> int:
        """The index of the place that predicts the block's first draft token."""
        return int(not self.anchored)

    def run(self, depth: int) -> int:
        """Return how many places of a block run for `depth` draft tokens. If places attend to each
        other in both directions, the whole block runs, since fewer masks would give another
        distribution.
        """
        return self.first + depth if self.causal else self.places

    @property
    def cache(self) -> tuple[CacheLayer, ...]:
        """What each of its layers caches per position, in order."""
        return (CacheLayer(self.kv_heads, self.head_size),) * self.layers

    @property
    def parameters(self) -> int:
        """Number of weights that run in a pass, without `tables`."""
        return self._numbers - self.tables

    @property
    def tables(self) -> int:
        """Number of weights that pair_scores.py reads; rounds that draft store them on the
        device.
        """
        shapes = expected_block_tensors(self).items()
        return sum(math.prod(shape) for name, shape in shapes if name.startswith(PAIRS))

    @property
    def _numbers(self) -> int:
        return sum(map(math.prod, expected_block_tensors(self).values()))

    def check_against(self, target: Architecture, where: str) -> None:
        """Raise ModelError, with the reason, if this drafter cannot serve `target`."""
        faults = foreign(self.target_hidden, self.target_vocab, target)
        if not (self.own_mask or 0 <= self.mask < self.target_vocab):
            faults.append(f"mask_token_id {self.mask} has no row in the embedding")
        if self.hidden != target.hidden and not (self.own_embedding and self.own_head):
            faults.append(
                f"a drafter of width {self.hidden} needs embed_tokens.weight and lm_head.weight of "
                "its own"
            )
        known = self.own_embedding or self.embedding_scale is not None
        if target.embedding_scale != 1.0 and not known:
            faults.append(
                "it is unknown whether it expects this target's scaled embeddings; "
                "input_embedding_scale says it"
            )
        beyond = [index for index in self.features if not 0 <= index <= target.layers]
        if beyond or not self.features:
            faults.append(
                f"features {list(self.features)} must lie within the target's {target.layers} "
                "layers"
            )
        if faults:
            raise ModelError(f"{where}: this draft does not fit the target: " + "; ".join(faults))


KERNEL_SIZE = 2
"""Places that a convolution reads: its own, and the one before it in the block."""

PAIRS = "markov_head.", "confidence_head.", "candidate_selector."
"""Prefixes of the names of tensors that pair_scores.py reads."""


def default_block_features(layers: int, count: int) -> tuple[int, ...]:
    """Return the layers where DFlash's authors read a target of L layers: the outputs of layers 1
    to L - 3, evenly spaced.
    """
    if count == 1:
        return (layers // 2 + 1,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) + 1 for i in range(count))


def expected_block_tensors(head: BlockHead) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> shape of every tensor of a block drafter.

    Matrices are [out, in]. `d2t` holds offsets: target id of draft id i = i + d2t[i].
    """
    hidden, query, key = head.hidden, head.heads * head.head_size, head.kv_heads * head.head_size
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(head.features) * head.target_hidden),
        "hidden_norm.weight": (hidden,),
    }
    for layer in range(head.layers):
        prefix = f"layers.{layer}."
        shapes = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (key, hidden),
            "self_attn.v_proj.weight": (key, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (head.ffn, hidden),
            "mlp.up_proj.weight": (head.ffn, hidden),
            "mlp.down_proj.weight": (hidden, head.ffn),
        }
        if head.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (
                head.head_size,
            )
        for part in ("attention_conv", "mlp_conv") if head.convolved else ():
            kernels = 2 * KERNEL_SIZE * hidden // head.convolved
            shapes[f"{part}.base_kernel"] = (2, KERNEL_SIZE, hidden)
            shapes[f"{part}.kernel_projection.weight"] = (kernels, hidden)
        tensors |= {f"{prefix}{name}": shape for name, shape in shapes.items()}
    tensors["norm.weight"] = (hidden,)
    return tensors | _optional_tensors(head)


def _optional_tensors(head: BlockHead) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {}
    if head.own_mask:
        tensors["mask_embedding"] = (head.hidden,)
    if head.own_embedding:
        tensors["embed_tokens.weight"] = (head.target_vocab, head.hidden)
    if head.own_head:
        tensors["lm_head.weight"] = (head.vocab, head.hidden)
    if head.vocab != head.target_vocab:
        tensors["d2t"] = (head.vocab,)
    tensors |= _pair_tensors(head)
    if head.confidence:
        tensors["confidence_head.proj.weight"] = (1, head.confidence)
        tensors["confidence_head.proj.bias"] = (1,)
    return tensors


def _pair_tensors(head: BlockHead) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of pair scores. Rows of `markov_w1` and of predecessors
    are target ids, those of `markov_w2` and of successors draft ids.
    """
    rank, hidden = head.rank, head.hidden
    if not head.pair:
        return {}
    if head.pair == "selector":
        return {
            "candidate_selector.predecessor_codebook": (head.target_vocab, rank),
            "candidate_selector.successor_codebook": (head.vocab, rank),
            "candidate_selector.hidden_projection.weight": (rank, hidden),
        }
    tensors: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (head.target_vocab, rank),
        "markov_head.markov_w2.weight": (head.vocab, rank),
    }
    if head.pair == "gated":
        tensors["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        tensors["markov_head.gate_proj.bias"] = (rank,)
    if head.pair == "rnn":
        tensors["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        tensors["markov_head.joint_proj.bias"] = (3 * rank,)
    return tensors
