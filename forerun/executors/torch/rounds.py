"""A whole round as one program: verify, accept and commit without the host in between.

Launching a step kernel by kernel takes longer than a GPU needs to do it. So steps are run at a
few sizes, R rows of N nodes, each captured once (graphs.py) and replayed: the plan goes in as one
copy, the choices of all nodes come back as one copy, and in between the accepted path of every
row has been found and its keys and values moved into pages.

    host    plan -> facts                                                 record -> Outcome
    device           '-> forward -> choose -> walk -> move pages (-> draft) --'

Where a draft head wished for it (drafting.py), the same program extends the head by what was
accepted and grows the next trees, which come back in the same copy.

Rows that the device cannot decide (a grammar, penalties) run along: it walks no path for them, and
the host decides and commits them from the logits, as in an eager step. A row that does not
begin with exactly one known token, which is a prompt's, makes the whole step an eager one.
"""

from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from forerun.engine.executor import ExecutorLimits
from forerun.engine.heads import Wish
from forerun.engine.plan import Plan
from forerun.errors import EngineError
from forerun.executors.host import PlainNodes
from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.decoder import Decoder
from forerun.executors.torch.drafting import Decided, Drafting
from forerun.executors.torch.facts import Facts, Size, Sized
from forerun.executors.torch.geometry import Geometry, intervals
from forerun.executors.torch.graphs import Programs, Recorder
from forerun.executors.torch.kernels import Kernels
from forerun.executors.torch.kv import PagedCache
from forerun.spec.accept import NOTHING
from forerun.spec.tree import TreeBatch
from forerun.types import AnyArray, Bools, Ints

MOST_NODES = 64
"""Nodes of a row, at most, in a captured round."""

COMMON = (1, 2, 4, 8)
"""Nodes per row that are captured before the first round; others when they first come up."""

CAPTURE_SECONDS = 20.0
"""No further one is begun then after this long."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one replay found.

    place    int32[M]  a flat node's number in scratch, logits and features
    decided  bool[B]   rows whose accepted path the device has committed
    choices  int32[M]  of flat nodes on an accepted path of a decided row; NOTHING elsewhere
    logits   float32[R*N,V] on the device, until the next round
    features [R*N,F*H] likewise; None where nothing is tapped
    """

    place: Ints
    decided: Bools
    choices: Ints
    logits: Tensor
    features: Tensor | None


