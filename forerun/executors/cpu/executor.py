"""CpuExecutor: the Executor interface on the compiled core."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.executors.cpu.features import CpuFeatures
from forerun.executors.cpu.model import CpuModel
from forerun.executors.cpu.states import CpuStates
from forerun.executors.device_choice import Choosing
from forerun.executors.host_sampler import HostSampler
from forerun.executors.state_steps import StateStep
from forerun.interface.executor import Capabilities, Executor, ExecutorLimits
from forerun.interface.hidden import hidden_nodes
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import AnyArray, Floats, Ints

_WALK = ("slots", "samples", "choice")
_STEP = ("tokens", "parents", "depth", "start", "known", "kv_len", "scored_nodes", "logits_row")
_STATES = ("state_rows", "state_targets")


@dataclass(eq=False)
class CpuRound(Round):
    """A step that has run. states: of recurrent layers; None if there are none."""

    states: StateStep | None = field(kw_only=True)


class CpuExecutor(Executor):
    """Runs a target on the CPU with the file's own weights.

    Quantised weights multiply activations of 8 bits with one scale per 32, summed in integers;
    float weights multiply float32. The order of float additions depends on positions only, so a
    row's bits are the same alone, in any batch, under any tree, in any chunks and pages, and on any
    number of threads.

    threads  None = the physical cores this process may use
    kernels  "" = the best this machine has; a name (see csrc/dispatch.cpp) selects one
    dtype    "file", or what floats are converted to: a name of weights.QUANTIZED
    kv_dtype "same", or "q8_0": keys and values in blocks of 32 bytes with a float16 scale
    progress  called with (what, done, total) in bytes while weights are packed

    Raises ModelError for a checkpoint it cannot run, MemoryPlanError if weights and caches do not
    fit, ConfigError for unknown kernels.
    """

    capabilities = Capabilities(first_steps=0, unwritten=True)

    def __init__(
        self,
        checkpoint: Checkpoint,
        limits: ExecutorLimits,
        threads: int | None = None,
        kernels: str = "",
        dtype: str = "file",
        kv_dtype: str = "same",
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        self.model = CpuModel(checkpoint, limits, threads, kernels, dtype, kv_dtype, progress)
        self.limits = limits
        self.name = f"cpu ({self.model.kernels}, {self.model.threads} threads)"
        self._library = native.load()
        self._sampler = HostSampler(limits.slots, limits.vocab, cut_offs=True)
        self._buffers = StepBuffers(limits.max_nodes, self._sampler.choosing, self.model.token_rows)
        self._logits = np.empty((0, limits.vocab), np.float32)
        self._most_scored = limits.scored_nodes
        self.states = (
            CpuStates(self.native_model, limits) if checkpoint.architecture.recurrent else None
        )
        self.pages, self.state_contents = self.model, self.states
        if self.states is not None:  # A state never written is of no text.
            self.capabilities = replace(self.capabilities, unwritten=False)

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot; with recurrent layers, copy the state of its cached tokens
        there. Raises EngineError if the slot is open, a token is out of range, or that state has no
        checkpoint.
        """
        if self.states is not None:
            self.states.open(slot_init)
        self._sampler.open(slot_init)

    def reusable_prefix_len(
        self, tokens: Ints, salt: bytes = b"", pages: Ints | None = None
    ) -> int:
        """Return how many of the cached tokens int32[n] a sequence can skip: all, or with recurrent
        layers those up to the last checkpoint of a text of this salt.
        """
        return (
            len(tokens)
            if self.states is None
            else self.states.book.reusable_prefix_len(tokens, salt)
        )

    def close(self, slot: int) -> None:
        """Discard the slot's sequence, if it has one."""
        self._sampler.close(slot)
        if self.states is not None:
            self.states.book.close(slot)

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> CpuRound:
        """Run every node in one native call, finished on return; known nodes write their pages.
        `finish` may still have to compute logits of draft tokens that a path reaches. Ignores
        `on_device_draft`. Raises EngineError if the core rejects the step.
        """
        scored = self._sampler.scored(plan, trees)
        buffers = self._buffers
        if (count := len(scored)) > (known := len(self._logits)):
            # Not one row at a time: a product that fills new memory takes three times as long.
            room = max(count, min(2 * known, self._most_scored)), self.limits.vocab
            self._logits = np.empty(room, np.float32)
        buffers.fill(plan, trees, scored, self._logits)
        step = None if self.states is None else self.states.prepare(plan, trees)
        if step is not None:
            buffers.put_states(step)
        if self._library.forerun_forward(self.native_model(), buffers.step, buffers.walk):
            if self.states is not None and step is not None:
                self.states.failed(step)
            raise EngineError(f"a step was refused: {self._library.forerun_error().decode()}")
        if self.states is not None and step is not None:
            self.states.known(step)
        return CpuRound(plan, trees, states=step)

    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Accept in the core if only temperature, cut-offs and masks matter, else by
        forerun.speculative; write the keys and values of accepted draft tokens to pages. Raises
        EngineError if the core rejects them.
        """
        assert isinstance(round, CpuRound)
        library, buffers, features = self._library, self._buffers, None
        buffers.put_masks(masks)
        if library.forerun_accept(self.native_model(), buffers.step, buffers.walk):
            raise EngineError(f"acceptance was refused: {library.forerun_error().decode()}")
        if round.plan.hidden is not None:
            round.hidden = self.model.final_hidden_states(hidden_nodes(round.plan, round.trees))
        if self.model.ring is not None:
            features = CpuFeatures(self.model, np.arange(len(round.trees.tokens)))
        outcome = self._sampler.finish(
            round, self._logits_of, masks, buffers.choice, features=features
        )
        if count := len(outcome.accepted):
            buffers.put_path(round.plan, outcome.accepted)
            arguments = buffers.step.pages, buffers.step.page_width, buffers.path, count
            if library.forerun_commit_paths(self.native_model(), *arguments):
                raise EngineError(f"commit was refused: {library.forerun_error().decode()}")
            if self.states is not None and round.states is not None:
                self.states.accept(round.states, outcome)
        return outcome

    def _logits_of(self, node: int) -> Floats:
        """Return float32[V] of flat node `node`, a view. Raises EngineError if it is not scored."""
        library, step = self._library, self._buffers.step
        if (row := library.forerun_logits_row(self.native_model(), step, node)) < 0:
            raise EngineError(f"logits were refused: {library.forerun_error().decode()}")
        return cast(Floats, self._logits[row])

    def release_scratch(self) -> None:
        """Free the logits of the largest step so far, for example 67 MB for 64 nodes and a
        vocabulary of 262,144 tokens.
        """
        self._logits = np.empty((0, self.limits.vocab), np.float32)

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: those of CpuModel."""
        return self.model.describe()

    def shutdown(self) -> None:
        """Free the model and its drafts. Idempotent; later steps raise EngineError."""
        self.model.shutdown()

    def native_model(self) -> int:
        """Return the core's handle of the target. Raises EngineError after `shutdown`."""
        if self.model.handle is None:
            raise EngineError("the executor was shut down")
        return self.model.handle


