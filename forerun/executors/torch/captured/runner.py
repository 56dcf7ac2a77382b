"""The device's half of a captured round: one program that verifies, accepts, commits and drafts.

Launching a step kernel by kernel takes longer than a GPU needs to do it. So steps are run at a
few sizes, R rows of N nodes, each captured once (graphs.py) and replayed: the plan goes in as one
copy, the choices of all nodes come back as one copy, and in between the accepted path of every
row has been found and its keys and values moved into pages.

    host    plan -> buffers                                               record -> Outcome
    device             '-> forward -> choose -> walk -> move pages (-> draft) --'

Where rounds keep state (future_map.py), a round takes up on the device what the one before it
leaves there. Where a draft request comes with the step (drafting.py), the program extends the draft
model by what was accepted and grows the next trees, which come back in the same copy.

Sampling parameters, grammars' masks and log-probabilities are parts of a round that rows ask for
(shaped_rows.py). Rows that the device cannot decide all the same run along: it walks no path for
them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.captured.buffers import BufferDims, Record, Size, Sized, StagingBuffer
from forerun.executors.torch.captured.drafting import Decided, Drafting
from forerun.executors.torch.captured.future_map import FutureMap
from forerun.executors.torch.captured.graphs import Programs, Recorder
from forerun.executors.torch.captured.shaped_rows import ShapedRows
from forerun.executors.torch.decoder import Decoder
from forerun.executors.torch.geometry import Geometry
from forerun.executors.torch.kernels import Kernels
from forerun.executors.torch.kv import PagedCache
from forerun.executors.torch.shaping import reported
from forerun.interface.executor import ExecutorLimits
from forerun.speculative.accept import NOTHING


class CudaGraphRunner:
    """The program of a round at every size, and the tensors that it works on.

    aux_layers  layers whose entering residual streams a round leaves in `features`
    drafting    what a draft head does at the end of a round; None = nothing
    future      what rounds leave for each other; None = nothing
    shaped      what rows may ask of the sampler beyond a temperature; None = nothing
    logits      float32[max_nodes,V] of the last round, by place
    features    [max_nodes,F*H] likewise; None where nothing is requested
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
        self._kernels, self._records = kernels, records
        self._dims = BufferDims(
            width=-(-limits.context // limits.page_size),
            slots=limits.slots,
            gqa_group=decoder.arch.heads // decoder.arch.kv_heads,
            vocab=limits.vocab,
        )
        self._device = cache.device
        self._sized: dict[Size, Sized] = {}
        self._programs = Programs(self._work, records)
        self.logits = torch.zeros(limits.max_nodes, limits.vocab, device=self._device)
        self.aux_layers: tuple[int, ...] = ()
        self.drafting: Drafting | None = None
        self.features: Tensor | None = None
        self.future: FutureMap | None = None
        self.shaped: ShapedRows | None = None

    @property
    def capture_seconds(self) -> float:
        """Spent on first calls and captures."""
        return self._programs.seconds

    @property
    def captured(self) -> tuple[Size, ...]:
        """Sizes that are replayed."""
        return self._programs.captured

    def request_aux_hidden_states(self, layers: tuple[int, ...], dtype: torch.dtype) -> None:
        """Leave these layers' streams from now on; what was captured is forgotten."""
        self.aux_layers = layers
        width = len(layers) * self._decoder.arch.hidden
        shape = self._limits.max_nodes, width
        self.features = torch.zeros(shape, dtype=dtype, device=self._device)
        self._programs.forget()

    def keep_state(self) -> None:
        """Let rounds leave what the next one needs; what was captured is forgotten."""
        if self.future is None:
            self.future = FutureMap(self._limits.slots, self._device)
            self._programs.forget()

    def staging(self, size: Size) -> StagingBuffer:
        """What the host fills before `launch`; makes room for all that such a round writes."""
        if self.future is not None and self.future.grow(size):
            self._programs.forget()
        return self.of(size).staging()

    def launch(
        self, size: Size, staging: StagingBuffer, first: Callable[[], None] | None = None
    ) -> Callable[[], None]:
        """Begin one round, after all that was begun before and `first`; returns what waits for
        it.
        """
        sized = self.of(size)

        def work() -> None:
            if first is not None:
                first()
            sized.whole.copy_(staging.whole, non_blocking=True)
            self._programs.run(size)
            staging.result.copy_(sized.record, non_blocking=True)

        staging.wait = self._records.launch(work)
        return staging.wait

    def of(self, size: Size) -> Sized:
        """The fixed tensors of a size."""
        if size not in self._sized:
            self._sized[size] = Sized(size, self._dims, self._device)
        return self._sized[size]

    # --- the program: launches only, no shape and no branch depends on a value --------------

    def _work(self, size: Size) -> None:
        sized, decoder, cache = self.of(size), self._decoder, self._cache
        buffers, total = sized.there, size.total
        if self.future is not None:
            buffers = self.future.enter(size, buffers)
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
        if self.features is not None:
            self.features[:total] = torch.cat(streams, -1)
        logits = self.logits[:total]
        decoder.logits(last, out=logits)
        low, high = (buffers[name].long() for name in ("low", "high"))
        noise = NodeNoise(
            seeds=(high << 32) | (low & 0xFFFFFFFF),
            positions=buffers["position"],
            temperatures=buffers["temperature"].view(torch.float32),
        )
        choices = self._choose(size, buffers, logits, noise.at(sized.row, buffers["depth"]))
        kept = walk(choices, buffers, size)
        record = Record.of(size, sized.record)
        record.choices[:] = torch.where(kept.flatten(), choices, NOTHING)
        page = buffers["table"][sized.row, position // cache.page_size].long()
        slot = page * cache.page_size + position % cache.page_size
        # What is not kept is copied onto itself.
        scratch = cache.scratch_begin + torch.arange(total, device=self._device)
        cache.move(scratch, torch.where(kept.flatten(), slot, scratch))
        if self.drafting is not None and self.features is not None and size.levels:
            decided = Decided(buffers, geometry, noise, choices, kept, position, slot)
            grown, candidates = self.drafting.work(size, decided, self.features[:total])
            record.grown.copy_(grown)
            if candidates is not None:
                record.candidates.copy_(candidates)
        if size.reports:
            record.reported.copy_(reported(logits, choices, size.reports).flatten())
        if size.shaping and self.shaped is not None:
            self.shaped.add(buffers, choices, kept)
        if self.future is not None:
            self.future.leave(size, buffers, choices, kept, record)

    def _choose(
        self, size: Size, buffers: dict[str, Tensor], logits: Tensor, noise: NodeNoise
    ) -> Tensor:
        if self.shaped is None or not (size.shaping or size.masked):
            return self._kernels.choose(logits, noise)
        return self.shaped.choose(size, buffers, logits, noise, self._kernels.choose)


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
    kept: Tensor = ~(above & ~right[:, None]).any(-1)
    return kept
