"""A round that was launched: what the host knows of it, and what it reads when it is over."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from forerun.executors.torch.captured.buffers import Record, Size
from forerun.executors.torch.features import TorchFeatures
from forerun.interface.next_draft import NextDrafts
from forerun.interface.plan import TokenLogprobs
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Bools, Ints


@dataclass(eq=False)
class InFlightStep:
    """One replay, running or over.

    slots    int32[B]
    decided  bool[B]  rows whose accepted path the device commits
    extends  bool[B]  rows that the draft model is extended by, and drafted for
    place    int32[M] a flat node's number in scratch, logits and features; of a round that carries
             on from another it is known when the round is over
    result   where the record comes to; it is another round's as soon as this one has been read
    wait     returns when it is there
    over     called when the record is read
    logits   [R*N,V] on the device, until the next round
    features [R*N,F*H] likewise, by place; None where nothing is requested
    masks    of grammars, that it was begun with
    """

    size: Size
    slots: Ints
    decided: Bools
    extends: Bools
    place: Ints | None
    result: Tensor
    wait: Callable[[], None]
    over: Callable[[], None]
    logits: Tensor
    features: Tensor | None
    masks: NodeMasks | None = None
    _record: Ints | None = None

    def record(self) -> Ints:
        """What came back: see `Sized`. Waits for it, once."""
        if self._record is None:
            self.wait()
            self._record = self.result.numpy().copy()
            self.over()
        return self._record

    def choices(self) -> Ints:
        """int32[M] of flat nodes on an accepted path of a decided row; NOTHING elsewhere."""
        choices: Ints = Record.of(self.size, self.record()).choices[self.places()]
        return choices

    def report(self, node: int, top: int) -> TokenLogprobs | None:
        """What is reported of the choice at a flat node; None where the device did not make it, or
        reports less.
        """
        size, record = self.size, Record.of(self.size, self.record())
        place = int(self.places()[node])
        if record.choices[place] < 0 or not 0 <= top <= size.reports or not size.reports:
            return None
        mine = record.reported.reshape(size.total, -1)[place]
        own, ids, others = mine[:1], mine[1 : 1 + size.reports], mine[1 + size.reports :]
        best = zip(ids.tolist(), others.view(np.float32).tolist(), strict=True)
        return TokenLogprobs(
            token=int(record.choices[place]),
            logprob=float(own.view(np.float32)[0]),
            top=tuple(pair for pair in best if pair[1] > -np.inf)[:top],
        )

    def drafting(self) -> Ints:
        """int32[.] slots of the rows that it drafts for. Waits for nothing."""
        slots: Ints = self.slots[self.extends]
        return slots

    def drafts(self) -> NextDrafts | None:
        """What was drafted for the next step; None where nothing was asked for."""
        size, rows = self.size, len(self.slots)
        if not size.levels:
            return None
        grown, candidates = Record.of(size, self.record())[4:6]
        ids = log_probs = None
        if size.masked:
            ids, log_probs = candidates.reshape(2, size.rows, -1)[:, :rows].copy()
            log_probs = log_probs.view(np.float32)
        tokens, parents, value = grown.reshape(3, size.rows, size.draft_tokens)[:, :rows].copy()
        return NextDrafts(
            rows=self.extends,
            width=size.width,
            levels=size.levels,
            tokens=tokens,
            parents=parents,
            value=value.view(np.float32),
            ids=ids,
            log_probs=log_probs,
        )

    def node_features(self) -> TorchFeatures | None:
        """Features of the flat nodes."""
        return None if self.features is None else TorchFeatures(self.features, self.places())

    def places(self) -> Ints:
        """`place`, whoever knows it."""
        if self.place is None:
            self.trees()
        assert self.place is not None
        return self.place

    def trees(self) -> TreeBatch:
        """What ran in a round that carried on from another; sets `place`."""
        rows, nodes = len(self.slots), self.size.nodes
        record = Record.of(self.size, self.record())
        counts = record.count[:rows] if nodes > 1 else np.ones(rows, np.int32)
        row, node = np.nonzero(np.arange(nodes) < counts[:, None])
        self.place = place = (row * nodes + node).astype(np.int32)
        start = np.append(0, np.cumsum(counts)).astype(np.int32)
        parents = np.where(node > 0, record.parents[place] + start[row], -1).astype(np.int32)
        depth = np.zeros(len(place), np.int32)
        for _ in range(int(counts.max()) - 1):  # A level each, at least.
            deeper = np.where(parents >= 0, depth[parents] + 1, 0)
            if (deeper == depth).all():
                break
            depth = deeper.astype(np.int32)
        known = np.ones(rows, np.int32)
        return TreeBatch(record.tokens[place], parents, start, known, depth)
