"""The costs of steps, measured at start-up."""

from dataclasses import dataclass

import numpy as np

from forerun.types import AnyArray


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured milliseconds of a step.

    nodes      counts of nodes, ascending, at least two; between them time is interpolated, beyond
               them the last slope continues
    verify_ms  time to verify that many nodes with little context
    attend_ms  added time of a node for every 1,000 cached tokens it sees
    draft_ms   time to propose one draft token of one row, if it matters
    follow_ms  time of the drafter, in every step, to process the decided tokens
    drafts_in_step  steps draft by themselves: follow_ms is of a step that grows one level, draft_ms
               of every further level
    padded     every row takes as long as the one with most nodes
    """

    nodes: tuple[int, ...]
    verify_ms: tuple[float, ...]
    attend_ms: float = 0.0
    draft_ms: float = 0.0
    follow_ms: float = 0.0
    drafts_in_step: bool = False
    padded: bool = False

    def verify(self, nodes: AnyArray) -> AnyArray:
        """Return the milliseconds to verify `nodes` nodes; same shape as `nodes`."""
        slope = (self.verify_ms[-1] - self.verify_ms[-2]) / (self.nodes[-1] - self.nodes[-2])
        beyond = np.maximum(np.asarray(nodes) - self.nodes[-1], 0)
        ms: AnyArray = np.interp(nodes, self.nodes, self.verify_ms) + slope * beyond
        return ms
