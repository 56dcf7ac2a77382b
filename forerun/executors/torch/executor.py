"""TorchExecutor: the executor contract in plain torch, the reference for faster ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ConfigError, EngineError, MemoryPlanError
from forerun.executors.host_sampler import HostAccepted, HostSampler, PlainNodes
from forerun.executors.torch.accept import choices
from forerun.executors.torch.attention import attend, key_blocks
from forerun.executors.torch.captured.drafting import Drafting
from forerun.executors.torch.captured.graphs import recorder
from forerun.executors.torch.captured.in_flight import InFlightStep
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.decoder import Decoder
from forerun.executors.torch.features import TorchFeatures
from forerun.executors.torch.geometry import geometry_of
from forerun.executors.torch.kernels import kernels_for
from forerun.executors.torch.kv import KvShape, PagedCache
from forerun.executors.torch.layers import (
    FLOAT8,
    PLAIN,
    Float8Linear,
    Linear,
    compiled,
    padded_rows,
)
from forerun.interface.executor import DraftShape, ExecutorLimits
from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import CarriedPlan, Outcome, Plan, SlotInit
from forerun.machine import memory_available
from forerun.models.arch import Architecture
from forerun.models.checkpoint import Checkpoint
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.speculative.verify import positions
from forerun.types import Floats, Ints

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.bfloat16,
}
"""Names and what activations are kept in; float8 concerns the blocks' products alone."""

KV_DTYPES = {"same": None, "float8": FLOAT8}
"""Names and what pages are kept in; None: as activations."""

_NOBODY: Ints = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Scores:
    """What one forward pass found.

    logits  float32[n,V] of the n scored nodes, on the device
    row_of  int32[M] a flat node's row in `logits`; -1 = not scored
    plain   the nodes whose choice the device makes
    round   the captured round that does it all, perhaps still running; None after an eager step.
            Of one that carries on from another, row_of and plain are empty
    features  of the nodes, where they were requested; of a round see InFlightStep
    """

    logits: Tensor
    row_of: Ints
    plain: PlainNodes | None
    round: InFlightStep | None = None
    features: TorchFeatures | None = None


