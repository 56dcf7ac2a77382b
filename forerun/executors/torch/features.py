"""The target's hidden states of one step, on the device: what a torch draft model reads."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.interface.features import Features, KeptFeatures
from forerun.types import AnyArray


@dataclass(frozen=True, slots=True)
class TorchFeatures:
    """Features of nodes, where the target's step left them.

    streams  [N,F*H] the residual streams that were requested, side by side; of a captured step it
             is overwritten by the next one
    place    int[n] the row of `streams` that each node has
    """

    streams: Tensor
    place: AnyArray

    def select(self, nodes: AnyArray) -> "TorchFeatures":
        """Of these nodes, in this order. Raises EngineError where one is not there."""
        if len(nodes) and not 0 <= nodes.min() <= nodes.max() < len(self.place):
            raise EngineError(
                f"features of a node outside of 0..{len(self.place) - 1} were asked for"
            )
        return TorchFeatures(self.streams, self.place[nodes])

    def keep(self) -> KeptFeatures:
        """A copy on the host."""
        return KeptFeatures(self.tensor().float().cpu().numpy().astype(np.float16))

    def tensor(self) -> Tensor:
        """[n,F*H] a row per node."""
        place = torch.from_numpy(np.asarray(self.place, np.int64)).to(self.streams.device)
        return self.streams[place]


def on_device(features: Features, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[n,F*H] whatever holds them. Raises EngineError for another executor's."""
    if isinstance(features, KeptFeatures):
        return torch.from_numpy(features.values).to(device).to(dtype)
    if not isinstance(features, TorchFeatures):
        raise EngineError(f"features of {type(features).__name__} come from another executor")
    return features.tensor()
