"""Plots of measurements as PNG. They need matplotlib (the extra "plots")."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forerun.build.tuned import Setting
from forerun.measure.sweep import OFF, Cell


def draw_ratios(path: Path, cells: Sequence[Cell], best: Setting | None, title: str) -> None:
    """Write a PNG for `forerun tune`: speed over plain decoding by batch size, a line per setting,
    with `best` thick. Raises ImportError without matplotlib, OSError if the file cannot be written.
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
    """Give an axis of counts a logarithmic scale to base 2, with a tick at each count."""
    from matplotlib.ticker import NullLocator

    at = sorted(set(counts))
    axes.set_xlabel(label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [str(count) for count in at])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