class StepBuffers:
    """The small arrays of a step, at fixed addresses that the compiled core reads: every step
    refills them, which takes less time than passing new addresses.

    token_rows  returns the address of the tokens' per-layer vectors (TokenRows.address); None: the
                model has none
    step  for forerun_forward, after `fill`
    walk  for forerun_forward, and for forerun_accept after `put_masks`
    path  address of the nodes from `put_path`
    """

    def __init__(
        self, max_nodes: int, choosing: Choosing, token_rows: native.AddressOf | None = None
    ) -> None:
        self._token_rows = token_rows or (lambda tokens: None)
        self._choosing = choosing  # The core reads all but `on_device` in place.
        self._max_nodes = max_nodes
        self._arrays: dict[str, AnyArray] = {
            **{name: np.zeros(max_nodes + 1, np.int32) for name in _STEP},
            "slots": np.zeros(max_nodes, np.int32),
            "samples": np.zeros(max_nodes, np.uint8),
            "choice": np.zeros(max_nodes, np.int32),
            "path": np.zeros(max_nodes, np.int32),
            "state_rows": np.zeros(max_nodes, np.int64),
            "state_targets": np.zeros(max_nodes, np.int64),
        }
        # They grow with the steps. `ctypes.data` of an array takes as long as filling five.
        self._pages, self._logits = np.zeros(0, np.int32), np.zeros((0, 0), np.float32)
        address = {name: array.ctypes.data for name, array in self._arrays.items()}
        self.path = address["path"]
        self.step = native.StepArrays(**{name: address[name] for name in (*_STEP, *_STATES)})
        self.walk = native.Walk(
            temperature=choosing.temperature.ctypes.data,
            seed=choosing.seed.ctypes.data,
            prompt_len=choosing.prompt_len.ctypes.data,
            cut_offs=choosing.cut_offs.ctypes.data,
            all_slots=len(choosing.seed),
            **{name: address[name] for name in _WALK},
        )

    def fill(self, plan: Plan, trees: TreeBatch, scored: Ints, logits: Floats) -> None:
        """Write a step: its plan, its trees, and the rows of `logits` float32[.,V] that receive the
        logits of its nodes scored int32[n].

        Raises EngineError if it has too many nodes.
        """
        count = len(trees.tokens)
        if count > self._max_nodes:
            raise EngineError(
                f"a step was refused: more nodes than the step may have, {count}, not "
                f"{self._max_nodes}"
            )
        self._put("tokens", trees.tokens)
        self._put("parents", trees.parents)
        self._put("depth", trees.depth)
        self._put("start", trees.start)
        self._put("known", trees.known)
        self._put("kv_len", plan.kv_len)
        self._put("scored_nodes", scored)
        self._put("slots", plan.slots)
        self._put("samples", plan.samples & self._choosing.on_device[plan.slots])
        step = self.step
        step.token_rows = self._token_rows(trees.tokens)
        step.rows, step.nodes, step.scored = plan.rows, count, len(scored)
        self._put_pages(plan)
        if logits is not self._logits:
            self._logits, step.logits = logits, logits.ctypes.data

    def put_states(self, step: StateStep) -> None:
        """Write the state rows with which the slots of a step begin, and those to which the states
        after its known nodes are copied in addition. Call after `fill`.
        """
        self._put("state_rows", step.plan.slots)
        self._put("state_targets", step.targets)

    def put_masks(self, masks: NodeMasks | None) -> None:
        """Write the addresses of the grammars' masks, which the core reads in place: the masks must
        outlive its call.
        """
        walk = self.walk
        walk.mask_row = None if masks is None else masks.row.ctypes.data
        if masks is not None:
            walk.masks, walk.mask_words = masks.bits.ctypes.data, masks.bits.shape[1]

    def _put_pages(self, plan: Plan) -> None:
        pages, step = plan.page_table, self.step
        if pages.size > len(self._pages):
            self._pages = np.zeros(2 * pages.size, np.int32)
            step.pages = self._pages.ctypes.data
        self._pages[: pages.size], step.page_width = pages.ravel(), pages.shape[1]

    def put_path(self, plan: Plan, nodes: Ints) -> None:
        """Write the accepted nodes int32[n] of the step, and the page table of the plan."""
        self._put_pages(plan)
        self._put("path", nodes)

    @property
    def choice(self) -> Ints:
        """int32[M], a copy: the target's choice at each node, from forerun_accept (`Walk` of
        csrc/model.h).
        """
        return cast(Ints, self._arrays["choice"][: self.step.nodes].copy())

    def _put(self, name: str, values: AnyArray) -> None:
        self._arrays[name][: len(values)] = values
