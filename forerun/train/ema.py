"""A running average of the weights: steadier than the last step's, often better held out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

WARM = 10.0
"""Early steps count more: the average of t steps looks back at most a share t / (t + WARM)."""


class WeightEma:
    """Exponential moving average of a module's trained parameters (Polyak averaging).

    module   is read at the beginning and by `update`; only `worn` changes it
    decay    the most of an average that an update keeps, 0 to 1
    weights  parameter name -> its average; frozen parameters have none
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._decay = decay
        self.weights = {name: p.detach().clone() for name, p in self._trained.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the averages towards the module's weights, which have seen `step` updates, from 1.
        Each moves by 1 - min(decay, step / (step + WARM)) of the way.
        """
        new = 1 - min(self._decay, step / (step + WARM))
        for name, parameter in self._trained.items():
            self.weights[name].lerp_(parameter.detach(), new)

    @contextmanager
    def worn(self) -> Iterator[None]:
        """Give the module the averaged weights within a context; its own again after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._trained.items():
            own = parameter.detach().clone()
            parameter.copy_(self.weights[name])
            self.weights[name] = own
