"""The target's hidden states on the device, as torch draft models read them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.feature_ring import ring_place, ring_places, ring_size
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Ints


class TorchFeatureRing:
    """Features of the last tokens of every slot, kept until the draft model reads them.

    values  [(S+1)*RING_TOKENS,F*H]: rows as in feature_ring.py; the last slot is padding
    """

    def __init__(self, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(ring_size(slots + 1), width, dtype=dtype, device=device)

    def at(self, slots: Ints, positions: Ints) -> "TorchFeatures":
        """Return features [n,F*H] of slots int32[n] at positions int32[n], on the device, as views
        of the ring: they are overwritten when a slot has advanced by RING_TOKENS tokens.
        """
        place = ring_place(slots.astype(np.int64), positions)
        return TorchFeatures(self.values, place)

    @staticmethod
    def bytes(slots: int, width: int, dtype: torch.dtype) -> int:
        """Return the bytes of a ring for `slots` slots whose rows have `width` elements, on its
        device.
        """
        return ring_size(slots + 1) * width * dtype.itemsize

    def put(self, slots: Tensor, position: Tensor, features: Tensor) -> None:
        """Write features [n,F*H] of slots int32[n] at positions int32[n]. Does not synchronise with
        the device.
        """
        rows = torch.add(position % ring_size(1), slots, alpha=ring_size(1))
        self.values.index_copy_(0, rows.long(), features)


@dataclass(frozen=True, slots=True)
class TorchFeatures:
    """Rows of features on the device, by reference.

    values  [N,F*H]: residual streams of the requested layers, concatenated
    place   int[n] the row of `values` of each
    """

    values: Tensor
    place: AnyArray

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.place)

    def tensor(self) -> Tensor:
        """Return a copy [n,F*H] on the device."""
        place = torch.from_numpy(np.asarray(self.place, np.int64)).to(self.values.device)
        return self.values[place]


@dataclass(frozen=True, slots=True)
class TorchStepFeatures(TorchFeatures):
    """Features of nodes in the step's own buffer, which the next captured step overwrites.

    nodes    int[n] their flat numbers in the step's `trees`
    ring     where `store` writes them, by slot and position
    written  whether the round has written them to the ring
    """

    nodes: AnyArray
    plan: Plan
    trees: TreeBatch
    ring: TorchFeatureRing
    written: bool = False

    def select(self, nodes: AnyArray) -> "TorchStepFeatures":
        """Return the features of the flat nodes int[n], in this order, without a copy. Raises
        EngineError for a missing one.
        """
        if len(nodes) and not 0 <= nodes.min() <= nodes.max() < len(self.place):
            raise EngineError(
                f"features of a node outside of 0..{len(self.place) - 1} were requested"
            )
        return replace(self, place=self.place[nodes], nodes=self.nodes[nodes])

    def store(self) -> TorchFeatureRing:
        """Write the features to the executor's ring, unless the round has done so. Returns the
        ring. Copies nothing to the host.
        """
        if not self.written:
            rows = torch.from_numpy(ring_places(self.plan, self.trees, self.nodes))
            into = self.ring.values
            into.index_copy_(0, rows.to(into.device), self.tensor())
        return self.ring
