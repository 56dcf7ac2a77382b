"""CpuExecutor: the executor contract on the compiled core."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from forerun.errors import ConfigError, EngineError, MemoryPlanError, ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.latent import sizes_of
from forerun.executors.cpu.limits import check_runs
from forerun.executors.cpu.places import RopeTable
from forerun.executors.cpu.step_buffers import StepBuffers
from forerun.executors.cpu.weights import Packer, cache_bytes_per_token, cache_item, sentence
from forerun.executors.feature_ring import HostFeatureRing, ring_places
from forerun.executors.host_sampler import HostSampler
from forerun.interface.executor import Capabilities, Executor, ExecutorLimits
from forerun.interface.plan import Outcome, Plan, Round, SlotInit
from forerun.machine import physical_cores
from forerun.models.checkpoint import Checkpoint
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NO_TREES, NodeMasks, TreeBatch
from forerun.types import AnyArray, Floats, Ints

MOST_THREADS = 16
"""Used unless more are asked for. A step has some 300 barriers, which cost more with each."""


@dataclass(eq=False)
class CpuRound(Round):
    """A step that was scored: logits float32[n,V] of the nodes `scored` int32[n], ascending, until
    the executor's next round.
    """

    logits: Floats = field(kw_only=True)
    scored: Ints = field(kw_only=True)

    def logits_of(self, node: int) -> Floats:
        """float32[V]: the logits of flat node `node`, one of `scored`."""
        row: Floats = self.logits[np.searchsorted(self.scored, node)]
        return row


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Features of nodes of the compiled core's last step; they stay there.

    nodes  int[n] flat nodes of that step
    """

    executor: "CpuExecutor"
    round: CpuRound
    nodes: AnyArray

    def __len__(self) -> int:
        """How many rows."""
        return len(self.nodes)

    def select(self, nodes: AnyArray) -> "CpuFeatures":
        """The rows nodes int[n], in this order; the core refuses those that are not there."""
        return replace(self, nodes=self.nodes[nodes])

    def keep(self) -> HostFeatureRing:
        """Copied into the executor's ring; only before its next step."""
        return self.executor.keep_features(self.round, self.nodes)


