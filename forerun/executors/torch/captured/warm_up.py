"""Preparation of captured rounds before the first request: kernels compiled, programs captured."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from forerun.executors.torch.attention.tiles import LINES
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.executor import TorchExecutor
from forerun.executors.torch.triton.record import Size


def warm_up(
    runner: CudaGraphRunner,
    eager: TorchExecutor,
    sizes: Iterable[Size],
    progress: Callable[[str, int, int], None],
) -> None:
    """Compile every kernel that prompts and rounds of these sizes, one at least, need, then capture
    the rounds; a size that is not among them is an error afterwards (Programs.sealed).

    progress  called with (what, done, total) in kernels, then in sizes

    Slots must be closed. Raises what torch raises, out of memory above all.
    """
    wanted = list(sizes)
    deepest = max(wanted, key=lambda size: size.levels)
    runner.make_room(deepest)
    progress("compiling kernels", 0, 0)
    runner.kernels.ahead(
        partial(_launch_all, runner, eager, wanted), partial(progress, "compiling kernels")
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


def _launch_all(runner: CudaGraphRunner, eager: TorchExecutor, sizes: list[Size]) -> None:
    """Launch every kernel; how many rows a round has, or nodes a prompt, makes no other kernel."""
    for size in {size._replace(rows=1): size for size in sizes}.values():
        runner.work(size)
    rehearse_prompts(eager)


def rehearse_prompts(eager: TorchExecutor) -> None:
    """Launch every kernel that prompts of any length need: of 1, 2, 4, ... tokens up to a tile, as
    far as pages and scratch reach. Writes the first pages; slot 0 must be closed.
    """
    limits, nodes = eager.limits, 1
    while nodes <= min(LINES, limits.max_nodes, limits.page_size * limits.pages):
        eager.rehearse(nodes)
        nodes *= 2
