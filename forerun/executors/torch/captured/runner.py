"""A whole round as one program: verify, accept and commit without the host in between.

Launching a step kernel by kernel takes longer than a GPU needs to do it. So steps are run at a
few sizes, R rows of N nodes, each captured once (graphs.py) and replayed: the plan goes in as one
copy, the choices of all nodes come back as one copy, and in between the accepted path of every
row has been found and its keys and values moved into pages.

    host    plan -> facts                                                 record -> Outcome
    device           '-> forward -> choose -> walk -> move pages (-> draft) --'

Nothing waits until the record is wanted (flight.py). Where rounds keep state (carry.py), another
one may be launched before that: it takes up on the device what this one leaves there.

Where a draft request comes with the step (drafting.py), the same program extends the draft model
by what was accepted and grows the next trees, which come back in the same copy.

Rows that the device cannot decide (a grammar, penalties) run along: it walks no path for them, and
the host decides and commits them from the logits, as in an eager step. A row that does not
begin with exactly one known token, which is a prompt's, makes the whole step an eager one.
"""

import logging
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from forerun.executors.host_sampler import Choosing, PlainNodes
from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.captured.buffers import BufferDims, Record, Size, Sized, StagingBuffer
from forerun.executors.torch.captured.drafting import Decided, Drafting
from forerun.executors.torch.captured.future_map import FutureMap
from forerun.executors.torch.captured.graphs import Programs, Recorder
from forerun.executors.torch.captured.in_flight import InFlightStep
from forerun.executors.torch.captured.prepare_inputs import (
    check_pages,
    check_pages_carried,
    prepare_inputs,
    prepare_inputs_carried,
)
from forerun.executors.torch.captured.sizes import declared, padded_size
from forerun.executors.torch.decoder import Decoder
from forerun.executors.torch.geometry import Geometry
from forerun.executors.torch.kernels import Kernels
from forerun.executors.torch.kv import PagedCache
from forerun.interface.executor import DraftShape, ExecutorLimits
from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import CarriedPlan, Plan
from forerun.speculative.accept import NOTHING
from forerun.speculative.draft_tree import full_size
from forerun.speculative.tree import TreeBatch
from forerun.types import Bools, Ints

log = logging.getLogger("forerun.executors.torch")

CAPTURE_SECONDS = 60.0
"""No further size is captured before the first request after this long."""


