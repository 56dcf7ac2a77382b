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
        """The rows nodes int[n], in this order, as a new handle; nothing is copied off the device.

        Raises EngineError or IndexError where there is no such row, at the latest when it is read.
        """
        ...

    def keep(self) -> "KeptFeatures":
        """A copy in host memory, float16, which stays valid after the executor's next step."""
        ...


@dataclass(frozen=True, slots=True)
class KeptFeatures:
    """Features on the host, kept for a draft model that will catch up later.

    values  float16[n,F*H]: some 3 KB per token for a small target
    """

    values: AnyArray

    def select(self, nodes: AnyArray) -> "KeptFeatures":
        """The rows nodes int[n] or bool[rows], in this order, copied. Raises IndexError where there
        is none.
        """
        return KeptFeatures(self.values[nodes])

    def keep(self) -> "KeptFeatures":
        """Itself: these are on the host already."""
        return self

    @staticmethod
    def joined(parts: list["KeptFeatures"]) -> "KeptFeatures":
        """float16[sum of n,F*H]: the rows of all `parts`, in order. Raises ValueError where there
        is no part or widths differ.
        """
        return KeptFeatures(np.concatenate([part.values for part in parts]))
