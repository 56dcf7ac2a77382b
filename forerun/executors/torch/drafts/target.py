"""The properties of a torch executor, eager or captured, that draft models use."""

from typing import Protocol

import torch

from forerun.executors.torch.attention.kv import PagedCache
from forerun.executors.torch.decoder.decoder import Ends
from forerun.executors.torch.triton.kernels import Kernels
from forerun.executors.window_pages import WindowPages
from forerun.interface.executor import ExecutorLimits


class TorchTarget(Protocol):
    """See TorchExecutor."""

    @property
    def limits(self) -> ExecutorLimits:
        """The sizes that the target was built for; a draft's pages and scratch follow them."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the target's weights and caches, and of the draft's."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the target's activations and the draft's."""
        ...

    @property
    def kernels(self) -> Kernels | None:
        """Our kernels, if the device supports them; None: plain torch."""
        ...

    @property
    def decoder(self) -> Ends:
        """The target's embedding [V,H], final norm and head, which drafts share. Raises EngineError
        after `shutdown`.
        """
        ...

    def request_aux_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Return the residual streams entering these layers with every outcome, from the next step
        on. Raises ConfigError for a layer that does not exist, MemoryPlanError if they do not fit.
        """
        ...


class CachedTarget(TorchTarget, Protocol):
    """A target whose keys and values a draft model reads between its steps."""

    @property
    def windows(self) -> WindowPages | None:
        """The window pages of its sliding-window layers; None: these layers keep every page."""
        ...

    @property
    def cache(self) -> PagedCache:
        """The target's keys and values. Raises EngineError after `shutdown`."""
        ...
