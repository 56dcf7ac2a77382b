"""The device's half of a captured round: one program that verifies, accepts, commits and drafts.

Launching a step kernel by kernel takes longer than the GPU's work. So steps are run at a few sizes,
R rows of N nodes, each captured once (graphs.py) and replayed: the plan is sent in one copy, the
choices of all nodes return in one copy, and in between the accepted path of every row is found and
its keys and values are moved to pages.

    host    plan -> buffers                                               record -> Outcome
    device             '-> prepare -> forward -> accept -> move (-> draft) --'

If rounds overlap (FutureState), a round continues on the device from the state that the previous
one left there. If the step is to draft (drafting.py), the program extends the draft model by the
accepted tokens and builds the next trees, which return in the same copy.

Sampling parameters, grammars' masks and log-probabilities are optional parts of a round
(shaped_rows.py). Rows that the device still cannot decide are computed too, but no path is accepted
for them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.executors.torch.attention.attention_shapes import widest_tile
from forerun.executors.torch.attention.geometry import Geometry
from forerun.executors.torch.attention.kv import PagedCache
from forerun.executors.torch.attention.window_cache import window_cache
from forerun.executors.torch.captured.declared import covering, padded_rows
from forerun.executors.torch.captured.drafting import Drafting
from forerun.executors.torch.captured.entries import CommittedRound, KindOfPages, near_of
from forerun.executors.torch.captured.fixed import SENT, BufferDims, RoundBuffers, room_of
from forerun.executors.torch.captured.graphs import CapturedPrograms, CudaRecorder
from forerun.executors.torch.captured.round import PageTables, StagingBuffer
from forerun.executors.torch.captured.shaped_rows import ShapedRows
from forerun.executors.torch.captured.states import RoundStates
from forerun.executors.torch.decoder.decoder import Decoder, attention_over
from forerun.executors.torch.decoder.recurrent import no_states
from forerun.executors.torch.features import TorchFeatureRing
from forerun.executors.torch.group import Group
from forerun.executors.torch.model_runner import chosen_together
from forerun.executors.torch.shaping import reported
from forerun.executors.torch.sizes import Record, Size
from forerun.executors.torch.triton.kernels import Kernels
from forerun.executors.torch.triton.round_types import (
    Accepted,
    FutureState,
    Prepared,
    RoundInputs,
    RoundShape,
    with_room,
)
from forerun.interface.executor import ExecutorLimits

LEVELS = 8
"""The least depth of trees for which room is allocated; deeper ones later discard the captured
programs.
"""


class CudaGraphRunner:
    """The program of a round at every size, and its tensors.

    programs    of all sizes
    group       the ranks that share the model with `decoder`: all launch the same rounds with the
                same inputs, in the same order, without shaping, masks, reports and drafting
    aux_layers  layers whose input residual streams a round stores in `features`
    drafting    the draft model's work at the end of a round; None = none
    future      what rounds leave for the next one by slot, if they overlap; None = no overlap
    shaped      sampling parameters other than temperature; None = not supported
    states      of recurrent layers; None = there are none
    tables      the slots' page tables, of each of PagedCache.kinds
    near        the cache of layers with window pages; None = there are none
    logits      [scored_nodes,V] of the last round, by place, in decoder.logits_dtype
    features    [scored_nodes,F*H] likewise; None without a draft model that reads any
    ring        where rounds without drafting store features, for a draft model that catches up
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        limits: ExecutorLimits,
        kernels: Kernels,
        records: CudaRecorder,
        group: Group | None = None,
        overlap: bool = False,
    ) -> None:
        self._decoder, self._cache, self._limits, self._group = decoder, cache, limits, group
        self.kernels, self._records = kernels, records
        arch = decoder.arch
        self._specs = arch.attention_specs
        self._dims = BufferDims(
            width=-(-limits.context // limits.page_size),
            slots=limits.slots,
            gqa_group=widest_tile(arch.heads, arch.cache_shapes),
            vocab=limits.vocab,
            groups=cache.groups,
            page_size=cache.page_size,
            sent=SENT[: len(cache.kinds)],
        )
        self._device, self.near = cache.device, None if cache.near is None else window_cache(cache)
        factors = [rope.attention_factor for rope, _ in decoder.ropes]
        self._shape = RoundShape(
            page_size=cache.page_size,
            scratch=cache.scratch_begin,
            frequencies=decoder.frequencies,
            factors=torch.tensor(factors, dtype=torch.float32, device=self._device),
        )
        self._fixed: dict[Size, RoundBuffers] = {}
        most = limits.scored_nodes
        rows = min(most, padded_rows(limits.slots))
        room = room_of(rows, most, self._dims)
        self._room = torch.zeros(room, dtype=torch.int32, device=self._device)
        self._staging = [StagingBuffer(self._room) for _ in range(2)]
        self.tables = [
            PageTables(limits.slots, self._dims.width, rows, self._device, name)
            for name in self._dims.sent
        ]
        self.programs = CapturedPrograms(self.work, records)
        self._runs: dict[Size, Size | None] = {}  # The size that each size runs as.
        shape = most, decoder.head.shape[0]
        self.logits = torch.zeros(shape, dtype=decoder.logits_dtype, device=self._device)
        self.aux_layers: tuple[int, ...] = ()
        self.drafting: Drafting | None = None
        self.features: Tensor | None = None
        self.ring: TorchFeatureRing | None = None
        self.future: FutureState | None = None
        if overlap:
            state = torch.zeros(limits.slots + 1, 3, dtype=torch.int32, device=self._device)
            self.future = with_room(state, 0, 0)
        self.shaped: ShapedRows | None = None
        self.states: RoundStates | None = None

    def request_aux_hidden_states(self, layers: tuple[int, ...], ring: TorchFeatureRing) -> None:
        """Store these layers' residual streams from now on, those of rounds without drafting in
        `ring` too; discards the captured programs.
        """
        self.aux_layers, self.ring = layers, ring
        self.features = ring.values.new_zeros(self._limits.scored_nodes, ring.values.shape[1])
        self._forget()

    def lacks(self, size: Size) -> bool:
        """Return whether rounds overlap, but FutureState has no room for the trees of this size."""
        kept = self.future
        return (
            kept is not None
            and size.levels > 0
            and (kept.width != size.width or kept.levels < size.levels)
        )

    def make_room(self, size: Size) -> None:
        """Allocate room for the trees of this size. If there was none, discards the slots' future
        state and the captured programs.
        """
        if self.future is not None and self.lacks(size):
            self.future = with_room(self.future.state, size.width, max(size.levels, LEVELS))
            self._forget()

    def _forget(self) -> None:
        self.programs.forget()
        self._runs.clear()

    def runs_as(self, size: Size) -> Size | None:
        """Return the captured size that a round of this size runs as, None if there is none; the
        size itself while programs are not sealed.
        """
        if not self.programs.sealed:
            return size
        if size not in self._runs:
            self._runs[size] = covering(size, self.programs.captured)
        return self._runs[size]

    def staging(self, size: Size) -> StagingBuffer:
        """Return the host buffer to fill before `launch`; allocates the outputs of such a round,
        and waits for the round before the last.
        """
        self.make_room(size)
        self._staging.reverse()
        self._staging[0].reset(self.of(size))
        return self._staging[0]

    def launch(
        self, size: Size, staging: StagingBuffer, first: Sequence[Callable[[], None]] = ()
    ) -> Callable[[], None]:
        """Launch one round, after all earlier launches and after the functions in `first`, in
        order. Returns a function that waits for it.
        """
        fixed = self.of(size)

        def work() -> None:
            for each in first:
                each()
            fixed.flat.copy_(staging.flat, non_blocking=True)
            self.programs[size]()
            staging.result.copy_(fixed.record, non_blocking=True)

        staging.wait = self._records.launch(work)
        return staging.wait

    def of(self, size: Size) -> RoundBuffers:
        """Return the fixed tensors of a size; allocated on first use."""
        if size not in self._fixed:
            speaks = self.drafting is not None and self.drafting.confident and size.levels
            confident = size.rows * (1 + size.draft_tokens) if speaks else 0
            self._fixed[size] = RoundBuffers(size, self._dims, self._room, confident)
        return self._fixed[size]

    # --- the program: asynchronous, no shape and no branch depends on a value ---------------

    def work(self, size: Size) -> None:
        """Launch one round of this size on the fixed tensors. It is captured once and replayed: so
        no shape or branch may depend on a value, nothing may wait for the host, and everything that
        changes between rounds must be in fixed tensors (graphs.py).
        """
        fixed, decoder, cache = self.of(size), self._decoder, self._cache
        kernels, total = self.kernels, size.total
        inputs = fixed.buffers | {"table": self.tables[0].of(size, fixed.buffers)}
        if self.future is not None:
            inputs = kernels.resume(self.future, size, inputs)
        prepared = kernels.prepare(inputs, self._shape)
        geometry = Geometry(
            start=inputs["start"],
            slots=prepared.slots,
            kv_len=inputs["kv_len"],
            table=inputs["table"],
            tree_intervals=inputs["tree_intervals"],
            tiles=fixed.tiles,
            tile=fixed.tile,
            page_size=cache.page_size,
            position=prepared.position,
            split=inputs["split"],
        )
        kinds = [KindOfPages(cache, geometry, prepared.slots, prepared.pages)]
        if self.near is not None:
            table = self.tables[1].of(size, inputs)
            kinds.append(near_of(kernels, self._shape, self.near, table, kinds[0]))
        seen = [kinds[kind].geometry for kind in cache.kind_of]
        attend = attention_over(cache.layers, self._specs, seen, kernels.enter, kernels.attend)
        rotary = decoder.by_layer_shape(prepared.rotary)
        recur = no_states if self.states is None else self.states.enter(size, inputs)
        last, streams = decoder.forward(inputs["tokens"], rotary, attend, self.aux_layers, recur)
        if self.features is not None:
            torch.cat(streams, -1, out=self.features[:total])
            if self.ring is not None and size.nodes == 1 and not size.levels:
                self.ring.put(inputs["slot"], prepared.position, self.features[:total])
        logits = decoder.logits(last, out=self.logits[:total])
        record = Record.of(size, fixed.record)
        accepted = self._accept(size, inputs, logits, prepared, record.choices)
        # A single node is in its page already, or left to the host.
        for kind in kinds if size.nodes > 1 else ():
            kernels.move(kind.cache, kind.slots, kind.pages, accepted.on_path.flatten())
        if self.states is not None:
            self.states.follow(size, inputs, accepted.on_path)
        if self.drafting is not None and size.levels:
            committed = CommittedRound(inputs, geometry, prepared, accepted)
            features = None if self.features is None else self.features[:total]
            candidates = self.drafting.work(size, committed, features, record)
            if candidates is not None:
                record.candidates.copy_(candidates)
        if size.reports:
            reports = reported(logits.float(), accepted.choices, size.reports)
            record.reported.copy_(reports.flatten())
        if size.shaping and self.shaped is not None:
            self.shaped.add(inputs, accepted.choices, accepted.on_path)
        if self.future is not None:
            kernels.leave(self.future, size, inputs, accepted, record)

    def _accept(
        self, size: Size, inputs: RoundInputs, logits: Tensor, prepared: Prepared, record: Tensor
    ) -> Accepted:
        kernels, noise = self.kernels, prepared.noise
        if self._group is not None:
            choices = chosen_together(logits, noise, self._group, kernels.best, self._limits.vocab)
        elif self.shaped is not None and (size.shaping or size.masked):
            choices = self.shaped.choose(size, inputs, logits.float(), noise, kernels)
        else:
            return kernels.accept(logits, noise, inputs, record)
        return kernels.keep(choices, inputs, record)
