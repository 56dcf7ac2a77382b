"""The picture of `forerun bench --speculative-grid`. Needs matplotlib (the extra "plots")."""

from collections.abc import Sequence
from pathlib import Path

from forerun.bench.grid import Cell


def draw(path: Path, cells: Sequence[Cell], title: str) -> None:
    """Acceptance length against milliseconds per step, a colour per batch; the frontier joined.

    A setting is on the frontier if no other of its batch is faster than it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for batch in dict.fromkeys(cell.batch for cell in cells):
        mine = [cell for cell in cells if cell.batch == batch]
        points = axes.scatter(
            [cell.ms_per_step for cell in mine],
            [cell.acceptance_length for cell in mine],
            label=f"{batch} at once",
        )
        edge = frontier(mine)
        axes.plot(
            [cell.ms_per_step for cell in edge],
            [cell.acceptance_length for cell in edge],
            color=points.get_facecolor()[0],
        )
        for cell in edge:
            at = (cell.ms_per_step, cell.acceptance_length)
            axes.annotate(f"{cell.setting.name} ({cell.ratio:.2f})", at, fontsize="x-small")
    axes.set_xlabel("milliseconds per step")
    axes.set_ylabel("tokens per step (in brackets: speed over plain decoding)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def frontier(cells: Sequence[Cell]) -> list[Cell]:
    """Those that no other beats in both acceptance length and time, by time."""
    edge: list[Cell] = []
    for cell in sorted(cells, key=lambda cell: (cell.ms_per_step, -cell.acceptance_length)):
        if not edge or cell.acceptance_length > edge[-1].acceptance_length:
            edge.append(cell)
    return edge
