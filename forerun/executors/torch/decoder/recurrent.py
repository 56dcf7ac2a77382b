"""Layers with a recurrent state in torch: their inputs, which a decoder passes to the executor's
states (attention/states.py); the gated short convolution (layer_spec.ShortConvolution), and the
sums over a window of tokens, which gated delta nets (delta.py) need too.

The bits of every number are independent of the batch: a sum over a window adds element by element,
the oldest token first, whether its tokens came in one step or one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from forerun.executors.torch.decoder.adapters import Adapting
from forerun.executors.torch.decoder.delta import DeltaInputs, DeltaProjections
from forerun.executors.torch.decoder.elementwise import Elementwise
from forerun.executors.torch.decoder.layers import Product
from forerun.executors.torch.decoder.weights import Weights
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import GatedDelta, Recurrent


@dataclass(frozen=True, slots=True)
class ConvolutionInputs:
    """A short convolution's inputs for nodes [M], without those of earlier tokens.

    mixed   float32[M,C] the convolution's input: b x
    gate    [M,C] c
    kernel  float32[C,W]
    bias    float32[C], or None
    """

    mixed: Tensor
    gate: Tensor
    kernel: Tensor
    bias: Tensor | None


class ConvolutionProjections:
    """The matrix products of a short convolution, and its two gates."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._prefix = prefix
        self._into = weights.block_linear(f"{prefix}.in_proj")
        self._out = weights.block_linear(f"{prefix}.out_proj")
        self._kernel = weights.required(f"{prefix}.conv.weight")[:, 0].contiguous()
        self._bias = weights.vector(f"{prefix}.conv.bias")

    @property
    def linears(self) -> tuple[Product, ...]:
        """Its matrix products: input and output."""
        return self._into, self._out

    def adapt(self, adapting: Adapting) -> None:
        """Apply adapters to the products."""
        into, out = self._into, self._out
        self._into = adapting(into, [(f"{self._prefix}.in_proj", into.shape[0])])
        self._out = adapting(out, [(f"{self._prefix}.out_proj", out.shape[0])])

    def inputs(self, x: Tensor) -> ConvolutionInputs:
        """Return the convolution's inputs for rows [M,H], in float32, and the gate of its output.
        Independent of positions.
        """
        b, c, x = self._into(x).chunk(3, -1)
        return ConvolutionInputs(b.float() * x, c, self._kernel, self._bias)

    def out(self, found: Tensor, gate: Tensor) -> Tensor:
        """Return [M,H] for the convolution's sums float32[M,C] and c [M,C]."""
        return self._out((found * gate).to(gate.dtype))


def window_sums(rows: Tensor, past: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the convolution of nodes [M]: float32[M,C].

    rows    float32[R,C] the inputs of the nodes and of earlier tokens
    past    int64[M,W] the rows of each node's last W tokens, its own last
    kernel  float32[C,W]; bias: float32[C], None: zeros
    """
    sums = rows.new_zeros(len(past), rows.shape[1])
    if bias is not None:
        sums = sums + bias
    for place in range(kernel.shape[1]):
        sums = sums + rows.index_select(0, past[:, place]) * kernel[:, place]
    return sums


RecurrentInputs = DeltaInputs | ConvolutionInputs
RecurrentProjections = DeltaProjections | ConvolutionProjections

Recur = Callable[[int, RecurrentInputs], Tensor]
"""(layer, its inputs) -> the recurrence's output: float32[M,Hv,Dv] of a delta net, float32[M,C] of
a convolution. Layers are counted from 0 among those that have states.
"""


def no_states(layer: int, inputs: RecurrentInputs) -> Tensor:
    """Raise TypeError: a decoder without recurrent layers has no states."""
    raise TypeError("a layer with a recurrent state runs where no states are kept")


def recurrent_projections(
    weights: Weights, prefix: str, about: Recurrent, arch: Architecture, parts: Elementwise
) -> RecurrentProjections:
    """Return the projections of a layer whose tensors begin with `prefix`."""
    if isinstance(about, GatedDelta):
        return DeltaProjections(weights, f"{prefix}.linear_attn", about, arch, parts)
    return ConvolutionProjections(weights, f"{prefix}.conv")
