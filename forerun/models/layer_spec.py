"""What one decoder layer is, as data: executors run any of these, families are tables of them.

The layer reads the residual stream x [M,H]:

    pre       x + attention(norm x),               x + feed_forward(norm x)
    post      x + norm(attention x),               x + norm(feed_forward x)
    sandwich  x + norm(attention(norm x)),         x + norm(feed_forward(norm x))

pre is Llama's order (Touvron et al. 2023), post OLMo 2's (arXiv 2501.00656), sandwich Gemma 2's and
3's (arXiv 2408.00118, 2503.19786).
"""

import math
from dataclasses import dataclass
from typing import Literal

from forerun.errors import ModelError
from forerun.models.rope import Rope

Activation = Literal["silu", "gelu_tanh"]
"""Of the gate: x * sigmoid(x), or GELU by its tanh approximation (arXiv 1606.08415, section 2)."""

Norms = Literal["pre", "post", "sandwich"]


@dataclass(frozen=True, slots=True)
class NormNames:
    """What a checkpoint calls a layer's norms, without `.weight`; None where there is none."""

    before_attention: str | None
    after_attention: str | None
    before_feed_forward: str | None
    after_feed_forward: str | None


_INPUT, _ATTENTION = "input_layernorm", "post_attention_layernorm"
_BEFORE, _AFTER = "pre_feedforward_layernorm", "post_feedforward_layernorm"

NORM_NAMES: dict[Norms, NormNames] = {
    "pre": NormNames(_INPUT, None, _ATTENTION, None),
    "post": NormNames(None, _ATTENTION, None, _AFTER),
    "sandwich": NormNames(_INPUT, _ATTENTION, _BEFORE, _AFTER),
}
"""As transformers does: in "pre" the norm before the feed-forward is called post_attention."""

_MOST_WIDTH, _MOST_EXPERTS, _MOST_WINDOW = 1 << 20, 1 << 14, 1 << 30
"""Larger than any model there is; a file that asks for more is damaged or hostile."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How scores are made, in this order: q.k * scale, softcap, window, softmax.

    scale    multiplies q.k; 1/sqrt(E) in most models
    window   the query at position p sees keys at positions > p - window; None sees all before it
    softcap  scores become softcap * tanh(scores / softcap); None leaves them
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Dense:
    """down(activation(gate x) * up x) with `width` numbers in between; biases on all three."""

    width: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of feed-forwards: a router's softmax over `count` experts, the `top_k` greatest.

    width        numbers between gate/up and down of one expert
    normalised   the top_k weights are divided by their sum
    shared       width of the expert that every token also visits; 0 = there is none. Its output
                 is multiplied by the sigmoid of a learnt gate [1,H] (Qwen2-MoE)
    """

    count: int
    top_k: int
    width: int
    normalised: bool = False
    shared: int = 0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. `rope` turns its queries and keys, half-split layout.

    qk_norm   RMSNorm over E on each query and key head, before the rotation
    qkv_bias  q_proj, k_proj and v_proj have biases; o_bias likewise
    """

    attention: AttentionSpec
    rope: Rope
    feed_forward: Dense | Experts
    norms: Norms = "pre"
    activation: Activation = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False

    @property
    def active_width(self) -> int:
        """Numbers in between that one token makes: of its experts together, where it has some."""
        match self.feed_forward:
            case Dense(width):
                return width
            case Experts(_, top_k, width, _, shared):
                return top_k * width + shared

    def check(self, head_size: int) -> None:
        """Raise ModelError for numbers that no layer can have."""
        found, attention = {}, self.attention
        match self.feed_forward:
            case Dense(width):
                found["ffn"] = (width, 1, _MOST_WIDTH)
            case Experts(count, top_k, width, _, shared):
                found["number of experts"] = (count, 1, _MOST_EXPERTS)
                found["number of experts per token"] = (top_k, 1, max(count, 1))
                found["experts' width"] = (width, 1, _MOST_WIDTH)
                found["shared expert's width"] = (shared, 0, _MOST_WIDTH)
        if attention.window is not None:
            found["sliding window"] = (attention.window, 1, _MOST_WINDOW)
        for name, (value, least, most) in found.items():
            if not least <= value <= most:
                raise ModelError(f"the model's {name} is {value}; it must be {least} to {most}")
        for name, number in (("scale", attention.scale), ("softcap", attention.softcap or 1.0)):
            check_factor(f"attention {name}", number)
        self.rope.check(head_size)


def check_factor(name: str, value: float) -> None:
    """Raise ModelError for a multiplier that is not positive or leaves float32."""
    if not (math.isfinite(value) and 1e-6 <= value <= 1e6):
        raise ModelError(f"the model's {name} is {value}; it must be in [1e-6, 1e6]")
