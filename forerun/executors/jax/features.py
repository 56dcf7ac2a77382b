"""The target's hidden states of one step, on the device: what a JAX draft model reads."""

from dataclasses import dataclass

import numpy as np

from forerun.errors import EngineError
from forerun.executors.jax.programs import Programs
from forerun.interface.features import KeptFeatures
from forerun.types import AnyArray


@dataclass(frozen=True, slots=True)
class JaxFeatures:
    """Features of nodes, where the target's step left them; the next one overwrites them.

    place  int[n] the row of `DraftArrays.streams` that each node has
    """

    programs: Programs
    place: AnyArray

    def select(self, nodes: AnyArray) -> "JaxFeatures":
        """The rows nodes int[n], in this order, without a copy. Raises EngineError where a node is
        out of range.
        """
        if len(nodes) and not 0 <= nodes.min() <= nodes.max() < len(self.place):
            raise EngineError(
                f"features of a node outside of 0..{len(self.place) - 1} were asked for"
            )
        return JaxFeatures(self.programs, self.place[nodes])

    def keep(self) -> KeptFeatures:
        """A copy in host memory, float16[n,F*H]; waits for the step."""
        values = self.programs.rows("features", np.asarray(self.place, np.int32))
        return KeptFeatures(values.astype(np.float16))
