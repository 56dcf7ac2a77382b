"""Describes one decoder layer as data: executors run any such description, families consist of
them.

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
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.rope import Rope

Activation = Literal["silu", "gelu_tanh", "gelu", "clamped_silu"]
"""How the gate g and u ("up") are combined: silu(g) u; GELU(g) u (arXiv 1606.08415, section 2) by
its tanh approximation, or exactly, g (1 + erf(g / sqrt 2)) / 2; or gpt-oss's g sigmoid(1.702 g) (u
+ 1), with g at most CLAMP and u within +-CLAMP.
"""
CLAMP, CLAMP_SLOPE = 7.0, 1.702

Norms = Literal["pre", "post", "sandwich"]


@dataclass(frozen=True, slots=True)
class NormNames:
    """A checkpoint's names of a layer's norms, without `.weight`; None = no such norm."""

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
"""transformers' names: in "pre" the norm before the feed-forward is called post_attention."""
BESIDE_NORMS = (f"{_AFTER}_1", f"{_BEFORE}_2", f"{_AFTER}_2")
"""Norms of a layer with experts and a feed-forward: after the feed-forward, before and after the
experts.
"""

_MOST_WIDTH, _MOST_EXPERTS, _MOST_WINDOW = 1 << 20, 1 << 14, 1 << 30
_MOST_HEADS, _MOST_CONVOLVED = 4096, 64
"""Larger than any existing model; a file with more is damaged or hostile."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the cache has one
    latent of `rank` numbers and one rotated key of `rope` numbers per position, for all heads.

    It runs absorbed: each head's query is projected into the latent space, so that scores are a
    product with the cache, and the context, `rank` numbers a head, is projected out of it:

        queries [A, rank + rope]    keys [1, rank + rope]    values [1, rank]: the keys' first

    query_rank  width between the two products that compute queries; None: there is one product
    nope, rope  elements of a head's query that are not, and that are, rotated
    value       size of a head's value
    norm_eps    of the norms of the latent and between the two products; may differ from the model's
    paired      files store the rotated numbers' pairs side by side (naming.py)
    """

    rank: int
    nope: int
    rope: int
    value: int
    query_rank: int | None = None
    paired: bool = False
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The computation of scores, in this order: q.k * scale, softcap, window, softmax.

    scale    multiplies q.k; 1/sqrt(E) in most models
    window   the query at position p attends to keys at positions > p - window; None: to all before
             it
    softcap  scores become softcap * tanh(scores / softcap); None leaves them
    sinks    each head has a learned score that takes part in the softmax and has no value (gpt-oss,
             arXiv 2508.10925, section 3.2)
    latent   its own projections and cache; None: q_proj, k_proj and v_proj, G heads of E each
    gated    the context is multiplied by the sigmoid of a gate of A heads of E, from a product of
             its own (Qwen3-Next; arXiv 2505.06708)
    normed_values  RMSNorm over E on each value head, without a weight (Gemma 4)
    keyed_values   values are the product of keys, before their norm and rotation
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: Latent | None = None
    gated: bool = False
    normed_values: bool = False
    keyed_values: bool = False


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta net (Yang et al., arXiv 2412.06464), which replaces a layer's attention.
    Instead of keys and values it has a state, whose size does not depend on the length of the text.

    Queries, keys and values, `channels` numbers, each pass a causal convolution over `window`
    tokens, channel by channel, and SiLU. Queries q and keys k, `key_heads` of `key_size` numbers,
    are divided by their length, q by sqrt(key_size) too. Each of `value_heads`, several to a key
    head, has values v of `value_size` numbers, gates a, b and z, and a state S [key_size,
    value_size], zeros before the first token:

        S <- exp(-exp(A) softplus(a + dt)) S
        S <- S + k (sigmoid(b) (v - S^T k))^T
        o  = S^T q           RMSNorm(o) SiLU(z) is the input of the output product

    Value head j shares key head j // r, of r = value_heads / key_heads; `tiled`: key head j %
    key_heads, as value heads are ordered in GGUF files of Qwen3.5.

    The state of a text is S, and the convolution's inputs of its last window - 1 tokens.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    window: int
    tiled: bool = False

    @property
    def keys(self) -> int:
        """Total size of a token's key heads; that of its queries is the same."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Total size of a token's value heads."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of queries, keys and values."""
        return 2 * self.keys + self.values

    def rows_of(self, part: str) -> slice | None:
        """Return the channels of "q", "k" or "v"; None for any other name."""
        parts = {"q": (0, self.keys), "k": (self.keys, 2 * self.keys)}
        parts["v"] = 2 * self.keys, self.channels
        return slice(*parts[part]) if part in parts else None

    @property
    def state_numbers(self) -> int:
        """Elements of a text's state in one layer, all float32."""
        return (self.window - 1) * self.channels + self.value_heads * self.key_size * (
            self.value_size
        )

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return canonical name -> shape of its tensors, for a residual stream of H numbers."""
        keys, values, heads = self.keys, self.values, self.value_heads
        widths = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
        found: dict[str, tuple[int, ...]] = {
            f"{part}_proj.weight": (width, hidden) for part, width in widths.items()
        }
        found |= {"conv1d.weight": (self.channels, 1, self.window), "A_log": (heads,)}
        found |= {"dt_bias": (heads,), "norm.weight": (self.value_size,)}
        found["out_proj.weight"] = (hidden, values)
        return {f"linear_attn.{name}": shape for name, shape in found.items()}

    @property
    def draft_numbers(self) -> int:
        """Numbers that a draft token stores in one layer until it is accepted or rejected."""
        return self.channels + self.keys + self.values + 2 * self.value_heads


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A gated convolution over few tokens (LFM2, arXiv 2511.23404), which replaces a layer's
    attention.

    One product of a token's input gives three parts of `channels` numbers, b, c and x. The products
    b x go through a causal convolution over `window` tokens, channel by channel; the result, times
    c, is the input of the output product.

    The state of a text is the convolution's inputs of its last window - 1 tokens.

    bias  both products and the convolution have biases
    """

    channels: int
    window: int
    bias: bool = False

    @property
    def state_numbers(self) -> int:
        """Elements of a text's state in one layer, all float32."""
        return (self.window - 1) * self.channels

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return canonical name -> shape of its tensors, for a residual stream of H numbers."""
        channels = self.channels
        found: dict[str, tuple[int, ...]] = {}
        for name, *shape in (
            ("in_proj", 3 * channels, hidden),
            ("conv", channels, 1, self.window),
            ("out_proj", hidden, channels),
        ):
            found[f"conv.{name}.weight"] = tuple(shape)
            if self.bias:
                found[f"conv.{name}.bias"] = (shape[0],)
        return found

    @property
    def draft_numbers(self) -> int:
        """Numbers that a draft token stores in one layer until it is accepted or rejected."""
        return self.channels


Recurrent = GatedDelta | ShortConvolution
"""Layers with a state of a fixed size, which may replace attention."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A feed-forward down(activation(gate x) * up x) with `width` inner numbers; bias: on all
    three.
    """

    width: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """The rule by which a token selects among N experts, and their weights.

    scores = scores(W x + bias); the chosen experts are the top_k greatest of scores + correction;
    their weights are the scores without correction.

    scores      softmax over all experts, or each one's sigmoid (arXiv 2412.19437, section 2.1.2)
    normalised  the weights are divided by their sum
    scale       then multiplies them
    bias        the product has one (gpt-oss)
    correction  a learned number per expert, for the choice only
    groups      number of groups of experts; only experts of the `topk_group` groups can be chosen
                that have the greatest sums of their `summed` (two or one) greatest corrected
                scores; 1 = all can
    own_input   it reads the residual stream after an RMSNorm of its own, whose weight is a learned
                scale [H] times H^-1/2 (Gemma 4)
    scaled      a learned number for each expert multiplies its weight last
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = False
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    topk_group: int = 1
    summed: int = 2
    own_input: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of feed-forwards: a router chooses `top_k` of `count` for each token.

    width        inner size of one expert
    shared       width of the expert that every token also visits; 0 = there is none
    shared_gate  its output is multiplied by the sigmoid of a learned gate [1,H] (Qwen2-MoE)
    bias         each expert's products have biases
    own          in a rank's part of a model, the numbers of its experts; None = all
    shared_whole in such a part, the shared expert is complete instead of divided
    """

    count: int
    top_k: int
    width: int
    router: Router = Router()
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    own: range | None = None
    shared_whole: bool = False

    @property
    def active_width(self) -> int:
        """Width of the experts that one token runs through, summed."""
        return self.top_k * self.width + self.shared

    @property
    def here(self) -> range:
        """Numbers of the experts whose weights are here: all, or a rank's own."""
        return range(self.count) if self.own is None else self.own


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. `rope` rotates its queries and keys, in half-split layout.

    qk_norm       RMSNorm over E on each query and key head, before the rotation
    wide_qk_norm  the same over all query heads at once, and over all key heads (OLMo 2)
    late_qk_norm  the norms of qk_norm come after the rotation (Hunyuan)
    qkv_bias      q_proj, k_proj and v_proj have biases; o_bias likewise
    residual      multiplies the outputs of attention and feed-forward (Granite)
    recurrent     replaces attention; `attention` is then not used
    cache         the shape of its keys and values, and with it of its queries' heads; None: the
                  model's
    reads         the number of the layer, of the same shape, whose keys and values it attends to,
                  having none of its own (Architecture.borrows: of another model); None: its own
    beside        experts next to the dense feed-forward, each of the two with norms of its own;
                  their sum goes through the norm after the feed-forward
    token_vector  size of a vector that each token has for this layer (Gemma 3n's and 4's
                  per-layer embeddings); after the feed-forward, x + norm(projection(
                  activation(gate x) vector)); 0: none
    scaled        a learned number multiplies the residual stream at the end
    """

    attention: AttentionSpec
    rope: Rope
    feed_forward: Dense | Experts
    norms: Norms = "pre"
    activation: Activation = "silu"
    qk_norm: bool = False
    wide_qk_norm: bool = False
    late_qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    residual: float = 1.0
    recurrent: Recurrent | None = None
    cache: CacheLayer | None = None
    reads: int | None = None
    beside: Experts | None = None
    token_vector: int = 0
    scaled: bool = False

    @property
    def active_width(self) -> int:
        """Inner size of the feed-forward that one token runs through; of a mixture, that of its
        active experts together.
        """
        own = self.feed_forward
        width = own.width if isinstance(own, Dense) else own.active_width
        return width if self.beside is None else max(width, self.beside.active_width)

    def check(self, head_size: int) -> None:
        """Raise ModelError for impossible numbers."""
        bounds, attention = {}, self.attention
        match self.feed_forward:
            case Dense(width):
                bounds["ffn"] = (width, 1, _MOST_WIDTH)
            case Experts() as experts:
                bounds |= _bounds_of(experts)
        if self.beside is not None:
            bounds |= _bounds_of(self.beside)
        bounds["numbers of a token for each layer"] = (self.token_vector, 0, _MOST_WIDTH)
        if attention.window is not None:
            bounds["sliding window"] = (attention.window, 1, _MOST_WINDOW)
        if (latent := attention.latent) is not None:
            for name in ("rank", "nope", "rope", "value"):
                bounds[f"latent attention's {name}"] = (getattr(latent, name), 1, _MOST_WIDTH)
            bounds["latent attention's query_rank"] = (latent.query_rank or 1, 1, _MOST_WIDTH)
        match self.recurrent:
            case GatedDelta() as delta:
                bounds |= _bounds_of_delta(delta)
            case ShortConvolution(channels, window):
                bounds["convolution's channels"] = (channels, 1, _MOST_WIDTH)
                bounds["convolution's window"] = (window, 2, _MOST_CONVOLVED)
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise ModelError(f"the model's {name} is {value}; it must be {low} to {high}")
        for name, number in (("scale", attention.scale), ("softcap", attention.softcap or 1.0)):
            check_factor(f"attention {name}", number)
        check_factor("residual multiplier", self.residual)
        self.rope.check(head_size if latent is None else latent.rope)


def _bounds_of_delta(delta: GatedDelta) -> dict[str, tuple[int, int, int]]:
    """Return name -> (value, least, most) for the numbers of a delta net. Raises ModelError if
    value heads cannot share key heads.
    """
    heads, shared = delta.value_heads, max(delta.key_heads, 1)
    if heads % shared:
        raise ModelError(f"{heads} value heads of a delta net cannot share {shared} key heads")
    sizes = (name for name in GatedDelta.__slots__ if name != "tiled")
    bounds = {name: (getattr(delta, name), 1, _MOST_HEADS) for name in sizes}
    bounds["window"] = (delta.window, 2, _MOST_CONVOLVED)
    return {f"delta net's {name}": bound for name, bound in bounds.items()}


def _bounds_of(experts: Experts) -> dict[str, tuple[int, int, int]]:
    """Return name -> (value, least, most) for the numbers of a mixture. Raises ModelError for
    impossible groups.
    """
    router, count = experts.router, max(experts.count, 1)
    check_factor("routed experts' scale", router.scale)
    if router.groups < 1 or count % router.groups:
        raise ModelError(f"{count} experts cannot be divided evenly into {router.groups} groups")
    group = count // router.groups
    if router.groups > 1 and group < router.summed:
        raise ModelError("a group of one expert has no two greatest scores")
    return {
        "number of experts": (experts.count, 1, _MOST_EXPERTS),
        "number of kept groups": (router.topk_group, 1, router.groups),
        "number of summed scores of a group": (router.summed, 1, 2),
        "number of experts per token": (experts.top_k, 1, router.topk_group * group),
        "experts' width": (experts.width, 1, _MOST_WIDTH),
        "shared expert's width": (experts.shared, 0, _MOST_WIDTH),
    }


def check_factor(name: str, value: float) -> None:
    """Raise ModelError for a multiplier that is not positive or outside the range of float32."""
    if not (math.isfinite(value) and 1e-6 <= value <= 1e6):
        raise ModelError(f"the model's {name} is {value}; it must be in [1e-6, 1e6]")
