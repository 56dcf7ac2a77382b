"""JaxExecutor: the executor contract on XLA; programs are compiled at start-up, then only run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from forerun.errors import ConfigError, EngineError
from forerun.executors.host_sampler import HostAccepted, HostSampler
from forerun.executors.jax.attention_choice import attention_of
from forerun.executors.jax.batches import Buckets, Size, batches, regrouped
from forerun.executors.jax.block import BlockNetwork
from forerun.executors.jax.decoder import Decoder
from forerun.executors.jax.draft_network import DraftNetwork
from forerun.executors.jax.draft_passes import FEW
from forerun.executors.jax.drafted import Drafted, joined
from forerun.executors.jax.drafting import NOWHERE
from forerun.executors.jax.features import JaxFeatures
from forerun.executors.jax.functions import Functions, Key
from forerun.executors.jax.inputs import packed, padded_masks
from forerun.executors.jax.kv import DraftArrays, DraftSizes, StateShape, first_without_page
from forerun.executors.jax.memory import check_fits, planned_bytes
from forerun.executors.jax.programs import MOVED, Programs, keep_compiled
from forerun.executors.jax.shaping import Asked, edits_of, packed_shaping
from forerun.executors.jax.sharding import make_sharding
from forerun.executors.jax.step import Scores, asked_rows, key_of, receive
from forerun.executors.jax.weights import Params, can_stack, load_params
from forerun.interface.executor import DraftShape, ExecutorLimits
from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import Outcome, Plan, SlotInit
from forerun.machine import cores
from forerun.models.arch import Architecture
from forerun.models.checkpoint import Checkpoint
from forerun.speculative.accept import NOTHING
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import AnyArray, Bools, Floats, Ints

TIMED_NODES = 7
"""Draft tokens of a row in the measurement of costs (forerun.control.calibration), at least."""

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True, slots=True)
class JaxOptions:
    """How a JaxExecutor runs.

    dtype        of matrices, activations, keys and values
    shards       devices that share every layer (tensor parallel)
    draft_nodes  draft tokens of a row, at most
    stacked      layers in a scan; None = where the device is no CPU (weights.py)
    platform     cpu or tpu: which of jax's devices; None = its own choice
    cache_dir    where compiled programs are kept from start to start; None = nowhere
    attention    one of attention_choice.BACKENDS
    """

    dtype: str = "float32"
    shards: int = 1
    draft_nodes: int = 63
    stacked: bool | None = None
    platform: str | None = None
    cache_dir: str | None = None
    attention: str = "auto"


class JaxExecutor:
    """A target in JAX, on any device that XLA compiles for.

    A row's tokens do not depend on the other rows as far as rounding allows: products of other
    shapes may differ in the last bits. Tokens equal the other executors' in float32 but for near
    ties.

    Raises ConfigError for an unknown dtype, limits that are not the model's, or shards that the
    model or the machine does not have; MemoryPlanError where weights, cache and the largest round
    do not fit. All before anything is allocated.
    """

    name = "jax"

    def __init__(
        self,
        checkpoint: Checkpoint,
        limits: ExecutorLimits,
        options: JaxOptions | None = None,
    ) -> None:
        options = options or JaxOptions()
        arch = checkpoint.architecture
        self.limits, self._options = limits, options
        _check(arch, limits, options)
        sharding = make_sharding(arch, options.shards, options.platform)
        attention = attention_of(options.attention, sharding)
        self._device = sharding.mesh.devices.flat[0]
        on_cpu = self._device.platform == "cpu"
        self._buckets = Buckets.of(limits, options.draft_nodes)
        self._shape = StateShape.of(limits, self._buckets.most, self._buckets.chunks[-1])
        dtype = jnp.dtype(DTYPES[options.dtype])
        self._bytes = planned_bytes(arch, self._shape, self._buckets, dtype.itemsize)
        check_fits(self._bytes, self._device, options.shards)
        if options.cache_dir is not None:
            keep_compiled(options.cache_dir)
        self._stack = options.stacked if options.stacked is not None else not on_cpu
        self._stacked = self._stack and can_stack(arch)
        params = load_params(checkpoint, dtype, sharding, self._stacked)
        self._width = -(-limits.context // limits.page_size)
        self.decoder, self.dtype = Decoder(arch, sharding), dtype
        functions = Functions(self.decoder, self._shape, limits.page_size, self._width, attention)
        self._programs: Programs | None = Programs(functions, params, limits, self._buckets)
        self._sampler = HostSampler(limits.slots, limits.vocab)
        self._steps = 0
        self._network: DraftNetwork | BlockNetwork | None = None
        self._grown = DraftShape()

    def warm_up(self, draft: DraftShape, progress: Callable[[int, int], None]) -> None:
        """Compile every program that steps with such drafts can need."""
        nodes = min(max(draft.nodes, TIMED_NODES) if draft.nodes else 0, self._options.draft_nodes)
        self._buckets, self._grown = Buckets.of(self.limits, nodes), draft
        self.programs.warm_up(self._buckets, draft, cores(), progress)

    # --- beside a draft network --------------------------------------------------------------

    @property
    def buckets(self) -> Buckets:
        """Sizes that programs are compiled for."""
        return self._buckets

    @property
    def width(self) -> int:
        """Places of a page table's row."""
        return self._width

    @property
    def place(self) -> tuple[Any, int]:
        """A device, and how many like it there are."""
        return self._device, self._options.shards

    @property
    def level_nodes(self) -> int:
        """Draft tokens of a row that one pass of the host runs."""
        return self._grown.width or FEW

    @property
    def stacked(self) -> bool:
        """Whether layers run in a scan, where they are alike."""
        return self._stack

    def draft_bytes(self, sizes: DraftSizes) -> dict[str, int]:
        """Bytes that `attach` takes, by purpose."""
        shape = self._shape.drafting(sizes, self.limits, self._buckets.chunks[-1])
        size = self.dtype.itemsize
        arrays = size * sum(int(np.prod(part)) for part in shape)
        return {"draft_weight": sizes.parameters * size, "draft_cache": arrays}

    def attach(self, network: DraftNetwork | BlockNetwork, weights: Params) -> None:
        """Keep what a network reads from the next step on, and let rounds follow and draft."""
        sizes, sharding = network.sizes, self.decoder.sharding
        shape = self._shape.drafting(sizes, self.limits, self._buckets.chunks[-1])
        cache = sharding.cache if sizes.cut else sharding.whole
        where = sharding.whole, cache, cache, sharding.whole, sharding.whole
        held = DraftArrays(*(
            jnp.zeros(part, self.dtype, device=there)
            for part, there in zip(shape, where, strict=True)
        ))  # fmt: skip
        self._network = network
        self.programs.attach(network, weights, held)

    def load(self, values: AnyArray) -> Ints:
        """int32[n] rows of the streams that hold features [n,F*H] from the host, from now until
        the next such call.
        """
        begin, most = self._shape.hidden, self._buckets.chunks[-1]
        for first in range(0, len(values), most):
            part = values[first : first + most]
            rows = np.full(most, NOWHERE, np.int32)
            rows[: len(part)] = begin + first + np.arange(len(part))
            streams = np.zeros((most, values.shape[1]), np.float32)
            streams[: len(part)] = part
            self.programs.run(Key("load", Size(1, most)), (rows, streams))
        found: Ints = (begin + np.arange(len(values))).astype(np.int32)
        return found

    def _drafting(self, plan: Plan, decided: Bools, request: DraftRequest | None) -> Drafted | None:
        """What this step drafts: rows that a round decides and follows from their only known token.

        Where trees of a shape were foreseen at start-up, these are grown: who wants less cuts.
        """
        network = self._network
        if request is None or network is None or network.sizes.block:
            return None
        if request.width > network.sizes.vocab:
            return None
        single = np.array([len(known) == 1 for known in plan.known], np.bool_)
        rows = decided & single & np.isin(plan.slots, request.slots)
        shape, known = self._grown, self._grown.levels >= request.levels
        width, levels = (shape.width, shape.levels) if known else (request.width, request.levels)
        return Drafted.of(rows, width, levels) if rows.any() else None

    # --- steps ---------------------------------------------------------------------------------

    def padded_nodes(self, rows: int, nodes: int) -> int:
        """Nodes that the round runs whose size holds so many rows of so many nodes."""
        return self._buckets.padded(rows, nodes)

    @property
    def programs(self) -> Programs:
        """The compiled programs. Raises EngineError after `shutdown`."""
        if self._programs is None:
            raise EngineError("the executor was shut down")
        return self._programs

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot."""
        self._sampler.open(slot_init)

    def close(self, slot: int) -> None:
        """Forget a slot's sequence."""
        self._sampler.close(slot)

    def verify(
        self, plan: Plan, trees: TreeBatch, draft_request: DraftRequest | None = None
    ) -> Scores:
        """Begin the step; waits for nothing. Rows whose choice hangs on the temperature alone are
        decided and committed by the same program, which also drafts for them what is requested.

        Raises EngineError, and has begun nothing, where the plan is too large or a position has no
        page.
        """
        programs = self.programs
        count = len(trees.tokens)
        if count > self.limits.max_nodes:
            raise EngineError(f"a step of {count} nodes; at most {self.limits.max_nodes} fit")
        self._check_pages(plan, trees)
        choosing = self._sampler.choosing
        decided = (choosing.temperature[plan.slots] >= 0) & plan.samples & ~plan.constrained
        drafted = self._drafting(plan, decided, draft_request)
        rows = asked_rows(plan, decided, drafted)
        rows.temperature[:] = np.maximum(choosing.temperature[plan.slots], 0)
        cut = batches(plan, trees, self._buckets, self._shape)
        place = np.full(count, -1, np.int32)
        records = []
        for batch in cut:
            whole = packed(batch, plan, trees, choosing, rows, self._width)
            record = programs.run(key_of(batch, drafted), whole)
            records.append(None if batch.chunk else record)
            for nodes, places in zip(batch.nodes, batch.places(), strict=False):
                place[nodes] = places[: len(nodes)]
        self._steps += 1
        started = [drafted] if drafted is not None else []
        return Scores(cut, records, place, decided, draft_request, started)

    def _check_pages(self, plan: Plan, trees: TreeBatch) -> None:
        deepest = np.maximum.reduceat(trees.depth, trees.start[:-1])
        row = first_without_page(plan, plan.kv_len + deepest + 1, self.limits.page_size)
        if row is not None:
            raise EngineError(f"row {row}: a position has no page: the page table is too short")

    def accept(
        self, plan: Plan, trees: TreeBatch, scores: Scores, masks: NodeMasks | None
    ) -> HostAccepted:
        """Keep one path per tree; waits for the step. Rows under a grammar, or shaped by more than
        a temperature, are decided by a second program; logits cross to the host for reports, and
        where rounding leaves a choice open.
        """
        choice = np.full(len(trees.tokens), NOTHING, np.int32)
        for batch, record in zip(scores.batches, scores.records, strict=True):
            if record is not None:
                receive(record, batch, choice, *scores.drafted)
        self._decide(plan, trees, scores, masks, choice)
        return self._sampler.accept(plan, trees, self._logits(scores), masks, choice)

    def _decide(
        self,
        plan: Plan,
        trees: TreeBatch,
        scores: Scores,
        masks: NodeMasks | None,
        choice: Ints,
    ) -> None:
        """Decide and commit the rows that rounds could not; draft for them what is requested."""
        asked = self._asked_of(plan, scores)
        if not asked:
            return
        held = np.isin(np.arange(plan.rows), list(asked))
        edits = max(len(listed) for _, listed in asked.values())
        edits = next(size for size in self.programs.edits if size >= edits)
        drafted = self._drafting(plan, held, scores.request)
        rows = asked_rows(plan, held, drafted)
        for row, (sampling, _) in asked.items():
            rows.temperature[row] = sampling.temperature
        words, vocab = -(-self.limits.vocab // 32), self.limits.vocab
        for batch in regrouped(scores.batches, held, self._buckets.widest):
            key = key_of(batch, drafted)._replace(kind="decide", edits=edits)
            record = self.programs.run(
                key,
                packed(batch, plan, trees, self._sampler.choosing, rows, self._width),
                padded_masks(batch, masks, words),
                packed_shaping(batch, asked, edits, vocab),
            )
            receive(record, batch, choice, drafted)
        made = held & (choice[trees.roots] >= 0)
        scores.decided[:] |= made
        if drafted is not None:
            scores.drafted.append(drafted.only(made))

    def _asked_of(self, plan: Plan, scores: Scores) -> Asked:
        """By row: the parameters of those that no round decides, but for what is too long, and what
        accept thresholds let pass: the host decides that.
        """
        found: Asked = {}
        for row in np.flatnonzero(plan.samples & ~scores.decided).tolist():
            slot = self._sampler.of_row(plan, row)
            edits = edits_of(slot.sampling, slot.history)
            if len(edits) <= self.programs.edits[-1] and not slot.sampling.lossy:
                found[row] = slot.sampling, edits
        return found

    def _logits(self, scores: Scores) -> Callable[[int], Floats]:
        """Logits of flat nodes, a few more at each transfer than were asked for."""
        found: dict[int, Floats] = {}

        def of_node(node: int) -> Floats:
            if scores.place[node] < 0:
                return np.full(self.limits.vocab, np.nan, np.float32)
            if node not in found:
                last = min(node + 8, len(scores.place))
                nodes = [other for other in range(node, last) if other not in found]
                rows = self.programs.logits(scores.place[nodes])
                found.update(zip(nodes, rows, strict=True))
            return found[node]

        return of_node

    def commit(
        self, plan: Plan, trees: TreeBatch, scores: Scores, accepted: HostAccepted
    ) -> Outcome:
        """Move what the host accepted from scratch into pages."""
        source, target = [], []
        for row in np.flatnonzero(plan.samples & ~scores.decided).tolist():
            path = accepted.paths[row]
            path = path[path >= trees.root(row)]
            positions = plan.kv_len[row] + trees.depth[path]
            size = self.limits.page_size
            source.append(self._shape.slots + scores.place[path])
            target.append(plan.page_table[row, positions // size] * size + positions % size)
        if source:
            self._move(np.concatenate(source), np.concatenate(target))
        features, drafts = None, None
        if self._network is not None and self._network.sizes.width:
            features = JaxFeatures(self.programs, scores.place)
        if scores.drafted:
            drafts = joined(scores.drafted)
        return self._sampler.outcome(plan, trees, accepted, features, drafts)

    def _move(self, source: Ints, target: Ints) -> None:
        for begin in range(0, len(source), MOVED):
            moves = np.full((2, MOVED), self._shape.slots, np.int32)
            part = slice(begin, begin + MOVED)
            count = len(source[part])
            moves[0, :count], moves[1, :count] = source[part], target[part]
            self.programs.run(Key("move"), moves)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        programs = self._programs
        return {
            "device": str(self._device),
            "devices": self._options.shards,
            "dtype": self._options.dtype,
            "layers": "stacked" if self._stacked else "apart",
            "attention": "pallas" if self._options.attention == "pallas" else "jnp",
            "batch_invariant": False,
            "compiled": len(programs.compiled) if programs else 0,
            "compile_seconds": round(programs.compile_seconds, 2) if programs else 0.0,
            "compiled_late": programs.late if programs else 0,
            "dispatches": programs.dispatches if programs else 0,
            "steps": self._steps,
            **{f"{part}_bytes": count for part, count in self._bytes.items()},
        }

    def shutdown(self) -> None:
        """Release memory. Idempotent."""
        self._programs = None


def _check(arch: Architecture, limits: ExecutorLimits, options: JaxOptions) -> None:
    if options.dtype not in DTYPES:
        raise ConfigError(f"dtype is {options.dtype!r}; it must be one of {', '.join(DTYPES)}")
    if limits.vocab != arch.vocab:
        raise ConfigError(f"the limits' vocabulary is {limits.vocab}, the model's {arch.vocab}")
    if limits.context > arch.context:
        raise ConfigError(f"context is {limits.context}, the model was made for {arch.context}")
