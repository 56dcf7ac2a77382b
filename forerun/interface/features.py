"""Hidden states of the target as an opaque handle: an executor creates it, its draft models read
it, and all code in between only passes it on.
"""

from dataclasses import dataclass
from typing import Protocol, Self

from forerun.types import AnyArray, Ints

RING_TOKENS = 256
"""Last tokens per sequence whose features are stored in a ring until the draft model reads them."""


class Features(Protocol):
    """Rows of features that a draft model of the same executor reads."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...


class StepFeatures(Features, Protocol):
    """One row of features per node of a step, valid until the executor's next step."""

    def select(self, nodes: AnyArray) -> Self:
        """Return the rows nodes int[n], in this order, as a new handle; copies nothing off the
        device.

        Raises EngineError or IndexError if there is no such row, at the latest when it is read.
        """
        ...

    def store(self) -> "FeatureRing":
        """Write these rows, of accepted nodes only, into the executor's ring by slot and position,
        and return the ring. A row stays until its slot has run RING_TOKENS further tokens.
        """
        ...


class FeatureRing(Protocol):
    """Features of every slot's last RING_TOKENS tokens, in host memory or on the device."""

    def at(self, slots: Ints, positions: Ints) -> Features:
        """Return one row for each of int32[n] slots and the token at int32[n] positions of its
        sequence. A position outside the ring gets arbitrary values.
        """
        ...


@dataclass(frozen=True, slots=True)
class HostFeatures:
    """Features in host memory, as rows of a HostFeatureRing.

    values  float32[n,F*H]: some 7 KB per token for a small target
    """

    values: AnyArray

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values)
