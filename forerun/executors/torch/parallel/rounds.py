"""Captured rounds of ranks: every rank launches what rank 0 launches, on the same inputs.

A round reads only its staging buffer from the host. So the message of a round is its size and these
bytes, and beside them changes outside of rounds: entries of page tables that had no room in it,
copies within rank 0's cache, and changes of its window pages. The outcome is not sent: every rank
computes it (captured/together.py). See decisions 0033 and 0039.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from forerun.draft_shape import DraftShape
from forerun.executors.torch.captured.buffers import StagingBuffer, TableEntries
from forerun.executors.torch.captured.declared import declared, row_nodes
from forerun.executors.torch.captured.executor import CapturedExecutor
from forerun.executors.torch.captured.graphs import CudaRecorder, recorder
from forerun.executors.torch.captured.recurrent import RecurrentExecutor
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.captured.states import RoundStates
from forerun.executors.torch.captured.warm_up import capture, rehearse_prompts
from forerun.executors.torch.captured.windowed import WindowedRounds, WindowRunner
from forerun.executors.torch.drafts.draft_cache import HasPages
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.model_runner import ModelRunner
from forerun.executors.torch.parallel.channel import RankMessage
from forerun.executors.torch.parallel.executor import (
    DraftTarget,
    ParallelExecutor,
    WindowedParallelExecutor,
)
from forerun.executors.torch.parallel.step import follow
from forerun.executors.torch.triton.kernels import Kernels
from forerun.executors.torch.triton.record import Size
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray

_ENTRIES = ("places", "pages")
"""Names of TableEntries in a message, before the number of the table among PageTables.kinds."""


class RankRounds:
    """The launches of a rank other than 0, as messages name them."""

    def __init__(self, runner: ModelRunner, message: RankMessage) -> None:
        self._rank, records = runner, recorder(runner.device)
        assert runner.kernels is not None and records is not None, (
            "rank 0 captures, this one cannot"
        )
        kind = WindowRunner if runner.limits.window_pages else CudaGraphRunner
        self._runner = kind(
            *(runner.decoder, runner.cache, runner.limits),
            *(runner.kernels, records, runner.group),
            overlap=message.facts["overlap"],
        )
        if runner.states is not None:
            self._runner.states = RoundStates(
                runner.states, runner.kernels.states, runner.decoder.arch, runner.limits
            )

    @torch.inference_mode()
    def launch(self, message: RankMessage) -> None:
        """Launch the round that the message names, after the copies and entries of page tables that
        come with it. Does not wait.
        """
        size, found = Size(*message.facts["size"]), message.arrays
        staging = self._runner.staging(size)
        staging.whole.copy_(torch.from_numpy(found["inputs"]))
        follow(self._rank, (found["source"], found["target"]), found["links"])
        first = [
            TableEntries(table, *(torch.from_numpy(found[f"{name}{number}"]) for name in _ENTRIES))
            for number, table in enumerate(self._runner.tables.kinds)
            if f"{_ENTRIES[0]}{number}" in found
        ]
        self._runner.launch(size, staging, first)


class SharedRunner(CudaGraphRunner):
    """The runner of rank 0: sends a round to the others before launching it.

    eager  knows the other ranks; set before the first launch
    """

    eager: ParallelExecutor

    def launch(
        self, size: Size, staging: StagingBuffer, first: Sequence[Callable[[], None]] = ()
    ) -> Callable[[], None]:
        """Launch as CudaGraphRunner.launch, on all ranks. first: at most PageTables.send's. Raises
        RankError.
        """
        source, target = self.eager.moved()
        arrays: dict[str, AnyArray] = {"inputs": staging.whole.numpy()}
        arrays |= {"source": source, "target": target, "changes": self.eager.changed()}
        arrays["links"] = self.eager.linked()
        for each in first:
            assert isinstance(each, TableEntries)
            number = self.tables.kinds.index(each.table)
            for name, part in zip(_ENTRIES, (each.places, each.pages), strict=True):
                arrays[f"{name}{number}"] = part.numpy()
        self.eager.ranks.send(RankMessage("round", {"size": list(size)}, arrays))
        with self.eager.together():
            wait = super().launch(size, staging, first)

        def waited() -> None:
            with self.eager.together():
                wait()

        return waited


class SharedRounds(CapturedExecutor):
    """Rounds of all ranks where a step can be one; rank 0's. Draft models run between rounds."""

    eager: ParallelExecutor
    Runner = SharedRunner

    def __init__(
        self,
        eager: ParallelExecutor,
        kernels: Kernels,
        records: CudaRecorder,
        overlap: bool = False,
    ) -> None:
        super().__init__(eager, kernels, records, overlap)
        assert isinstance(self.runner, SharedRunner)
        self.runner.eager = eager
        eager.ranks.send(RankMessage("rounds", {"overlap": overlap}))

    def watch(self, failed: Callable[[str], None]) -> None:
        """Implement ParallelExecutor.watch."""
        self.eager.watch(failed)

    @property
    def draft_target(self) -> TorchTarget:
        """For draft models, which run here alone (ParallelExecutor); rounds keep features too."""
        return DraftTarget(self.eager, self.eager.whole, self)

    def copy_page(self, source: int, target: int) -> bool:
        """Implement ParallelExecutor.copy_page."""
        return self.eager.copy_page(source, target)

    def draft_with(self, model: HasPages) -> None:
        """Count the model among the executor's. No round drafts: the host runs every pass."""
        self.eager.draft_with(model)

    @torch.inference_mode()
    def warm_up(self, draft: DraftShape, progress: Callable[[str, int, int], None]) -> None:
        """Capture the declared sizes with temperature only, on all ranks. Kernels compile at their
        first launch: compiling them ahead would launch exchanges that other ranks wait for.
        """
        plain = DraftShape(draft.nodes)
        sizes = [size for size in declared(self.limits, plain) if not (size.shaping or size.masked)]
        rehearse_prompts(self.eager)
        capture(self.runner, sizes, progress)
        self.limits = replace(self.limits, row_nodes=row_nodes(self.limits, draft))

    def size_of(self, plan: Plan, trees: TreeBatch, masked: bool = False) -> Size | None:
        """Return the size as CapturedExecutor.size_of, and None if a row has a grammar: its choice
        is made from whole rows of logits.
        """
        return None if plan.constrained.any() else super().size_of(plan, trees, masked)


class SharedWindowRunner(SharedRunner, WindowRunner):
    """The same with window pages."""


class SharedWindowedRounds(WindowedRounds, SharedRounds):
    """The same where layers with a window have pages of their own: rank 0 says which."""

    eager: WindowedParallelExecutor
    Runner = SharedWindowRunner


class SharedRecurrentRounds(RecurrentExecutor, SharedRounds):
    """The same where layers have recurrent states: each rank has those of its heads or channels."""

    eager: ParallelExecutor


def with_shared_captures(
    eager: ParallelExecutor, overlap: bool = False
) -> ParallelExecutor | SharedRounds:
    """Return rank 0's executor behind captured rounds of all ranks, if its device captures; else
    itself.
    """
    records = recorder(eager.device)
    if records is None or eager.kernels is None:
        return eager
    if isinstance(eager, WindowedParallelExecutor):
        return SharedWindowedRounds(eager, eager.kernels, records, overlap)
    kind = SharedRounds if eager.states is None else SharedRecurrentRounds
    return kind(eager, eager.kernels, records, overlap)