class CudaGraphRunner:
    """Captured rounds of one executor.

    aux_layers  layers whose entering residual streams a round hands out
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
        self._dims = BufferDims(
            width=-(-limits.context // limits.page_size),
            slots=limits.slots,
            gqa_group=decoder.arch.heads // decoder.arch.kv_heads,
        )
        self._device = cache.device
        self._sized: dict[Size, Sized] = {}
        self._records = records
        self._programs = Programs(self._work, records)
        self._logits = torch.zeros(limits.max_nodes, limits.vocab, device=self._device)
        self.aux_layers: tuple[int, ...] = ()
        self.drafting: Drafting | None = None
        self._features: Tensor | None = None
        self.count, self.seconds = 0, 0.0
        self._read = 0.0
        self._future: FutureMap | None = None
        self.last: InFlightStep | None = None

    @property
    def capture_seconds(self) -> float:
        """Spent on first calls and captures."""
        return self._programs.seconds

    @property
    def captured(self) -> tuple[Size, ...]:
        """Sizes that are replayed."""
        return self._programs.captured

    def request_aux_hidden_states(self, layers: tuple[int, ...], dtype: torch.dtype) -> None:
        """Hand out these layers' streams from now on; what was captured is forgotten."""
        self.aux_layers = layers
        width = len(layers) * self._decoder.arch.hidden
        shape = self._limits.max_nodes, width
        self._features = torch.zeros(shape, dtype=dtype, device=self._device)
        self._programs.forget()

    def draft_extend(self, drafting: Drafting) -> None:
        """Do this at the end of rounds that a draft request comes with."""
        self.drafting = drafting

    def keep_state(self) -> None:
        """Let rounds leave what the next one needs; what was captured is forgotten."""
        if self._future is None:
            self._future = FutureMap(self._limits.slots, self._device)
            self._programs.forget()

    def warm_up(self, draft: DraftShape, progress: Callable[[int, int], None]) -> None:
        """Capture the sizes that are declared for such drafts, within CAPTURE_SECONDS."""
        sizes = [size for size in declared(self._limits, draft) if self._fits(size)]
        if self._future is not None and draft.levels:
            self._future.grow(Size(1, 1, draft.levels, draft.width))
        begun = perf_counter()
        for done, size in enumerate(sizes):
            if perf_counter() - begun > CAPTURE_SECONDS:
                log.warning("captured %d of %d sizes in %.0f s", done, len(sizes), CAPTURE_SECONDS)
                return
            progress(done, len(sizes))
            for _ in range(2):
                self._go(size, self._of(size).staging())()
        progress(len(sizes), len(sizes))

    def padded_nodes(self, rows: int, nodes: int) -> int:
        """Nodes that a round of such a step runs; those of the step itself where none does."""
        size = padded_size(rows, nodes, self._limits.max_nodes)
        return rows * nodes if size is None else size.total

    def size_of(
        self, plan: Plan, trees: TreeBatch, draft_request: DraftRequest | None = None
    ) -> Size | None:
        """The smallest size that holds the step; None where it cannot be run as a round.

        What is requested is part of it, where it fits.
        """
        if not (trees.known == 1).all() or not plan.samples.all():
            return None
        return self._size(plan.slots, int(np.diff(trees.start).max()), draft_request)

    def _size(self, slots: Ints, nodes: int, draft_request: DraftRequest | None) -> Size | None:
        """The smallest size for rows, in these slots, of so many nodes."""
        size = padded_size(len(slots), nodes, self._limits.max_nodes)
        if size is None:
            return None
        if (
            draft_request is None
            or self.drafting is None
            or not np.isin(slots, draft_request.slots).any()
        ):
            return size
        larger = size._replace(levels=draft_request.levels, width=draft_request.width)
        return larger if self.drafting.fits(larger) else size

    def launch(
        self,
        size: Size,
        plan: Plan,
        trees: TreeBatch,
        plain: PlainNodes,
        draft_request: DraftRequest | None = None,
    ) -> InFlightStep:
        """Begin a round of which the host knows everything. Waits for nothing."""
        check_pages(plan, trees, self._limits.page_size)
        self._prepare(size)
        staging = self._of(size).staging()
        place, decided = prepare_inputs(staging.buffers, size, plan, trees, plain)
        return self._begin(size, staging, plan.slots, (decided, place), draft_request)

    def carry_on(
        self, plan: CarriedPlan, choosing: Choosing, draft_request: DraftRequest | None
    ) -> InFlightStep | None:
        """Begin a carried plan: see forerun.interface.plan. None where no round can."""
        before = self.last
        if self._future is None or before is None:
            return None
        grown = before.size.levels, before.size.width
        depth = np.minimum(plan.max_depth, grown[0]).tolist()
        most = [
            min(nodes, full_size(grown[1], levels))
            for nodes, levels in zip(plan.max_nodes.tolist(), depth, strict=True)
        ]
        size = self._size(plan.slots, 1 + max(most), draft_request)
        # Room for deeper trees would be another's room.
        if (
            size is None
            or (draft_request is not None and not size.levels)
            or self._future.lacks(size)
        ):
            return None
        check_pages_carried(plan, self._limits.page_size)
        self._prepare(size)
        staging = self._of(size).staging()
        prepare_inputs_carried(staging.buffers, size, plan, choosing, np.array(most))
        known = np.ones(plan.rows, np.bool_), None
        return self._begin(size, staging, plan.slots, known, draft_request)

    def _prepare(self, size: Size) -> None:
        """Have everything that a round of this size writes."""
        if self._future is not None and self._future.grow(size):
            self._programs.forget()

    def _begin(
        self,
        size: Size,
        staging: StagingBuffer,
        slots: Ints,
        known: tuple[Bools, Ints | None],
        draft_request: DraftRequest | None,
    ) -> InFlightStep:
        """Launch what `staging` is filled with. known: decided rows; places, if they are known."""
        decided, place = known
        count = len(slots)
        staging.buffers["slot"][:count] = slots
        extends = np.zeros(count, np.bool_)
        if draft_request is not None and size.levels:
            extends = decided & np.isin(slots, draft_request.slots)
            staging.buffers["draft_slot"][:count][extends] = slots[extends]
        begun = perf_counter()

        def over() -> None:
            now = perf_counter()
            self.count += 1
            self.seconds += now - max(begun, self._read)
            self._read = now

        self.last = InFlightStep(
            size=size,
            slots=slots,
            decided=decided,
            extends=extends,
            place=place,
            result=staging.result,
            wait=self._go(size, staging),
            over=over,
            logits=self._logits[: size.total],
            features=self._features,
        )
        return self.last

    def _go(self, size: Size, staging: StagingBuffer) -> Callable[[], None]:
        """Launch one replay; returns what waits for it."""
        sized = self._of(size)

        def work() -> None:
            sized.whole.copy_(staging.whole, non_blocking=True)
            self._programs.run(size)
            staging.result.copy_(sized.record, non_blocking=True)

        staging.wait = self._records.launch(work)
        return staging.wait

    def _fits(self, size: Size) -> bool:
        most = self._limits.max_nodes
        return size.total <= most and (self.drafting is None or self.drafting.fits(size))

    def _of(self, size: Size) -> Sized:
        if size not in self._sized:
            self._sized[size] = Sized(size, self._dims, self._device)
        return self._sized[size]

    # --- the device's half: launches only, no shape and no branch depends on a value -------

    def _work(self, size: Size) -> None:
        sized, decoder, cache = self._of(size), self._decoder, self._cache
        buffers, total = sized.there, size.total
        if self._future is not None:
            buffers = self._future.enter(size, buffers)
        position = buffers["kv_len"][sized.row] + buffers["depth"]
        geometry = Geometry(
            start=sized.start,
            kv_len=buffers["kv_len"],
            table=buffers["table"],
            tree_intervals=buffers["tree_intervals"],
            tiles=sized.tiles,
            tile=sized.tile,
            page_size=cache.page_size,
            scratch=cache.scratch_begin,
            position=position,
        )

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            held = cache.of_layer(layer)
            self._kernels.write(keys, values, held, cache.scratch_begin)
            spec = decoder.arch.layer_specs[layer].attention
            return self._kernels.attend(queries, *held, geometry, spec)

        last, streams = decoder.forward(
            buffers["tokens"].long(), position.long(), attend, self.aux_layers
        )
        if self._features is not None:
            self._features[:total] = torch.cat(streams, -1)
        logits = self._logits[:total]
        decoder.logits(last, out=logits)
        low, high = (buffers[name].long() for name in ("low", "high"))
        noise = NodeNoise(
            seeds=(high << 32) | (low & 0xFFFFFFFF),
            positions=buffers["position"],
            temperatures=buffers["temperature"].view(torch.float32),
        )
        choices = self._kernels.choose(logits, noise.at(sized.row, buffers["depth"]))
        kept = walk(choices, buffers, size)
        record = Record.of(size, sized.record)
        record.choices[:] = torch.where(kept.flatten(), choices, NOTHING)
        page = buffers["table"][sized.row, position // cache.page_size].long()
        slot = page * cache.page_size + position % cache.page_size
        # What is not kept is copied onto itself.
        scratch = cache.scratch_begin + torch.arange(total, device=self._device)
        cache.move(scratch, torch.where(kept.flatten(), slot, scratch))
        if self.drafting is not None and self._features is not None and size.levels:
            decided = Decided(buffers, geometry, noise, choices, kept, position, slot)
            record.grown.copy_(self.drafting.work(size, decided, self._features[:total]))
        if self._future is not None:
            self._future.leave(size, buffers, choices, kept, record)


def walk(choices: Tensor, buffers: dict[str, Tensor], size: Size) -> Tensor:
    """bool[R,N]: nodes on the accepted path of a decided row, its root included.

    The rule of forerun.speculative.accept without a loop: a node is right where it is the first
    child of its parent that drafts the parent's choice, and has a choice itself; it is kept where
    it and everything above it is right.
    """
    chosen, tokens, parents = (
        tensor.view(size.rows, size.nodes)
        for tensor in (choices, buffers["tokens"], buffers["parents"])
    )
    enter, leave = buffers["tree_intervals"].view(2, size.rows, size.nodes)
    order = torch.arange(size.nodes, device=choices.device)
    twins = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    doubled = (twins & (order[:, None] > order)).any(-1)
    drafted = tokens == chosen.gather(1, parents.clamp_min(0).long())
    right = ((drafted & ~doubled) | (order == 0)) & (chosen != NOTHING)
    right &= (order < buffers["count"][:, None]) & (buffers["decided"][:, None] > 0)
    above = (enter[:, None] <= enter[:, :, None]) & (enter[:, :, None] < leave[:, None])
    return ~(above & ~right[:, None]).any(-1)
