"""JaxExecutor: the Executor interface on XLA; programs are compiled at start-up and then only
run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.draft_shape import DraftShape
from forerun.errors import EngineError
from forerun.executors.host_sampler import HostSampler
from forerun.executors.jax.drafts.block import BlockNetwork
from forerun.executors.jax.drafts.draft_network import DraftNetwork
from forerun.executors.jax.drafts.draft_passes import FEW
from forerun.executors.jax.memory import check_fits, planned_bytes
from forerun.executors.jax.network.decoder import JaxDecoder
from forerun.executors.jax.network.kv import (
    DraftArrays,
    StateShape,
    first_without_page,
    page_tables,
)
from forerun.executors.jax.network.sharding import make_sharding
from forerun.executors.jax.network.weights import Params, Pattern, load_params
from forerun.executors.jax.options import JaxOptions
from forerun.executors.jax.program.features import JaxFeatures
from forerun.executors.jax.program.functions import Functions, Key
from forerun.executors.jax.program.programs import JaxPrograms, keep_compiled
from forerun.executors.jax.program.states import JaxStates
from forerun.executors.jax.program.step import (
    Answers,
    Drafted,
    JaxRound,
    asked_rows,
    certain,
    complete,
    edits_by_row,
    left_to_move,
    receive,
)
from forerun.executors.jax.rounds.batches import Batch, Buckets, batches
from forerun.executors.jax.rounds.inputs import Rows, packed, packed_carried, padded_masks
from forerun.executors.jax.rounds.shaping import EditsByRow, packed_shaping, room_for_edits
from forerun.executors.window_pages import WindowPages
from forerun.interface.executor import (
    Capabilities,
    Executor,
    ExecutorLimits,
)
from forerun.interface.hidden import hidden_nodes
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.machine import cores
from forerun.speculative.accept import NOTHING
from forerun.speculative.tree import NodeMasks, TreeBatch, full_size
from forerun.types import Bools, Floats, Ints

TIMED_NODES = 7
"""The least draft tokens of a row when costs are measured (forerun.build.calibration); steps of
more rows are compiled later, and measured steps correct their expected cost.
"""


class JaxExecutor(Executor):
    """A target in JAX, on any device that XLA supports.

    A row's tokens are independent of the other rows except for rounding: products of other shapes
    may differ in the last bits. In float32 tokens equal the other executors' except for near ties.

    Raises ConfigError for an unknown dtype, limits that are not the model's, or shards that the
    model or the machine does not have; MemoryPlanError if weights, cache and the largest round do
    not fit. All before anything is allocated.

    tables   shape [K,W] of a row's page tables in programs (inputs.py): pages of the longest
             sequence
    windows  the window pages of sliding-window layers; None: they keep every page
    """

    name = "jax"
    windows: WindowPages | None = None

    def __init__(
        self,
        checkpoint: Checkpoint,
        limits: ExecutorLimits,
        options: JaxOptions | None = None,
    ) -> None:
        options = options or JaxOptions()
        arch = checkpoint.architecture
        self.limits, self._options = limits, options
        self.capabilities = Capabilities(
            overlap=options.overlap,
            padded=True,
            unwritten=arch.recurrent is None and not limits.window_pages,
            timed=TIMED_NODES + 1,
            drafts=True,
        )
        limits.check(arch)
        sharding = make_sharding(arch, options.shards, options.platform)
        self._device = sharding.mesh.devices.flat[0]
        on_cpu = self._device.platform == "cpu"
        self._buckets = Buckets.of(limits, options.draft_nodes)
        self._shape = StateShape.of(limits, self._buckets.most, self._buckets.chunks[-1])
        dtype = options.as_dtype()
        self._bytes = planned_bytes(arch, self._shape, self._buckets, dtype.itemsize)
        check_fits(self._bytes, self._device, options.shards)
        if options.cache_dir is not None:
            keep_compiled(options.cache_dir)
        self._stack = options.stacked if options.stacked is not None else not on_cpu
        self._stacked = self._stack and Pattern.of(arch).times > 1
        params = load_params(checkpoint, dtype, sharding, self._stacked)
        windowed = limits.window_pages > 0
        self.tables = 1 + windowed, -(-limits.context // limits.page_size)
        self.decoder, self.dtype = JaxDecoder(arch, sharding, windowed), dtype
        self._edits = room_for_edits(limits.slots, limits.context, limits.vocab)
        functions = Functions(self.decoder, self._shape, limits.page_size, self.tables, self._edits)
        self._programs: JaxPrograms | None = JaxPrograms(
            functions, params, limits, self._buckets, options.cache_dir
        )
        self._sampler = HostSampler(limits.slots, limits.vocab)
        self._states = None if arch.recurrent is None else JaxStates(limits)
        self._steps = 0
        self._network: DraftNetwork | BlockNetwork | None = None
        self._grown = DraftShape()
        self._last: JaxRound | None = None
        if options.overlap:
            self._programs.keep_state(*self._within)

    def warm_up(self, draft: DraftShape, progress: Callable[[str, int, int], None]) -> None:
        """Compile the programs that any step with such drafts runs; sets `buckets`. See
        Executor.
        """
        nodes = min(max(draft.nodes, TIMED_NODES) if draft.nodes else 0, self._options.draft_nodes)
        draft = self._within_rounds(draft)
        self._buckets, self._grown = Buckets.of(self.limits, nodes), draft
        if self._options.overlap:
            self.programs.keep_state(*self._within)
        report = partial(progress, "compiling step sizes, kept for the next start")
        self.programs.warm_up(self._buckets, draft, cores(), report)

    def warm_up_rest(self) -> None:
        """Compile, in a thread, the programs that only some steps run; see Executor."""
        self.programs.compile_rest()

    # --- with a draft network ----------------------------------------------------------------

    @property
    def buckets(self) -> Buckets:
        """Padded sizes of steps that programs are compiled for; `warm_up` replaces them."""
        return self._buckets

    def page_tables(self, pages: Ints) -> Ints:
        """Return int32[R,K,W], the page tables in programs for rows with the engine's pages
        int32[R,W].
        """
        return page_tables(pages, self.tables[1])

    @property
    def level_nodes(self) -> int:
        """Draft tokens of one row that a pass of `expand` runs."""
        return self._grown.width or FEW

    @property
    def stacked(self) -> bool:
        """Whether layers that are alike run in a scan, here and in draft models."""
        return self._stack

    def attach(
        self, network: DraftNetwork | BlockNetwork, load: Callable[[], Params]
    ) -> dict[str, int]:
        """Attach a draft network: `load` its weights, allocate its arrays, drop compiled programs.
        From the next step on the target's features are stored for it, and rounds draft with it,
        level by level. Returns draft_weight_bytes and draft_cache_bytes, of all devices together.
        Raises MemoryPlanError, before it loads anything, if these do not fit.
        """
        sizes, sharding = network.sizes, self.decoder.sharding
        shape, item = self._shape.drafting(sizes, self.limits), self.dtype.itemsize
        arrays = item * sum(int(np.prod(part)) for part in shape)
        taken = {"draft_weight": sizes.parameters * item, "draft_cache": arrays}
        check_fits(taken, self._device, self._options.shards)
        weights = load()
        cache = sharding.cache if sizes.cut else sharding.replicated
        where = sharding.replicated, cache, cache, sharding.replicated, sharding.replicated
        held = DraftArrays(*(
            jnp.zeros(part, self.dtype, device=there)
            for part, there in zip(shape, where, strict=True)
        ))  # fmt: skip
        self._network = network
        self.programs.attach(network, weights, held)
        return {f"{part}_bytes": count for part, count in taken.items()}

    def _within_rounds(self, draft: DraftShape) -> DraftShape:
        """Return the shape without width and depth if rounds cannot build such trees."""
        block = 0 if self._network is None else self._network.sizes.block
        if self._network is None or not draft.full(block > 0):
            return DraftShape(draft.nodes)
        return draft._replace(depth=min(draft.depth, block or draft.depth))

    def _drafting(self, plan: Plan, decided: Bools) -> Drafted | None:
        """Return the drafts of this step: for rows that a round decides from one known token.
        Builds trees of the size compiled at start-up if the width matches; if fewer levels are
        requested, trees are cut to those.
        """
        network, request = self._network, plan.on_device_draft
        if request is None or network is None:
            return None
        if request.width > network.sizes.vocab:
            return None
        single = np.array([len(known) == 1 for known in plan.known], np.bool_)
        rows = decided & single & np.isin(plan.slots, request.slots)
        shape = self._grown
        known = shape.width == request.width and shape.depth >= request.levels
        width, levels = (shape.width, shape.depth) if known else (request.width, request.levels)
        if not rows.any():
            return None
        if request.chances is not None:
            self.programs.calibrate(request.chances)
        return Drafted.of(rows, width, levels, network.sizes)

    # --- steps ---------------------------------------------------------------------------------

    @property
    def programs(self) -> JaxPrograms:
        """The compiled programs. Raises EngineError after `shutdown`."""
        if self._programs is None:
            raise EngineError("the executor was shut down")
        return self._programs

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot. Raises EngineError if the slot is open, a token is out of
        range, or with recurrent layers there is no state of its cached tokens.
        """
        if self._states is not None:
            self._states.open(slot_init, self.programs)
        self._sampler.open(slot_init)

    def reusable_prefix_len(
        self, tokens: Ints, salt: bytes = b"", pages: Ints | None = None
    ) -> int:
        """Return the number of the cached tokens int32[n] after which a sequence can continue: all,
        or with recurrent layers those up to the last checkpoint of a text of this salt.
        """
        states = self._states
        return len(tokens) if states is None else states.book.reusable_prefix_len(tokens, salt)

    def copy_page(self, source: int, target: int) -> bool:
        """Copy a page of target and draft; returns False if layers are recurrent or have window
        pages.
        """
        if self._states is not None or self.windows is not None:
            return False
        size = self.limits.page_size
        places = np.arange(size, dtype=np.int32)[None]
        begin, end = source * size + places, target * size + places
        self.programs.move(Key("move"), begin, end, self._shape.slots)
        return True

    def close(self, slot: int) -> None:
        """Discard the slot's sequence, if it has one."""
        self._sampler.close(slot)
        if self._states is not None:
            self._states.close(slot)

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> JaxRound:
        """Dispatch the step without waiting. Rounds with a row under a grammar are dispatched by
        `finish`, which has its masks. Raises EngineError if the plan is too large or a position has
        no page.
        """
        count = len(trees.tokens)
        if count > self.limits.max_nodes:
            raise EngineError(f"a step of {count} nodes; at most {self.limits.max_nodes} fit")
        self._check_pages(plan, trees)
        edits = edits_by_row(plan, self._sampler, self._edits)
        decided = self._sampler.choosing.on_device[plan.slots] & plan.samples
        decided &= ~plan.constrained
        decided[list(edits)] = True
        drafted = self._drafting(plan, decided)
        rows = asked_rows(plan, decided, drafted)
        rows.temperature[:] = self._temperatures(plan.slots, edits)
        weights = {row: len(each) for row, (_, each) in edits.items()}
        cuts, reserved = self._began(plan, trees, rows)
        buckets = self.programs.ready(self._buckets)
        cut = batches(plan, trees, buckets, self._shape, self._edits, weights, cuts)
        place = np.full(count, -1, np.int32)
        for batch in cut:
            for nodes, places in zip(batch.nodes, batch.places(), strict=False):
                place[nodes] = places[: len(nodes)]
        alone = len(cut) == 1 and bool(decided.all() and (trees.known == 1).all())
        can_overlap = self._options.overlap and alone and certain(plan, self._sampler)
        round = JaxRound(
            plan, trees, can_overlap=can_overlap,
            batches=cut, place=place, rows=rows, tables=self.page_tables(plan.page_table),
            edits=edits, drafted=drafted, reserved=reserved,
        )  # fmt: skip
        late = bool((plan.constrained & plan.samples).any())
        self._dispatch(round, [batch for batch in cut if batch.chunk or not late])
        return self._begun(round)

    def begin_after(self, running: Round, plan: Plan, ends: Ints) -> JaxRound | None:
        """Begin a step on the results of the running one; None if no single round can."""
        width, levels = self._within
        depth = np.minimum(plan.max_depth, levels).tolist()
        bounds = zip(plan.max_nodes.tolist(), depth, strict=True)
        most = np.array([min(nodes, full_size(width, deep)) for nodes, deep in bounds], np.int32)
        size = self.programs.ready(self._buckets).round(plan.rows, 1 + int(most.max()))
        edits = edits_by_row(plan, self._sampler, self._edits)
        if size is None or sum(len(each) for _, each in edits.values()) > self._edits:
            return None
        reach = np.minimum(plan.kv_len + 1 + plan.max_depth, np.maximum(ends, plan.kv_len + 1))
        self._check_reach(plan, reach)
        every = np.ones(plan.rows, np.bool_)
        drafted = self._drafting(plan, every)
        rows = asked_rows(plan, every, drafted)
        rows.temperature[:] = self._temperatures(plan.slots, edits)
        reserved = self._reserved(plan, rows, plan.kv_len + size.nodes)
        batch = Batch(size, False, tuple(range(plan.rows)), (), (0,))
        round = JaxRound(
            plan, previous=running, can_overlap=True,
            batches=[batch], place=plan.slots[:0], rows=rows,
            tables=self.page_tables(plan.page_table),
            edits=edits, drafted=drafted, reserved=reserved,
        )  # fmt: skip
        choosing = self._sampler.choosing
        inputs = packed_carried(batch, plan, ends, most, choosing, rows, round.tables)
        self._round(round, batch, inputs)
        return self._begun(round)

    def _begun(self, round: JaxRound) -> JaxRound:
        if round.drafted is not None:
            round.drafting = round.plan.slots[round.drafted.rows]
        self._steps += 1
        self._last = round
        return round

    def _temperatures(self, slots: Ints, edits: EditsByRow) -> Floats:
        """Return float32[B], the temperatures with which programs choose."""
        choosing = self._sampler.choosing
        found: Floats = np.where(choosing.on_device[slots], choosing.temperature[slots], 0)
        for row, (sampling, _) in edits.items():
            found[row] = sampling.temperature
        return found

    @property
    def _within(self) -> tuple[int, int]:
        """Width and levels of the trees that rounds build; 0 if they build none."""
        return self._grown.width, self._grown.depth

    def _dispatch(self, round: JaxRound, cut: list[Batch], masks: NodeMasks | None = None) -> None:
        """Dispatch some of a step's batches, in order."""
        choosing = self._sampler.choosing
        for batch in cut:
            inputs = packed(batch, round.plan, round.trees, choosing, round.rows, round.tables)
            if batch.chunk:
                self.programs.run(Key("chunk", batch.size), inputs)
                round.records.append(None)
                if self._states is not None:
                    self._states.passed(round.plan, round.trees, batch, self.programs)
            else:
                self._round(round, batch, inputs, masks)

    def _round(
        self, round: JaxRound, batch: Batch, inputs: Ints, masks: NodeMasks | None = None
    ) -> None:
        """Dispatch a round."""
        size, shape = batch.size, self._within
        if round.drafted is not None:
            shape = round.drafted.width, round.drafted.levels
        if round.edits.keys().isdisjoint(batch.rows):
            record = self.programs.run(Key("round", size, *shape), inputs)
        else:
            allowed = self.programs.everything(size)
            if masks is not None:
                allowed = padded_masks(batch, masks, -(-self.limits.vocab // 32))
            shaping = packed_shaping(batch, round.edits, self._edits, self.limits.vocab)
            record = self.programs.run(Key("shaped", size, *shape), inputs, allowed, shaping)
        round.records.append(record)

    def _check_pages(self, plan: Plan, trees: TreeBatch) -> None:
        deepest = np.maximum.reduceat(trees.depth, trees.start[:-1])
        self._check_reach(plan, plan.kv_len + deepest + 1)

    def _check_reach(self, plan: Plan, reach: Ints) -> None:
        row = first_without_page(plan, reach, self.limits.page_size)
        if row is not None:
            raise EngineError(f"row {row}: a position has no page: the page table is too short")

    def _began(
        self, plan: Plan, trees: TreeBatch, rows: Rows
    ) -> tuple[dict[int, list[int]], dict[int, int]]:
        """Advance recurrent states to the plan's lengths, and reserve rows of states. Returns by
        row where chunks end, and by slot the reserved rows.
        """
        if self._states is None:
            return {}, {}
        for late in self._states.missing(plan):
            nothing = asked_rows(late.plan, np.zeros(1, np.bool_))
            tables = self.page_tables(late.plan.page_table)
            for batch in batches(late.plan, late.trees, self._buckets, self._shape):
                choosing = self._sampler.choosing
                inputs = packed(batch, late.plan, late.trees, choosing, nothing, tables)
                self.programs.run(Key("chunk", batch.size), inputs)
        cuts = self._states.claims(plan, trees)
        return cuts, self._reserved(plan, rows, plan.kv_len + np.diff(trees.start))

    def _reserved(self, plan: Plan, rows: Rows, reach: Ints) -> dict[int, int]:
        """Reserve rows of states for a round that ends after at most `reach` tokens, and have it
        copy its states there.
        """
        if self._states is None:
            return {}
        reserved = self._states.reserve(plan, np.where(plan.samples, reach, 0))
        rows.copies[:] = [reserved.get(slot, -1) for slot in plan.slots.tolist()]
        return reserved

    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Finish as `_finished`; with recurrent layers, a step that fails invalidates the
        states.
        """
        assert isinstance(round, JaxRound)
        try:
            return self._finished(round, masks)
        except BaseException:
            if self._states is not None:
                self._states.failed(round.plan, round.reserved)
            raise

    def _finished(self, round: JaxRound, masks: NodeMasks | None) -> Outcome:
        """Wait for the step, decide the rows that programs left open, and return its Outcome.
        Logits are copied to the host if rounding leaves a choice open or many log-probabilities are
        requested. Keys and values that the host accepted are moved from scratch to pages.
        """
        if round.previous is not None:
            complete(round)
        self._dispatch(round, round.batches[len(round.records) :], masks)
        plan, trees, features, drafts = round.plan, round.trees, None, None
        choice = np.full(len(trees.tokens), NOTHING, np.int32)
        for batch, record in zip(round.batches, round.records, strict=True):
            if record is not None:
                receive(record, batch, choice, round, self.limits.vocab)
        path_lengths = np.add.reduceat(choice >= 0, trees.start[:-1])
        shaped = np.isin(np.arange(plan.rows), list(round.edits))
        round.rows.decided[shaped & (choice[trees.roots] < 0)] = False
        logits = Answers(self.programs, round, self.limits.vocab, round is self._last)
        if self._network is not None and self._network.sizes.width:
            features = JaxFeatures.of(self.programs, round, self._shape.hidden, choice >= 0)
        if plan.hidden is not None:
            round.hidden = self.programs.hidden(round.place[hidden_nodes(plan, trees)])
        if round.drafted is not None:
            drafts = round.drafted.joined(round.rows.decided)
        outcome = self._sampler.finish(
            round, logits.of_node, masks, choice, logits.reports, features, drafts
        )
        scratch = np.array(self._shape.paged)[:, None]
        source, target = left_to_move(round, outcome, scratch, self.limits.page_size)
        self.programs.move(Key("move"), source, target, scratch)
        if self._states is not None:
            self._states.settle(plan, outcome, path_lengths, round.reserved)
        return outcome

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: device, dtype, counts of programs and steps, bytes."""
        programs = self._programs
        return {
            "device": str(self._device),
            "devices": self._options.shards,
            "dtype": self._options.dtype,
            "layers": "stacked" if self._stacked else "apart",
            "batch_invariant": False,
            "compiled": len(programs.compiled) if programs else 0,
            "to_compile": programs.left if programs else 0,
            "compile_seconds": round(programs.compile_seconds, 2) if programs else 0.0,
            "compiled_late": programs.late if programs else 0,
            "dispatches": programs.dispatches if programs else 0,
            "steps": self._steps,
            **{f"{part}_bytes": count for part, count in self._bytes.items()},
        }

    def shutdown(self) -> None:
        """Drop programs and device arrays. Idempotent."""
        if self._programs is not None:
            self._programs.close()
        self._programs = None
