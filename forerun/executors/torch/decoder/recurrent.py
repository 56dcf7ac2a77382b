"""Layers with a recurrent state in torch: what a decoder hands over to the executor that keeps the
states (attention/states.py).
"""

from collections.abc import Callable

from torch import Tensor

from forerun.executors.torch.decoder.convolution import ConvolutionInputs, ConvolutionProjections
from forerun.executors.torch.decoder.delta import DeltaInputs, DeltaProjections
from forerun.executors.torch.decoder.elementwise import Elementwise
from forerun.executors.torch.decoder.weights import Weights
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import GatedDelta, Recurrent

RecurrentInputs = DeltaInputs | ConvolutionInputs
RecurrentProjections = DeltaProjections | ConvolutionProjections

Recur = Callable[[int, RecurrentInputs], Tensor]
"""(layer, its inputs) -> what is read of its states: float32[M,Hv,Dv] of a delta net, float32[M,C]
of a convolution. Layers are counted from 0 among those that have states.
"""


def no_states(layer: int, inputs: RecurrentInputs) -> Tensor:
    """Raise TypeError: a decoder without recurrent layers has no states to read."""
    raise TypeError("a layer with a recurrent state runs where no states are kept")


def recurrent_projections(
    weights: Weights, prefix: str, about: Recurrent, arch: Architecture, parts: Elementwise
) -> RecurrentProjections:
    """Return the projections of a layer whose tensors begin with `prefix`."""
    if isinstance(about, GatedDelta):
        return DeltaProjections(weights, f"{prefix}.linear_attn", about, arch, parts)
    return ConvolutionProjections(weights, f"{prefix}.conv")
