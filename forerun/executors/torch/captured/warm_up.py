"""Preparation of captured rounds before the first request: compiles kernels, captures programs."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from forerun.draft_shape import DraftShape
from forerun.executors.torch.captured.declared import declared, row_nodes
from forerun.executors.torch.captured.graphs import CudaRecorder
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.captured.states import RoundStates
from forerun.executors.torch.model_runner import ModelRunner
from forerun.executors.torch.sizes import Size

Runner = TypeVar("Runner", bound=CudaGraphRunner)


def runner_of(
    kind: type[Runner], target: ModelRunner, records: CudaRecorder, overlap: bool
) -> Runner:
    """Return the program of a target's rounds, with its recurrent states. overlap: rounds may begin
    before the previous one has finished.
    """
    kernels, decoder = target.kernels, target.decoder
    assert kernels is not None, "a device that captures has kernels"
    made = kind(
        *(decoder, target.cache, target.limits, kernels, records, target.group), overlap=overlap
    )
    if target.states is not None:
        made.states = RoundStates(target.states, kernels.states, decoder.arch, target.limits)
    return made


def prepare(
    runner: CudaGraphRunner,
    target: ModelRunner,
    draft: DraftShape,
    prompts: Callable[[], None],
    progress: Callable[[str, int, int], None],
) -> tuple[int, ...]:
    """Compile every kernel and capture the declared sizes for such drafts. Returns
    ExecutorLimits.row_nodes. prompts, progress: as of `warm_up`.

    With several ranks, only sizes with temperature alone and without drafts. There kernels compile
    at their first launch: compiling them ahead would launch exchanges that other ranks wait for.
    """
    limits, drafting = target.limits, runner.drafting
    if target.group is None:
        fits = (lambda _: True) if drafting is None else drafting.fits
        warm_up(runner, declared(limits, draft, fits), prompts, progress)
    else:
        prompts()
        sizes = declared(limits, DraftShape(draft.nodes))
        capture(runner, [s for s in sizes if not (s.shaping or s.masked)], progress)
    return row_nodes(limits, draft)


def warm_up(
    runner: CudaGraphRunner,
    sizes: Iterable[Size],
    prompts: Callable[[], None],
    progress: Callable[[str, int, int], None],
) -> None:
    """Compile every kernel that prompts and rounds of these sizes, at least one, need, then capture
    the rounds. Any other size is an error afterwards (CapturedPrograms.sealed).

    prompts   launches every kernel that prompts need
    progress  called with (what, done, total) in kernels, then in sizes

    Slots must be closed. Raises torch's exceptions, such as out of memory.
    """
    wanted = list(sizes)
    deepest = max(wanted, key=lambda size: size.levels)
    runner.make_room(deepest)
    progress("compiling kernels", 0, 0)
    runner.kernels.ahead(
        partial(_launch_all, runner, wanted, prompts), partial(progress, "compiling kernels")
    )
    capture(runner, wanted, progress)


def capture(
    runner: CudaGraphRunner, sizes: Sequence[Size], progress: Callable[[str, int, int], None]
) -> None:
    """Capture rounds of these sizes; nothing else is captured afterwards."""
    what = "preparing step sizes"
    for done, size in enumerate(sizes):
        progress(what, done, len(sizes))
        for _ in range(2):
            runner.launch(size, runner.staging(size))()
    progress(what, len(sizes), len(sizes))
    runner.programs.sealed = True


def _launch_all(runner: CudaGraphRunner, sizes: list[Size], prompts: Callable[[], None]) -> None:
    """Launch every kernel once; the kernels are the same for any number of rows or prompt nodes."""
    for size in {size._replace(rows=1): size for size in sizes}.values():
        runner.work(size)
    prompts()
