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
        """How many rows."""
        return len(self.nodes)

    def select(self, nodes: AnyArray) -> "CpuFeatures":
        """The rows nodes int[n], in this order; the core refuses those that are not there."""
        return replace(self, nodes=self.nodes[nodes])

    def keep(self) -> HostFeatureRing:
        """Copied into the model's ring; only before its next step. Raises EngineError."""
        ring, round, nodes = self.model.ring, self.round, self.nodes
        assert ring is not None, "nobody reads features"
        values = self.model.features(int(nodes.max()) + 1, ring.values.shape[1])
        ring.values[ring_places(round.plan, round.trees, nodes)] = values[nodes]
        return ring