class TorchExecutor:
    """A target in torch, on any device it knows.

    In float32 on the CPU a row's bits are the same alone, in any batch, under any tree, in any
    chunks and pages, for a fixed number of torch threads. Elsewhere products run at any number
    of rows and their last bits may depend on the batch; `describe()` says which it is.

    kernels  ours, where the device has any

    graphs   capture whole rounds where the device can (rounds.py)
    compile  let torch.compile write the kernels between the products
    kv_dtype what pages are kept in: "same", which is as activations, or "float8"

    Raises ConfigError for an unknown dtype or device or limits that are not the model's,
    MemoryPlanError where weights, cache and scratch do not fit.
    """

    name = "torch"

    def __init__(
        self,
        checkpoint: Checkpoint,
        limits: ExecutorLimits,
        device: str = "cpu",
        dtype: str = "float32",
        graphs: bool = True,
        compile: bool = False,
        kv_dtype: str = "same",
    ) -> None:
        arch = checkpoint.architecture
        self.limits = limits
        self.device, self.dtype, self._dtype = _device(device), _dtype(dtype), dtype
        self._kv_dtype = kv_dtype
        _check_limits(arch, limits)
        pages = KV_DTYPES[kv_dtype] or self.dtype
        self._bytes = _planned_bytes(arch, limits, self.device, dtype)
        self._bytes["cache"] = _kv_shape(arch).bytes(limits, pages)
        check_fits(self._bytes, self.device)
        self._aux_layers: tuple[int, ...] = ()
        self._sampler = HostSampler(limits.slots, limits.vocab, self._choice)
        self._choices: dict[int, int] = {}
        kernels = self.kernels = kernels_for(self.device)
        self._decoder: Decoder | None = Decoder(
            checkpoint,
            self.device,
            self.dtype,
            products=Float8Linear if dtype == "float8" else Linear,
            parts=compiled(PLAIN) if compile else kernels.parts if kernels else PLAIN,
        )
        self._cache: PagedCache | None = PagedCache(_kv_shape(arch), limits, self.device, pages)
        self._graphs = self._captured_rounds() if graphs else None

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot."""
        self._sampler.open(slot_init)

    def close(self, slot: int) -> None:
        """Forget a slot's sequence."""
        self._sampler.close(slot)

    @property
    def decoder(self) -> Decoder:
        """The target's weights. Raises EngineError after `shutdown`."""
        return self._alive()[0]

    def request_aux_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Keep, from the next step on, the residual streams entering these layers, for a draft
        head (transformers' hidden_states indices; L = after the last layer, before its norm).

        Raises ConfigError where the model has no such layer.
        """
        last = self.decoder.arch.layers
        if not all(0 <= layer <= last for layer in layers):
            raise ConfigError(f"features {layers} name a layer outside 0..{last}")
        self._aux_layers = layers
        if self._graphs is not None:
            self._graphs.request_aux_hidden_states(layers, self.dtype)

    def draft_extend(self, drafting: Drafting) -> bool:
        """Let rounds do a draft head's work at their end. False where there are no rounds."""
        if self._graphs is not None:
            self._graphs.draft_extend(drafting)
        return self._graphs is not None

    def warm_up(self, draft: DraftShape, progress: Callable[[int, int], None]) -> None:
        """Capture the rounds that such drafts will need. Nothing where there are no rounds."""
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.warm_up(draft, progress)

    def padded_nodes(self, rows: int, nodes: int) -> int:
        """Nodes that a step of `rows` rows runs in all, of which the largest has `nodes`."""
        return rows * nodes if self._graphs is None else self._graphs.padded_nodes(rows, nodes)

    def keep_state(self) -> bool:
        """Let rounds carry on from each other. False where there are none."""
        if self._graphs is not None:
            self._graphs.keep_state()
        return self._graphs is not None

    def carries(self, scores: Scores) -> bool:
        """Whether the device decides every row of this step, and no report needs its logits."""
        in_flight = scores.round
        if in_flight is None or not in_flight.decided.all():
            return False
        return not self._sampler.reports(in_flight.slots)

    def drafting(self, scores: Scores) -> Ints:
        """Slots of the rows that a round extends; an eager step extends none."""
        return scores.round.drafting() if scores.round is not None else _NOBODY

    @torch.inference_mode()
    def carry(self, plan: CarriedPlan, draft_request: DraftRequest | None = None) -> Scores | None:
        """Begin a step on what the running round leaves. Raises EngineError for a bad plan."""
        self._alive()
        graphs = self._graphs
        if graphs is None:
            return None
        in_flight = graphs.carry_on(plan, self._sampler.choosing, draft_request)
        return (
            None
            if in_flight is None
            else Scores(in_flight.logits, in_flight.slots[:0], None, in_flight)
        )

    @torch.inference_mode()
    def trees(self, scores: Scores) -> TreeBatch:
        """What a carried step ran. Waits for it."""
        assert scores.round is not None
        return scores.round.trees()

    @torch.inference_mode()
    def verify(
        self, plan: Plan, trees: TreeBatch, draft_request: DraftRequest | None = None
    ) -> Scores:
        """Score every node of every tree in one forward pass.

        Writes scratch; a captured round also accepts, and writes, what it can decide, drafts what
        is requested, and may still be doing so: `accept` waits for it.
        """
        decoder, cache = self._alive()
        count = len(trees.tokens)
        if count > self.limits.max_nodes:
            raise EngineError(f"a step of {count} nodes; at most {self.limits.max_nodes} fit")
        if self._graphs is not None:
            found = self._round(self._graphs, plan, trees, draft_request)
            if found is not None:
                return found
        scored = self._sampler.scored(plan, trees)
        attend_layer = self._attention(plan, trees, cache)

        def attend_pages(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if self.kernels is None:
                cache.write(layer, keys[:count], values[:count])
            else:
                self.kernels.write(keys, values, cache.of_layer(layer), cache.scratch_begin)
            spec = decoder.arch.layer_specs[layer].attention
            return attend_layer(queries, *cache.of_layer(layer), spec=spec)

        # Our kernels know no padding; the bits are the batch's affair where they run.
        rows = padded_rows(count, () if self.kernels else decoder.row_sizes)
        tokens = self._padded(trees.tokens, rows)
        position = self._padded(positions(trees, plan.kv_len), rows)
        last, streams = decoder.forward(tokens, position, attend_pages, self._aux_layers)
        features = None
        if streams:
            aligned = torch.cat([stream[:count] for stream in streams], -1)
            features = TorchFeatures(aligned, np.arange(count))
        row_of = np.full(count, -1, np.int32)
        row_of[scored] = np.arange(len(scored), dtype=np.int32)
        return Scores(
            logits=decoder.logits(last[self._padded(scored, len(scored))]),
            row_of=row_of,
            plain=self._sampler.plain(plan, trees),
            features=features,
        )

    def _attention(self, plan: Plan, trees: TreeBatch, cache: PagedCache) -> Callable[..., Tensor]:
        """A layer's attention in this step: queries, keys, values, its spec -> context."""
        kernels, arch = self.kernels, self.decoder.arch
        if kernels is None:
            windows = dict.fromkeys(spec.attention.window for spec in arch.layer_specs)
            blocks = {w: key_blocks(plan, trees, cache, self.device, w) for w in windows}
            return lambda q, k, v, spec: attend(q, k, v, blocks[spec.window], spec)
        gqa_group = arch.heads // arch.kv_heads
        return partial(
            kernels.attend, geometry=geometry_of(plan, trees, cache, gqa_group, self.device)
        )

    def _captured_rounds(self) -> CudaGraphRunner | None:
        """None where nothing captures."""
        records = recorder(self.device)
        decoder, cache = self._alive()
        if records is None or self.kernels is None or not decoder.capturable:
            return None
        return CudaGraphRunner(decoder, cache, self.limits, self.kernels, records)

    def _round(
        self,
        graphs: CudaGraphRunner,
        plan: Plan,
        trees: TreeBatch,
        draft_request: DraftRequest | None,
    ) -> Scores | None:
        """The step as a captured round; None where it cannot be one."""
        size = graphs.size_of(plan, trees, draft_request)
        if size is None:
            return None
        plain = self._sampler.plain(plan, trees)
        in_flight = graphs.launch(size, plan, trees, plain, draft_request)
        return Scores(in_flight.logits, in_flight.places(), plain, in_flight)

    @torch.inference_mode()
    def accept(
        self, plan: Plan, trees: TreeBatch, scores: Scores, masks: NodeMasks | None
    ) -> HostAccepted:
        """Keep one path per tree. The target's choices are made on the device where they can
        be; only where they cannot, and for reports, do logits cross to the host.
        """
        plain, in_flight = scores.plain, scores.round
        if in_flight is None and plain is not None and len(plain.nodes):
            rows = self._padded(scores.row_of[plain.nodes], len(plain.nodes))
            tokens = choices(scores.logits[rows], plain).tolist()
            self._choices = dict(zip(plain.nodes.tolist(), tokens, strict=True))
        logits: list[Floats] = []

        def of_node(node: int) -> Floats:
            if (
                in_flight is not None
                and self._graphs is not None
                and self._graphs.last != in_flight
            ):
                # Another round has its place. Only a row without finite logits asks then.
                return np.full(self.limits.vocab, np.nan, np.float32)
            if not logits:
                logits.append(scores.logits.cpu().numpy())
            return logits[0][(in_flight.places() if in_flight else scores.row_of)[node]]

        try:
            choice = in_flight.choices() if in_flight is not None else None
            return self._sampler.accept(plan, trees, of_node, masks, choice)
        finally:
            self._choices = {}

    def _choice(self, node: int, sampling: Sampling, position: int) -> int | None:
        """What the device chose at a flat node of this step; None where it did not."""
        return self._choices.get(node)

    @torch.inference_mode()
    def commit(
        self, plan: Plan, trees: TreeBatch, scores: Scores, accepted: HostAccepted
    ) -> Outcome:
        """Copy the kept keys and values from scratch into pages, where no round has done so."""
        _, cache = self._alive()
        position = positions(trees, plan.kv_len)
        rows = range(plan.rows)
        if scores.round is not None:
            rows = np.flatnonzero(~scores.round.decided).tolist()
        paths = [accepted.paths[row] for row in rows]
        if paths:
            slots = [
                cache.slots(plan.page_table[row], position[path])
                for row, path in zip(rows, paths, strict=True)
            ]
            nodes = np.concatenate(paths)
            place = scores.round.places()[nodes] if scores.round is not None else nodes
            cache.commit(place, np.concatenate(slots))
        if scores.round is None:
            return self._sampler.outcome(plan, trees, accepted, scores.features)
        in_flight = scores.round
        return self._sampler.outcome(
            plan, trees, accepted, in_flight.node_features(), in_flight.drafts()
        )

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info. row_sizes: row counts that products are run at."""
        sizes = self._decoder.row_sizes if self._decoder else ()
        graphs = self._graphs
        return {
            "device": str(self.device),
            "dtype": self._dtype,
            "kv_dtype": self._kv_dtype,
            "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
            "batch_invariant": bool(sizes),
            "row_sizes": sizes,
            "captured": [tuple(size) for size in graphs.captured] if graphs else [],
            "capture_seconds": graphs.capture_seconds if graphs else 0.0,
            "rounds": graphs.count if graphs else 0,
            "round_seconds": graphs.seconds if graphs else 0.0,
            **{f"{part}_bytes": count for part, count in self._bytes.items()},
        }

    def shutdown(self) -> None:
        """Release memory. Idempotent."""
        self._decoder = self._cache = self._graphs = None

    def _alive(self) -> tuple[Decoder, PagedCache]:
        if self._decoder is None or self._cache is None:
            raise EngineError("the executor was shut down")
        return self._decoder, self._cache

    def _padded(self, values: Ints, rows: int) -> Tensor:
        """int64[rows] on the device: values, then zeros."""
        out = np.zeros(rows, np.int64)
        out[: len(values)] = values
        return torch.from_numpy(out).to(self.device)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"torch knows no device {name!r}: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name}, but torch sees no CUDA device here")
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _check_limits(arch: Architecture, limits: ExecutorLimits) -> None:
    if limits.vocab != arch.vocab:
        raise ConfigError(f"the limits' vocabulary is {limits.vocab}, the model's {arch.vocab}")
    if limits.context > arch.context:
        raise ConfigError(f"context is {limits.context}, the model was made for {arch.context}")


def _kv_shape(arch: Architecture) -> KvShape:
    return KvShape(arch.layers, arch.kv_heads, arch.head_size)


def _planned_bytes(
    arch: Architecture, limits: ExecutorLimits, device: torch.device, dtype: str
) -> dict[str, int]:
    """Bytes by purpose. On the CPU a tied head is a second, packed copy of the embedding."""
    item = DTYPES[dtype].itemsize
    narrowed = arch.parameters - arch.vocab * arch.hidden * (1 if arch.tied_head else 2)
    copies = arch.vocab * arch.hidden if arch.tied_head and device.type == "cpu" else 0
    query, key = arch.heads * arch.head_size, arch.kv_heads * arch.head_size
    widest = max(5 * arch.ffn, 5 * query + 4 * key, arch.vocab)
    return {
        "weight": (arch.parameters + copies) * item - (narrowed if dtype == "float8" else 0),
        "scratch": limits.max_nodes * 4 * (3 * arch.hidden + widest),
    }


def check_fits(parts: dict[str, int], device: torch.device) -> None:
    """Raise MemoryPlanError where the parts exceed what is free now."""
    on_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_cuda else memory_available()
    if sum(parts.values()) > free:
        listed = " + ".join(f"{part} {count:,}" for part, count in parts.items())
        raise MemoryPlanError(
            f"{listed} bytes do not fit into the {free:,} bytes that are free on {device}; "
            "lower the number of cached tokens (kv-tokens) or of nodes in a step"
        )