class Rounds:
    """Captured rounds of one executor.

    taps      layers whose entering residual streams a round hands out
    drafting  what a draft head does at the end of a round; None = nothing
    count     rounds so far, and the seconds from their facts' sending to their results' coming:
              what a step takes longer than that is the host's
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        limits: ExecutorLimits,
        kernels: Kernels,
        records: Recorder,
    ) -> None:
        self._decoder, self._cache, self._limits = decoder, cache, limits
        self._kernels = kernels
        self._share = decoder.arch.heads // decoder.arch.kv_heads
        self._width = -(-limits.context // limits.page_size)
        self._device = cache.device
        self._sized: dict[Size, Sized] = {}
        self._programs = Programs(self._work, records)
        self._logits = torch.zeros(limits.max_nodes, limits.vocab, device=self._device)
        self.taps: tuple[int, ...] = ()
        self.drafting: Drafting | None = None
        self._features: Tensor | None = None
        self.capture_seconds = 0.0
        self.count, self.seconds = 0, 0.0
        self._warm = False

    @property
    def captured(self) -> tuple[Size, ...]:
        """Sizes that are replayed."""
        return self._programs.captured

    def tap(self, layers: tuple[int, ...], dtype: torch.dtype) -> None:
        """Hand out these layers' streams from now on; what was captured is forgotten."""
        self.taps = layers
        width = len(layers) * self._decoder.arch.hidden
        shape = self._limits.max_nodes, width
        self._features = torch.zeros(shape, dtype=dtype, device=self._device)
        self._programs.forget()
        self._warm = False

    def follow(self, drafting: Drafting) -> None:
        """Do this at the end of rounds that a wish came before."""
        self.drafting = drafting

    def _capture_common(self, first: Size) -> None:
        """Capture the sizes that are likely to come up, the first round's and the smallest first,
        within CAPTURE_SECONDS.
        """
        self._warm, began = True, perf_counter()
        rows = [1 << power for power in range(self._limits.slots.bit_length())]
        likely = [first, *(first._replace(rows=r) for r in rows)] if first.levels else []
        for size in (*likely, *(Size(r, n) for r in rows for n in COMMON)):
            if perf_counter() - began > CAPTURE_SECONDS:
                break
            if self._fits(size) and size not in self.captured:
                self._of(size).facts.blank()
                for _ in range(2):
                    self._of(size).facts.send()
                    self._programs.run(size)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.capture_seconds = perf_counter() - began

    def size_of(self, plan: Plan, trees: TreeBatch, wish: Wish | None = None) -> Size | None:
        """The smallest size that holds the step; None where it cannot be run as a round.

        What is wished for is part of it, where it fits.
        """
        if not (trees.known == 1).all() or not plan.samples.all():
            return None
        size = Size(_power(plan.rows), _power(int(np.diff(trees.start).max())))
        if size.nodes > MOST_NODES or not self._fits(size):
            return None
        if wish is None or self.drafting is None or not np.isin(plan.slots, wish.slots).any():
            return size
        larger = size._replace(levels=wish.levels, width=wish.width)
        return larger if self.drafting.fits(larger) else size

    def run(
        self, size: Size, plan: Plan, trees: TreeBatch, plain: PlainNodes, wish: Wish | None = None
    ) -> Round:
        """One round. Waits for its result, and for nothing before that."""
        if not self._warm:
            self._capture_common(size)
        sized = self._of(size)
        row = np.repeat(np.arange(plan.rows), np.diff(trees.start))
        place = row * size.nodes + np.arange(len(row)) - trees.start[row]
        decided = np.isin(trees.start[:-1], plain.nodes)
        self._fill(sized.facts, plan, trees, plain, (row, place, decided))
        followed = np.zeros(plan.rows, np.bool_)
        if wish is not None and size.levels:
            followed = decided & np.isin(plan.slots, wish.slots)
            sized.facts.host["home"][: plan.rows][followed] = plan.slots[followed]
        sent = perf_counter()
        sized.facts.send()
        self._programs.run(size)
        sized.result.copy_(sized.record, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self.count, self.seconds = self.count + 1, self.seconds + perf_counter() - sent
        record = sized.result.numpy()
        if self.drafting is not None and size.levels:
            self.drafting.done(size, followed, record[size.total :])
        return Round(
            place=place.astype(np.int32),
            decided=decided,
            choices=record[place],
            logits=self._logits[: size.total],
            features=self._features,
        )

    def _fits(self, size: Size) -> bool:
        most = self._limits.max_nodes
        return size.total <= most and (self.drafting is None or self.drafting.fits(size))

    def _of(self, size: Size) -> Sized:
        if size not in self._sized:
            self._sized[size] = Sized(size, self._width, self._share, self._device)
            self._sized[size].facts.blank()
        return self._sized[size]

    # --- the host's half -----------------------------------------------------------------

    def _fill(
        self,
        facts: Facts,
        plan: Plan,
        trees: TreeBatch,
        plain: PlainNodes,
        where: tuple[AnyArray, AnyArray, AnyArray],
    ) -> None:
        """Write the plan into the facts. where: row and place of every node, decided rows."""
        row, place, decided = where
        count, host = plan.rows, facts.host
        self._check_pages(plan, trees, row)
        facts.blank()
        host["kv_len"][:count] = plan.kv_len
        host["count"][:count] = np.diff(trees.start)
        host["decided"][:count] = decided
        roots = np.searchsorted(plain.nodes, trees.start[:-1][decided])
        seeds = plain.seeds[roots]
        chosen = np.flatnonzero(decided)
        host["low"][chosen] = (seeds & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        host["high"][chosen] = (seeds >> 32).astype(np.uint32).view(np.int32)
        host["position"][chosen] = plain.positions[roots]
        host["heat"].view(np.float32)[chosen] = plain.temperatures[roots]
        host["table"][:count, : plan.page_table.shape[1]] = np.maximum(plan.page_table, 0)
        host["tokens"][place] = trees.tokens
        host["parents"][place] = np.where(trees.parents < 0, -1, trees.parents - trees.start[row])
        host["depth"][place] = trees.depth
        host["turns"][:, place] = _turns(trees, row)

    def _check_pages(self, plan: Plan, trees: TreeBatch, row: AnyArray) -> None:
        """Raise EngineError where a node's position has no page."""
        page = (plan.kv_len[row] + trees.depth) // self._limits.page_size
        inside = page < plan.page_table.shape[1]
        if not inside.all() or (plan.page_table[row, page] < 0).any():
            raise EngineError("a plan's position has no page: the page table is too short")

    # --- the device's half: launches only, no shape and no branch depends on a value -------

    def _work(self, size: Size) -> None:
        sized, decoder, cache = self._of(size), self._decoder, self._cache
        facts = sized.facts.there
        total = size.total
        geometry = Geometry(
            start=sized.start,
            kv_len=facts["kv_len"],
            table=facts["table"],
            turns=facts["turns"],
            tiles=sized.tiles,
            tile=sized.tile,
            page_size=cache.page_size,
            scratch=cache.scratch_begin,
        )

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            held = cache.of_layer(layer)
            self._kernels.write(keys, values, held, cache.scratch_begin)
            return self._kernels.attend(queries, *held, geometry)

        position = facts["kv_len"][sized.row] + facts["depth"]
        last, streams = decoder.forward(facts["tokens"].long(), position.long(), attend, self.taps)
        if self._features is not None:
            self._features[:total] = torch.cat(streams, -1)
        logits = self._logits[:total]
        decoder.logits(last, out=logits)
        low, high = (facts[name].long() for name in ("low", "high"))
        noise = NodeNoise(
            seeds=(high << 32) | (low & 0xFFFFFFFF),
            positions=facts["position"],
            temperatures=facts["heat"].view(torch.float32),
        )
        choices = self._kernels.choose(logits, noise.at(sized.row, facts["depth"]))
        kept = walk(choices, facts, size)
        sized.record[:total] = torch.where(kept.flatten(), choices, NOTHING)
        page = facts["table"][sized.row, position // cache.page_size].long()
        slot = page * cache.page_size + position % cache.page_size
        # What is not kept is copied onto itself.
        scratch = cache.scratch_begin + torch.arange(total, device=self._device)
        cache.move(scratch, torch.where(kept.flatten(), slot, scratch))
        if self.drafting is not None and self._features is not None and size.levels:
            decided = Decided(facts, geometry, noise, choices, kept, position, slot)
            sized.record[total:] = self.drafting.work(size, decided, self._features[:total])


def walk(choices: Tensor, facts: dict[str, Tensor], size: Size) -> Tensor:
    """bool[R,N]: nodes on the accepted path of a decided row, its root included.

    The rule of forerun.spec.accept without a loop: a node is right where it is the first child
    of its parent that guesses the parent's choice, and has a choice itself; it is kept where it
    and everything above it is right.
    """
    chosen, tokens, parents = (
        tensor.view(size.rows, size.nodes)
        for tensor in (choices, facts["tokens"], facts["parents"])
    )
    enter, leave = facts["turns"].view(2, size.rows, size.nodes)
    order = torch.arange(size.nodes, device=choices.device)
    twins = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    doubled = (twins & (order[:, None] > order)).any(-1)
    guessed = tokens == chosen.gather(1, parents.clamp_min(0).long())
    right = ((guessed & ~doubled) | (order == 0)) & (chosen != NOTHING)
    right &= (order < facts["count"][:, None]) & (facts["decided"][:, None] > 0)
    above = (enter[:, None] <= enter[:, :, None]) & (enter[:, :, None] < leave[:, None])
    return ~(above & ~right[:, None]).any(-1)


def _turns(trees: TreeBatch, row: AnyArray) -> AnyArray:
    """int32[2,M]: enter and leave of every flat node."""
    counts = np.diff(trees.start)
    if np.array_equal(trees.parents[trees.depth > 0], np.flatnonzero(trees.depth > 0) - 1):
        return np.stack([trees.depth, counts[row]])
    spans = [
        intervals(trees.parents[begin:end] - begin) for begin, end in pairwise(trees.start.tolist())
    ]
    return np.concatenate(spans, axis=1)


def _power(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
