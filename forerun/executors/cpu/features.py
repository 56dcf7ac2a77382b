"""Features of the compiled core's last step, for draft models."""

from dataclasses import dataclass, replace

from forerun.executors.cpu.model import CpuModel
from forerun.executors.feature_ring import HostFeatureRing
from forerun.types import AnyArray


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Features of nodes of a model's last step; they stay in the core.

    nodes  int[n] flat nodes of that step
    """

    model: CpuModel
    nodes: AnyArray

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.nodes)

    def select(self, nodes: AnyArray) -> "CpuFeatures":
        """Return the rows nodes int[n], in this order; reading a missing one raises EngineError."""
        return replace(self, nodes=self.nodes[nodes])

    def store(self) -> HostFeatureRing:
        """Return the model's ring: the core stores features of all accepted nodes there."""
        assert self.model.ring is not None, "no draft model reads features"
        return self.model.ring
