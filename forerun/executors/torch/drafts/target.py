"""What a torch draft model asks of the executor beside which it runs: eager or captured."""

from typing import Protocol

import torch

from forerun.executors.torch.decoder.decoder import Ends
from forerun.executors.torch.triton.kernels import Kernels
from forerun.interface.executor import ExecutorLimits


class TorchTarget(Protocol):
    """See TorchExecutor."""

    @property
    def limits(self) -> ExecutorLimits:
        """What it was built for."""
        ...

    @property
    def device(self) -> torch.device:
        """Where weights and caches are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        ...

    @property
    def kernels(self) -> Kernels | None:
        """Ours, where the device has any."""
        ...

    @property
    def decoder(self) -> Ends:
        """The target's weights, as far as drafts borrow them."""
        ...

    def request_aux_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Hand out these layers' streams with every outcome, from the next step on."""
        ...
