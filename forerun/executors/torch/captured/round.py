"""A round that was launched: what the host knows of it, and what it reads when it is over."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from forerun.executors.torch.captured.buffers import Record, Size
from forerun.executors.torch.features import TorchFeatures
from forerun.interface.next_draft import NextDrafts
from forerun.interface.plan import Round, TokenLogprobs
from forerun.speculative.tree import TreeBatch
from forerun.types import Bools, Ints

_UNKNOWN: Ints = np.zeros(0, np.int32)


@dataclass(eq=False)
class CapturedRound(Round):
    """One replay, running or over.

    decided  bool[B]  rows whose accepted path the device commits
    extends  bool[B]  rows that the draft model is extended by, and drafted for
    result   where the record comes to; it is another round's as soon as this one has been read
    wait     returns when it is there
    over     called when the record is read
    logits   [R*N,V] on the device, until the next round
    features [R*N,F*H] likewise, by place; None where nothing is requested
    place    int32[M] a flat node's number in scratch, logits and features; of a round that goes on
             from another it is known when the round is over
    """

    size: Size = field(kw_only=True)
    decided: Bools = field(kw_only=True)
    extends: Bools = field(kw_only=True)
    result: Tensor = field(kw_only=True)
    wait: Callable[[], None] = field(kw_only=True)
    over: Callable[[], None] = field(kw_only=True)
    logits: Tensor = field(kw_only=True)
    features: Tensor | None = field(kw_only=True)
    place: Ints = field(default_factory=lambda: _UNKNOWN)
    _record: Ints | None = None

    def record(self) -> Ints:
        """What came back: see `Sized`. Waits for it, once."""
        if self._record is None:
            self.wait()
            self._record = self.result.numpy().copy()
            self.over()
        return self._record

    def read(self) -> None:
        """Wait, and complete plan, trees and place."""
        self.record()
        if self.plan.after is not None:
            self.plan = self.plan.completed()
            self._read_trees()

    def choices(self) -> Ints:
        """int32[M] of flat nodes on an accepted path of a decided row; NOTHING elsewhere."""
        choices: Ints = Record.of(self.size, self.record()).choices[self.place]
        return choices

    def report(self, node: int, top: int) -> TokenLogprobs | None:
        """What is reported of the choice at a flat node; None where the device did not make it, or
        reports less.
        """
        size, record = self.size, Record.of(self.size, self.record())
        place = int(self.place[node])
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

    def drafts(self) -> NextDrafts | None:
        """What was drafted for the next step; None where nothing was asked for."""
        size, rows = self.size, self.plan.rows
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
        return None if self.features is None else TorchFeatures(self.features, self.place)

    def _read_trees(self) -> None:
        """Complete trees and place of a round that went on from another."""
        rows, nodes = self.plan.rows, self.size.nodes
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
        self.trees = TreeBatch(record.tokens[place], parents, start, known, depth)
