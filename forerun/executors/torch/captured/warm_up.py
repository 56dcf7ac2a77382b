"""What captured rounds do before the first request: kernels compiled, programs captured."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter

from forerun.executors.torch.captured.buffers import Size
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.executor import TorchExecutor
from forerun.executors.torch.geometry import LINES

log = logging.getLogger("forerun.executors.torch")

CAPTURE_SECONDS = 60.0
"""No further size is captured before the first request after this long."""


def warm_up(
    runner: CudaGraphRunner,
    eager: TorchExecutor,
    sizes: Iterable[Size],
    progress: Callable[[str, int, int], None],
) -> None:
    """Compile every kernel that rounds of these sizes and prompts need, then capture the rounds,
    within CAPTURE_SECONDS. Where all were captured, nothing is captured any more. All slots are
    closed. progress(what, done, total).
    """
    most, drafting = eager.limits.scored_nodes, runner.drafting
    wanted = [
        size for size in sizes if size.total <= most and (drafting is None or drafting.fits(size))
    ]
    deepest = max(wanted, key=lambda size: size.levels)
    if runner.future is not None:
        runner.future.grow(deepest)
    kernels, what = runner.kernels, "preparing step sizes"
    kernels.ahead(
        partial(_launch_all, runner, eager, wanted), partial(progress, "compiling kernels")
    )
    begun = perf_counter()
    for done, size in enumerate(wanted):
        if perf_counter() - begun > CAPTURE_SECONDS:
            log.warning("captured %d of %d sizes in %.0f s", done, len(wanted), CAPTURE_SECONDS)
            return
        progress(what, done, len(wanted))
        for _ in range(2):
            runner.launch(size, runner.staging(size))()
    progress(what, len(wanted), len(wanted))
    runner.only_captured()


def _launch_all(runner: CudaGraphRunner, eager: TorchExecutor, sizes: list[Size]) -> None:
    """Launch every kernel; how many rows a round has, or nodes a prompt, makes no other kernel."""
    for size in {size._replace(rows=1): size for size in sizes}.values():
        runner.work(size)
    limits, nodes = eager.limits, 1
    while nodes <= min(LINES, limits.max_nodes, limits.page_size * limits.pages):
        eager.rehearse(nodes)
        nodes *= 2
