"""Pictures of measurements, as PNG. They need matplotlib (the extra "plots")."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forerun.build.tuned import Setting
from forerun.measure.report import Level
from forerun.measure.sweep import OFF, Cell


def draw_load(path: Path, levels: Sequence[Level], title: str) -> None:
    """Write a PNG for `forerun bench`: output tokens per second and median time to first text (ms)
    over requests at once, a line per side. Raises ImportError without matplotlib, OSError for the
    file.
    """
    figure = _figure(title, 9, 4)
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
    for axes in (speed, wait):
        _counts(axes, [level.at_once for level in levels], "requests at once")
        axes.set_ylim(bottom=0)
        axes.legend(title="speculation")
    figure.savefig(path, dpi=120)


def draw_ratios(path: Path, cells: Sequence[Cell], best: Setting | None, title: str) -> None:
    """Write a PNG for `forerun tune`: speed over plain decoding by sequences at once, a line per
    setting, `best` thick. Raises ImportError without matplotlib, OSError for the file.
    """
    from matplotlib import colormaps

    figure = _figure(title, 8, 5)
    axes = figure.subplots()
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    colors = colormaps["turbo"](np.linspace(0.05, 0.95, len(settings)))
    for setting, color in zip(settings, colors, strict=True):
        mine = [cell for cell in cells if cell.setting == setting]
        axes.plot(
            [cell.batch for cell in mine],
            [cell.ratio for cell in mine],
            "--" if setting == OFF else "-",
            color="black" if setting == OFF else color,
            marker="o",
            linewidth=3 if setting == best else 1,
            label=setting.name,
        )
    _counts(axes, [cell.batch for cell in cells], "sequences at once")
    axes.set_ylabel("tokens per second over plain decoding")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _figure(title: str, wide: float, high: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(wide, high), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure


def _counts(axes: Any, counts: Sequence[int], label: str) -> None:
    """Set an axis of counts that double, with a tick at each."""
    from matplotlib.ticker import NullLocator

    at = sorted(set(counts))
    axes.set_xlabel(label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [str(count) for count in at])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
