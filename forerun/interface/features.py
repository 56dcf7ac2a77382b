"""Hidden states of the target as a handle: an executor makes it, its draft models read it, and
everybody in between only passes it on.
"""

from dataclasses import dataclass
from typing import Protocol, Self

from forerun.types import AnyArray, Ints

RING_TOKENS = 256
"""The last tokens of a sequence whose features a ring holds, until the draft model reads them."""


class Features(Protocol):
    """Rows of features that a draft model of the same executor reads."""

    def __len__(self) -> int:
        """How many rows."""
        ...


class StepFeatures(Features, Protocol):
    """A row of features per node of a step, valid until the executor's next step."""

    def select(self, nodes: AnyArray) -> Self:
        """The rows nodes int[n], in this order, as a new handle; nothing is copied off the device.

        Raises EngineError or IndexError where there is no such row, at the latest when it is read.
        """
        ...

    def keep(self) -> "FeatureRing":
        """Write these rows into the executor's ring, by slot and position, and return the ring:
        they stay until their slots have run RING_TOKENS further tokens. For accepted nodes only.
        """
        ...


class FeatureRing(Protocol):
    """Features of every slot's last RING_TOKENS tokens, in host memory or on the device."""

    def at(self, slots: Ints, positions: Ints) -> Features:
        """A row for each of int32[n] slots and the token at int32[n] positions of its sequence.
        Of a position that is not in the ring: whatever stands there.
        """
        ...


@dataclass(frozen=True, slots=True)
class HostFeatures:
    """Features in host memory, as HostFeatureRing has them.

    values  float16[n,F*H]: some 3 KB per token for a small target
    """

    values: AnyArray

    def __len__(self) -> int:
        """How many rows."""
        return len(self.values)
