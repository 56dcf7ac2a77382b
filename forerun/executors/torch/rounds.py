"""A whole round as one program: verify, accept and commit without the host in between.

Launching a step kernel by kernel takes longer than a GPU needs to do it. So steps are run at a
few sizes, R rows of N nodes, each captured once (graphs.py) and replayed: the plan goes in as one
copy, the choices of all nodes come back as one copy, and in between the accepted path of every
row has been found and its keys and values moved into pages.

    host    plan -> facts                                                 record -> Outcome
    device           '-> forward -> choose -> walk -> move pages (-> draft) --'

Nothing waits until the record is wanted (flight.py). Where rounds keep state (carry.py), another
one may be launched before that: it takes up on the device what this one leaves there.

Where a draft head wished for it (drafting.py), the same program extends the head by what was
accepted and grows the next trees, which come back in the same copy.

Rows that the device cannot decide (a grammar, penalties) run along: it walks no path for them, and
the host decides and commits them from the logits, as in an eager step. A row that does not
begin with exactly one known token, which is a prompt's, makes the whole step an eager one.
"""

from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from forerun.engine.executor import ExecutorLimits
from forerun.engine.heads import Wish
from forerun.engine.plan import Plan
from forerun.executors.host import Choosing, PlainNodes
from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.carry import Carry
from forerun.executors.torch.decoder import Decoder
from forerun.executors.torch.drafting import Decided, Drafting
from forerun.executors.torch.facts import Record, Room, Side, Size, Sized
from forerun.executors.torch.fill import check_pages, fill, fill_ahead
from forerun.executors.torch.flight import Flight
from forerun.executors.torch.geometry import Geometry
from forerun.executors.torch.graphs import Programs, Recorder
from forerun.executors.torch.kernels import Kernels
from forerun.executors.torch.kv import PagedCache
from forerun.spec.accept import NOTHING
from forerun.spec.draft import full_size
from forerun.spec.tree import TreeBatch
from forerun.types import Bools, Ints

MOST_NODES = 64
"""Nodes of a row, at most, in a captured round."""

COMMON = (1, 2, 4, 8)
"""Nodes per row that are captured before the first round; others when they first come up."""

