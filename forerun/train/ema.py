"""A running average of the weights, which varies less than the latest weights and is often better
on held-out chats.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

WARM = 10.0
"""Limits the decay of early updates: the average after t steps keeps at most a share t / (t + WARM)
of its earlier value.
"""


class WeightEma:
    """Exponential moving average of a module's trained parameters (Polyak averaging).

    module   read by the constructor and by `update`; changed only within `worn`
    decay    upper bound of the share of the average that an update keeps, 0 to 1
    weights  parameter name -> its average; frozen parameters have none
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._decay = decay
        self.weights = {name: p.detach().clone() for name, p in self._trained.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the averages towards the module's weights after `step` updates, from 1: by a share 1
        - min(decay, step / (step + WARM)) of the difference.
        """
        new = 1 - min(self._decay, step / (step + WARM))
        for name, parameter in self._trained.items():
            self.weights[name].lerp_(parameter.detach(), new)

    @contextmanager
    def worn(self) -> Iterator[None]:
        """Return a context manager in which the module has the averaged weights; its own are
        restored at the end.
        """
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
