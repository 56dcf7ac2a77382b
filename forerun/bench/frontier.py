"""The picture of `forerun tune`. Needs matplotlib (the extra "plots")."""

from pathlib import Path

import numpy as np

from forerun.bench.tune import OFF, Tuning


def draw(path: Path, tuning: Tuning, title: str) -> None:
    """Speed over plain decoding by batch size, one line per setting, the best one thick."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    settings = list(dict.fromkeys(trial.setting for trial in tuning.trials))
    colors = colormaps["turbo"](np.linspace(0.05, 0.95, len(settings)))
    for setting, color in zip(settings, colors, strict=True):
        mine = [trial for trial in tuning.trials if trial.setting == setting]
        style = "--" if setting == OFF else "-"
        axes.plot(
            [trial.batch for trial in mine],
            [trial.ratio for trial in mine],
            style,
            color="black" if setting == OFF else color,
            marker="o",
            linewidth=3 if setting == tuning.best else 1,
            label=setting.name,
        )
    axes.set_xscale("log", base=2)
    at = sorted({trial.batch for trial in tuning.trials})
    axes.set_xticks(at, [str(count) for count in at])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("sequences at once")
    axes.set_ylabel("tokens per second over plain decoding")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