class CpuExecutor(Executor):
    """Inference on the CPU with the file's own weights.

    Quantised weights meet activations of 8 bits with one scale per 32, and sums are integers;
    weights that are floats meet float32. Floats are added in an order that depends on positions
    only: a row's bits are the same alone, in any batch, under any tree, in any chunks and pages,
    and on any number of threads.

    threads  None = the physical cores this process may use
    kernels  "" = the best this machine has; a name (see csrc/dispatch.cpp) forces one
    dtype    "file", or what floats are made: a name of weights.QUANTIZED
    progress is called with (what, done, total) in bytes while weights are packed

    Raises ModelError for a checkpoint it cannot run, MemoryPlanError where weights and caches
    do not fit, ConfigError for unknown kernels.
    """

    capabilities = Capabilities(first_steps=0, unwritten=True)

    def __init__(
        self,
        checkpoint: Checkpoint,
        limits: ExecutorLimits,
        threads: int | None = None,
        kernels: str = "",
        dtype: str = "file",
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        arch = checkpoint.architecture
        check_runs(arch)
        if limits.vocab != arch.vocab:
            raise ModelError(f"the limits' vocabulary is {limits.vocab}, the model's {arch.vocab}")
        self.limits = limits
        self._arch = arch
        self._library = native.load()
        self._kernels = native.kernels(kernels)
        if self._kernels is None:
            raise ConfigError(f"this machine has no CPU kernels called {kernels!r}")
        self._threads = threads or min(physical_cores(), MOST_THREADS)
        self.name = f"cpu ({self._kernels}, {self._threads} threads)"
        self._sampler = HostSampler(limits.slots, limits.vocab, choose_fast=self._choose)
        self._box = StepBuffers(limits.max_nodes, self._sampler.choosing)
        self._model: int | None = None
        self._drafts: list[int] = []
        self._ring: HostFeatureRing | None = None
        self._numbers = sentence(checkpoint, dtype)
        self._cache_item = cache_item(checkpoint, dtype)
        packer = Packer(self._library, checkpoint, dtype=dtype)
        self._weight_bytes = packer.planned_bytes()
        self._model = self._open()
        try:
            packer.load(self._model, partial(progress, "loading weights"))
        except BaseException:
            self.shutdown()
            raise
        self._logits = np.empty((0, limits.vocab), np.float32)

    def _open(self) -> int:
        arch, limits = self._arch, self.limits
        sizes = native.Sizes(
            layers=arch.layers,
            hidden=arch.hidden,
            heads=arch.heads,
            kv_heads=arch.kv_heads,
            head_size=arch.head_size,
            ffn=arch.ffn,
            vocab=arch.vocab,
            page_size=limits.page_size,
            pages=limits.pages,
            max_nodes=limits.max_nodes,
            context=limits.context,
            threads=self._threads,
            cache_item=self._cache_item,
            norm_eps=arch.norm_eps,
            **sizes_of(arch.latent),
        )
        model: int | None = self._library.forerun_open(
            ctypes.byref(sizes),
            ctypes.byref(RopeTable(arch.ropes, arch.rope_size)),
            self._weight_bytes,
            (self._kernels or "").encode(),
        )
        if model is None:
            raise MemoryPlanError(
                f"weights ({self._weight_bytes:,} bytes) and the cache of {limits.pages} pages x "
                f"{limits.page_size} tokens ({self.cache_bytes:,} bytes) do not fit: "
                f"{self._library.forerun_error().decode()}; lower the number of cached tokens"
            )
        return model

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values, in pages and in the step's scratch."""
        places = self.limits.pages * self.limits.page_size + self.limits.max_nodes
        return cache_bytes_per_token(self._arch, self._cache_item) * places

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot. EngineError: it is open, or a token is out of range."""
        self._sampler.open(slot_init)

    def close(self, slot: int) -> None:
        """Forget the slot's sequence, if it has one."""
        self._sampler.close(slot)

    def begin(
        self, plan: Plan, trees: TreeBatch = NO_TREES, masks: NodeMasks | None = None
    ) -> CpuRound:
        """Score every node in one native call, over on return; known nodes write their pages. No
        draft request is answered. Raises EngineError where the core refuses the step.
        """
        scored = self._sampler.scored(plan, trees)
        self._reserve(len(scored))
        self._box.fill(plan, trees, scored, self._logits)
        if self._library.forerun_forward(self._alive(), self._box.step):
            raise EngineError(f"a step was refused: {self._library.forerun_error().decode()}")
        return CpuRound(plan, trees, logits=self._logits[: len(scored)], scored=scored)

    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Accept, plain rows natively, the others by forerun.speculative, and copy the accepted
        draft tokens' keys and values into pages: the core those of its rows, and where there are
        others all of them, once more. Raises EngineError where the core refuses.
        """
        assert isinstance(round, CpuRound)
        plan, features = round.plan, None
        self._box.ask(plan, round.trees, masks)
        self._box.walk.committed = 0
        if self._library.forerun_accept(self._alive(), self._box.step, self._box.walk):
            raise EngineError(self._library.forerun_error().decode())
        if self._ring is not None:
            nodes = np.arange(len(round.trees.tokens))
            features = CpuFeatures(self, round, nodes)
        outcome = self._sampler.finish(
            round, round.logits_of, masks, self._box.choice, features=features
        )
        if len(outcome.accepted) > self._box.walk.committed:
            self._commit(plan, outcome.accepted)
        return outcome

    def _commit(self, plan: Plan, nodes: Ints) -> None:
        """Copy what these nodes of the last step left in scratch into the plan's pages."""
        box = self._box
        box.put_path(plan, nodes)
        where = box.step.pages, box.step.page_width, box.path, len(nodes)
        if self._library.forerun_commit_paths(self._alive(), *where):
            raise EngineError(f"commit was refused: {self._library.forerun_error().decode()}")

    def _choose(self, logits: Floats, sampling: Sampling, position: int) -> int | None:
        """The native twin of spec.accept.choose for plain requests; None = ask the spec."""
        token: int = self._library.forerun_choose(
            self._alive(),
            logits.ctypes.data,
            sampling.temperature,
            sampling.seed & 0xFFFFFFFFFFFFFFFF,
            position,
        )
        return token if token >= 0 else None

    def _reserve(self, scored: int) -> None:
        if scored > len(self._logits):
            self._logits = np.empty((scored, self.limits.vocab), np.float32)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info: device, kernels, threads, dtype, bytes."""
        return {
            "device": "cpu",
            "kernels": self._kernels,
            "threads": self._threads,
            "dtype": self._numbers,
            "weight_bytes": self._weight_bytes,
            "cache_bytes": self.cache_bytes,
            "cache_dtype": "float32" if self._cache_item == 4 else "float16",
        }

    def shutdown(self) -> None:
        """Free the model and its drafts. Idempotent; later steps raise EngineError."""
        model, self._model = self._model, None
        drafts, self._drafts = self._drafts, []
        for draft in drafts:
            self._library.forerun_close(draft)
        if model is not None:
            self._library.forerun_close(model)

    def __del__(self) -> None:
        if getattr(self, "_model", None) is not None:
            self.shutdown()

    def native_model(self) -> int:
        """The core's handle, for draft models beside it and bench/steps.py. Raises EngineError."""
        return self._alive()

    def adopt(self, draft: int | None, features_width: int) -> None:
        """Close this native draft head, if any, together with the model whose threads it uses, and
        hand out from now on the features [M,features_width] that the model was made to keep.
        """
        self._drafts += [] if draft is None else [draft]
        self._ring = HostFeatureRing(self.limits.slots, features_width) if features_width else None

    def features(self, count: int, width: int) -> Floats:
        """float32[count,width]: features of the last step's first nodes. Raises EngineError."""
        found = np.empty((count, width), np.float32)
        if self._library.forerun_aux_hidden_states(self._alive(), count, found.ctypes.data):
            raise EngineError(self._library.forerun_error().decode())
        return found

    def keep_features(self, round: CpuRound, nodes: AnyArray) -> HostFeatureRing:
        """The ring, with features of these nodes int[n] of the last step. Raises EngineError."""
        assert self._ring is not None, "nobody reads features"
        values = self.features(int(nodes.max()) + 1, self._ring.values.shape[1])
        self._ring.values[ring_places(round.plan, round.trees, nodes)] = values[nodes]
        return self._ring

    def _alive(self) -> int:
        if self._model is None:
            raise EngineError("the executor was shut down")
        return self._model
