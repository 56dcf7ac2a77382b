"""Hidden states of the target as a handle: an executor makes it, its draft models read it, and
everybody in between only passes it on.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from forerun.types import AnyArray


class Features(Protocol):
    """A row of features per node. Those of a step are valid until the executor's next step."""

    def select(self, nodes: AnyArray) -> "Features":
        """The rows nodes int[n], in this order. Raises EngineError where there is no such row."""
        ...

    def keep(self) -> "KeptFeatures":
        """A copy on the host, valid for ever."""
        ...


@dataclass(frozen=True, slots=True)
class KeptFeatures:
    """Features on the host, kept for a draft model that will catch up later.

    values  float16[n,F*H]: some 3 KB per token for a small target
    """

    values: AnyArray

    def select(self, nodes: AnyArray) -> "KeptFeatures":
        """The rows `nodes`."""
        return KeptFeatures(self.values[nodes])

    def keep(self) -> "KeptFeatures":
        """These."""
        return self

    @staticmethod
    def joined(parts: list["KeptFeatures"]) -> "KeptFeatures":
        """The rows of all parts, in order."""
        return KeptFeatures(np.concatenate([part.values for part in parts]))
