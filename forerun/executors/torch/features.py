"""The target's hidden states on the device: what a torch draft model reads."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.feature_ring import ring_place, ring_places, ring_size
from forerun.interface.features import Features, KeptFeatures
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Ints


class FeatureRing:
    """Features of the last tokens of every slot, until the draft model reads them.

    values  [(S+1)*MOST_KEPT,F*H]: rows as in feature_ring.py; the last slot is of nobody
    """

    def __init__(self, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(ring_size(slots + 1), width, dtype=dtype, device=device)

    def at(self, slots: Ints, positions: Ints) -> "TorchFeatures":
        """Features [n,F*H] of slots int32[n] at positions int32[n], on the device, not copied: they
        are overwritten when a slot has moved on by MOST_KEPT tokens.
        """
        place = ring_place(slots.astype(np.int64), positions)
        return TorchFeatures(self.values, place, place)

    @staticmethod
    def bytes(slots: int, width: int, dtype: torch.dtype) -> int:
        """Of a ring for so many slots whose rows have `width` numbers, on its device."""
        return ring_size(slots + 1) * width * dtype.itemsize

    def put(self, slots: Tensor, position: Tensor, features: Tensor) -> None:
        """Write [n,F*H] of slots int32[n] at position int32[n]: launches only."""
        rows = torch.add(position % ring_size(1), slots, alpha=ring_size(1))
        self.values.index_copy_(0, rows.long(), features)


@dataclass(frozen=True, slots=True)
class Held:
    """Where features of a step's nodes stay: in the ring; written: they are there already."""

    ring: FeatureRing
    plan: Plan
    trees: TreeBatch
    written: bool = False


@dataclass(frozen=True, slots=True)
class TorchFeatures:
    """Features of nodes, where the target's step left them, or where they are kept.

    streams  [N,F*H] the residual streams that were requested, side by side; of a captured step it
             is overwritten by the next one
    place    int[n] the row of `streams` that each node has
    nodes    int[n] their flat numbers in the step
    held     None where they are kept already
    """

    streams: Tensor
    place: AnyArray
    nodes: AnyArray
    held: Held | None = None

    def select(self, nodes: AnyArray) -> "TorchFeatures":
        """Features of the nodes int[n], by their flat numbers here, in this order; nothing is
        copied. Raises EngineError where one is not there.
        """
        if len(nodes) and not 0 <= nodes.min() <= nodes.max() < len(self.place):
            raise EngineError(
                f"features of a node outside of 0..{len(self.place) - 1} were asked for"
            )
        return replace(self, place=self.place[nodes], nodes=self.nodes[nodes])

    def keep(self) -> "FeatureRing":
        """Write them into the executor's ring, unless the round has; returns the ring. Nothing
        leaves the device. Not for features that are kept already (AssertionError).
        """
        assert self.held is not None, "they are kept already"
        ring = self.held.ring
        if not self.held.written:
            rows = torch.from_numpy(ring_places(self.held.plan, self.held.trees, self.nodes))
            ring.values.index_copy_(0, rows.to(ring.values.device), self.tensor())
        return ring

    def __len__(self) -> int:
        """How many rows."""
        return len(self.place)

    def tensor(self) -> Tensor:
        """A copy [n,F*H] on the device, a row per node."""
        place = torch.from_numpy(np.asarray(self.place, np.int64)).to(self.streams.device)
        return self.streams[place]


def on_device(features: Features, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[n,F*H] whatever holds them. Raises EngineError for another executor's."""
    if isinstance(features, KeptFeatures):
        return torch.from_numpy(features.values).to(device).to(dtype)
    if not isinstance(features, TorchFeatures):
        raise EngineError(f"features of {type(features).__name__} come from another executor")
    return features.tensor()
