"""A round that was launched: what the host knows of it, and what it reads when it is over."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from forerun.executors.torch.facts import NODE_FACTS, Size
from forerun.spec.tree import TreeBatch
from forerun.types import AnyArray, Bools, Ints


@dataclass(eq=False)
class Flight:
    """One replay, running or over.

    slots    int32[B]
    decided  bool[B]  rows whose accepted path the device commits
    place    int32[M] a flat node's number in scratch, logits and features; of a round that carries
             on from another it is known when the round is over
    result   where the record comes to; it is another round's as soon as this one has been read
    wait     returns when it is there
    over     told the record when it is read
    logits   float32[R*N,V] on the device, until the next round
    features [R*N,F*H] likewise; None where nothing is tapped
    """

    size: Size
    slots: Ints
    decided: Bools
    place: Ints | None
    result: Tensor
    wait: Callable[[], None]
    over: Callable[[Ints], None]
    logits: Tensor
    features: Tensor | None
    _record: Ints | None = None

    def record(self) -> Ints:
        """What came back: see `Sized`. Waits for it, once."""
        if self._record is None:
            self.wait()
            self._record = self.result.numpy().copy()
            self.over(self._record)
        return self._record

    def choices(self) -> Ints:
        """int32[M] of flat nodes on an accepted path of a decided row; NOTHING elsewhere."""
        choices: Ints = self.record()[self.places()]
        return choices

    def places(self) -> Ints:
        """`place`, whoever knows it."""
        if self.place is None:
            self.trees()
        assert self.place is not None
        return self.place

    def trees(self) -> TreeBatch:
        """What ran in a round that carried on from another; sets `place`."""
        total, rows = self.size.total, len(self.slots)
        parts = self.record()[total : NODE_FACTS * total].reshape(3, -1, self.size.nodes)
        tokens, parents, depth = parts[:, :rows]
        real = parents >= 0
        real[:, 0] = True
        counts = real.sum(1)
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        row, node = np.nonzero(real)
        self.place = (row * self.size.nodes + node).astype(np.int32)
        below: AnyArray = parents[real]
        return TreeBatch(
            tokens=tokens[real],
            parents=np.where(below < 0, -1, below + start[row]).astype(np.int32),
            start=start,
            known=np.ones(rows, np.int32),
            depth=depth[real],
        )
