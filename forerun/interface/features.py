"""Hidden states of the target as a handle: an executor makes it, its draft models read it, and
everybody in between only passes it on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from forerun.types import AnyArray

MOST_KEPT = 256
"""Tokens of a sequence whose features can be kept at once, until the draft model reads them."""


class Features(Protocol):
    """A row of features per node. Those of a step are valid until the executor's next step."""

    def select(self, nodes: AnyArray) -> Self:
        """The rows nodes int[n], in this order, as a new handle; nothing is copied off the device.

        Raises EngineError or IndexError where there is no such row, at the latest when it is read.
        """
        ...

    def keep(self) -> "HeldFeatures":
        """The same rows, valid until their slots have run MOST_KEPT further tokens: a copy, in host
        memory or on the device. Asked of accepted nodes only.
        """
        ...


class HeldFeatures(Features, Protocol):
    """Features that were kept."""

    def joined(self, others: Sequence[Self]) -> Self:
        """Its rows, then those of `others` in order, all of them kept by the same executor."""
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

    def joined(self, others: Sequence["KeptFeatures"]) -> "KeptFeatures":
        """float16[sum of n,F*H]: its rows and those of `others`, copied. Raises ValueError where
        widths differ.
        """
        return KeptFeatures(np.concatenate([self.values, *(each.values for each in others)]))