CAPTURE_SECONDS = 20.0
"""No further one is begun then after this long."""


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
        self._room = Room(
            width=-(-limits.context // limits.page_size),
            slots=limits.slots,
            share=decoder.arch.heads // decoder.arch.kv_heads,
        )
        self._device = cache.device
        self._sized: dict[Size, Sized] = {}
        self._records = records
        self._programs = Programs(self._work, records)
        self._logits = torch.zeros(limits.max_nodes, limits.vocab, device=self._device)
        self.taps: tuple[int, ...] = ()
        self.drafting: Drafting | None = None
        self._features: Tensor | None = None
        self.capture_seconds = 0.0
        self.count, self.seconds = 0, 0.0
        self._read = 0.0
        self._warm = False
        self._carry: Carry | None = None
        self.last: Flight | None = None

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

    def take(self) -> Wish | None:
        """What a draft head wishes for the step that begins now."""
        return self.drafting.take() if self.drafting is not None else None

    def keep_state(self) -> None:
        """Let rounds leave what the next one needs; what was captured is forgotten."""
        if self._carry is None:
            self._carry = Carry(self._limits.slots, self._device)
            self._programs.forget()
            self._warm = False

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
                for _ in range(2):
                    self._go(size, self._of(size).side())()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.capture_seconds = perf_counter() - began

    def size_of(self, plan: Plan, trees: TreeBatch, wish: Wish | None = None) -> Size | None:
        """The smallest size that holds the step; None where it cannot be run as a round.

        What is wished for is part of it, where it fits.
        """
        if not (trees.known == 1).all() or not plan.samples.all():
            return None
        return self._size(plan, int(np.diff(trees.start).max()), wish)

    def _size(self, plan: Plan, nodes: int, wish: Wish | None) -> Size | None:
        """The smallest size for rows of so many nodes."""
        size = Size(_power(plan.rows), _power(nodes))
        if size.nodes > MOST_NODES or not self._fits(size):
            return None
        if wish is None or self.drafting is None or not np.isin(plan.slots, wish.slots).any():
            return size
        larger = size._replace(levels=wish.levels, width=wish.width)
        return larger if self.drafting.fits(larger) else size

    def launch(
        self, size: Size, plan: Plan, trees: TreeBatch, plain: PlainNodes, wish: Wish | None = None
    ) -> Flight:
        """Begin a round of which the host knows everything. Waits for nothing."""
        check_pages(plan, trees, self._limits.page_size)
        self._prepare(size)
        side = self._of(size).side()
        place, decided = fill(side.facts, size, plan, trees, plain)
        return self._begin(size, side, plan, (decided, place), wish)

    def carry_on(self, plan: Plan, choosing: Choosing, wish: Wish | None) -> Flight | None:
        """Begin a carried plan: see forerun.engine.plan. None where no round can."""
        before = self.last
        if self._carry is None or before is None or plan.ends is None:
            return None
        grown = before.size.levels, before.size.width
        depth = np.minimum(plan.max_depth, grown[0]).tolist()
        most = [
            min(nodes, full_size(grown[1], levels))
            for nodes, levels in zip(plan.max_nodes.tolist(), depth, strict=True)
        ]
        size = self._size(plan, 1 + max(most), wish)
        # Room for deeper trees would be another's room.
        if size is None or (wish is not None and not size.levels) or self._carry.lacks(size):
            return None
        check_pages(plan, None, self._limits.page_size)
        self._prepare(size)
        side = self._of(size).side()
        fill_ahead(side.facts, size, plan, choosing, np.array(most))
        return self._begin(size, side, plan, (np.ones(plan.rows, np.bool_), None), wish)

    def _prepare(self, size: Size) -> None:
        """Have everything that a round of this size writes, and what is likely to come captured."""
        if self._carry is not None and self._carry.grow(size):
            self._programs.forget()
        if not self._warm:
            self._capture_common(size)

    def _begin(
        self,
        size: Size,
        side: Side,
        plan: Plan,
        known: tuple[Bools, Ints | None],
        wish: Wish | None,
    ) -> Flight:
        """Launch what `side` is filled with. known: decided rows; places, if they are known."""
        decided, place = known
        count = plan.rows
        side.facts["slot"][:count] = plan.slots
        followed = np.zeros(count, np.bool_)
        if wish is not None and size.levels:
            followed = decided & np.isin(plan.slots, wish.slots)
            side.facts["home"][:count][followed] = plan.slots[followed]
        if self.drafting is not None:
            self.drafting.following = plan.slots[followed]
        begun = perf_counter()

        def over(record: Ints) -> None:
            now = perf_counter()
            self.count += 1
            self.seconds += now - max(begun, self._read)
            self._read = now
            if self.drafting is not None and size.levels:
                self.drafting.done(size, followed, Record.of(size, record).grown)

        self.last = Flight(
            size=size,
            slots=plan.slots,
            decided=decided,
            place=place,
            result=side.result,
            wait=self._go(size, side),
            over=over,
            logits=self._logits[: size.total],
            features=self._features,
        )
        return self.last

    def _go(self, size: Size, side: Side) -> Callable[[], None]:
        """Launch one replay; returns what waits for it."""
        sized = self._of(size)

        def work() -> None:
            sized.whole.copy_(side.whole, non_blocking=True)
            self._programs.run(size)
            side.result.copy_(sized.record, non_blocking=True)

        side.wait = self._records.launch(work)
        return side.wait

    def _fits(self, size: Size) -> bool:
        most = self._limits.max_nodes
        return size.total <= most and (self.drafting is None or self.drafting.fits(size))

    def _of(self, size: Size) -> Sized:
        if size not in self._sized:
            self._sized[size] = Sized(size, self._room, self._device)
        return self._sized[size]

    # --- the device's half: launches only, no shape and no branch depends on a value -------

    def _work(self, size: Size) -> None:
        sized, decoder, cache = self._of(size), self._decoder, self._cache
        facts, total = sized.there, size.total
        if self._carry is not None:
            facts = self._carry.enter(size, facts)
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
        record = Record.of(size, sized.record)
        record.choices[:] = torch.where(kept.flatten(), choices, NOTHING)
        page = facts["table"][sized.row, position // cache.page_size].long()
        slot = page * cache.page_size + position % cache.page_size
        # What is not kept is copied onto itself.
        scratch = cache.scratch_begin + torch.arange(total, device=self._device)
        cache.move(scratch, torch.where(kept.flatten(), slot, scratch))
        if self.drafting is not None and self._features is not None and size.levels:
            decided = Decided(facts, geometry, noise, choices, kept, position, slot)
            record.grown.copy_(self.drafting.work(size, decided, self._features[:total]))
        if self._carry is not None:
            self._carry.leave(size, facts, choices, kept, record)


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


def _power(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
