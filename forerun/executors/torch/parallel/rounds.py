"""Captured rounds of ranks: every rank launches the rounds that rank 0 launches, with the same
inputs.

A round reads only its staging buffer from the host. So a message has a round's size, the bytes of
that buffer, and the page table entries for which it had no room. The outcome is not sent: every
rank computes it (`chosen_together`). See decisions 0033 and 0039.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from forerun.executors.torch.captured.graphs import recorder
from forerun.executors.torch.captured.round import StagingBuffer, TableEntries
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.captured.warm_up import runner_of
from forerun.executors.torch.model_runner import ModelRunner
from forerun.executors.torch.parallel.step import Arrays
from forerun.executors.torch.sizes import Size

_ENTRIES = ("places", "pages")
"""Names of TableEntries' arrays in a message, followed by the number of the table in
CudaGraphRunner.tables.
"""


class RankRounds:
    """Launches the rounds in rank 0's messages, on another rank."""

    def __init__(self, runner: ModelRunner, overlap: bool) -> None:
        records = recorder(runner.device)
        assert records is not None, "rank 0 captures, this one cannot"
        self._runner = runner_of(CudaGraphRunner, runner, records, overlap)

    @torch.inference_mode()
    def launch(self, size: Size, found: Arrays) -> None:
        """Launch the round described by a message's arrays. Does not wait."""
        staging = self._runner.staging(size)
        staging.flat.copy_(torch.from_numpy(found["inputs"]))
        first = [
            TableEntries(table, *(torch.from_numpy(found[f"{name}{number}"]) for name in _ENTRIES))
            for number, table in enumerate(self._runner.tables)
            if f"{_ENTRIES[0]}{number}" in found
        ]
        self._runner.launch(size, staging, first)


class SharedRunner(CudaGraphRunner):
    """The runner of rank 0: sends a round to the others before launching it.

    send_step  sends the size and the arrays of a round
    together   context manager for work that every rank does; both are set before the first launch
    """

    send_step: Callable[[Size, Arrays], None]
    together: Callable[[], AbstractContextManager[None]]

    def launch(
        self, size: Size, staging: StagingBuffer, first: Sequence[Callable[[], None]] = ()
    ) -> Callable[[], None]:
        """Launch as CudaGraphRunner.launch, on all ranks. first: at most what `send` returned.
        Raises RankError if a rank fails.
        """
        arrays: Arrays = {"inputs": staging.flat.numpy()}
        for each in first:
            assert isinstance(each, TableEntries)
            number = self.tables.index(each.table)
            for name, part in zip(_ENTRIES, (each.places, each.pages), strict=True):
                arrays[f"{name}{number}"] = part.numpy()
        self.send_step(size, arrays)
        with self.together():
            wait = super().launch(size, staging, first)

        def waited() -> None:
            with self.together():
                wait()

        return waited
