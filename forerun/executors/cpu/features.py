"""Features that a draft model reads of the compiled core's last step."""

from dataclasses import dataclass, replace

from forerun.executors.cpu.model import CpuModel
from forerun.executors.feature_ring import HostFeatureRing, ring_places
from forerun.interface.plan import Round
from forerun.types import AnyArray


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Features of nodes of a model's last step; they stay in the core.

    nodes  int[n] flat nodes of that step
    """

    model: CpuModel
    round: Round
    nodes: AnyArray

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.nodes)

    def select(self, nodes: AnyArray) -> "CpuFeatures":
        """Return the rows nodes int[n], in this order; reading a missing one raises EngineError."""
        return replace(self, nodes=self.nodes[nodes])

    def store(self) -> HostFeatureRing:
        """Copy them into the model's ring, before its next step only. Raises EngineError."""
        ring, round, nodes = self.model.ring, self.round, self.nodes
        assert ring is not None, "no draft model reads features"
        values = self.model.features(int(nodes.max()) + 1, ring.values.shape[1])
        ring.values[ring_places(round.plan, round.trees, nodes)] = values[nodes]
        return ring
