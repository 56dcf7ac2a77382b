"""The benchmark's picture. Needs matplotlib (the extra "plots")."""

from collections.abc import Sequence
from pathlib import Path

from forerun.bench.report import Level


def draw(path: Path, levels: Sequence[Level], title: str) -> None:
    """Throughput and time to first text over concurrency, one line per side, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    speed, wait = figure.subplots(1, 2)
    for side in dict.fromkeys(level.side for level in levels):
        mine = [level for level in levels if level.side == side]
        at_once = [level.at_once for level in mine]
        speed.plot(at_once, [level.throughput for level in mine], marker="o", label=side)
        answered = [level for level in mine if level.first_ms]
        wait.plot(
            [level.at_once for level in answered],
            [level.first_ms["p50"] for level in answered],
            marker="o",
            label=side,
        )
    speed.set_ylabel("output tokens per second, all requests")
    wait.set_ylabel("time to first text, median, ms")
    at = sorted({level.at_once for level in levels})
    for axes in (speed, wait):
        axes.set_xlabel("requests at once")
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [str(count) for count in at])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(title="speculation")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
