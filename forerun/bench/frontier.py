"""The picture of `forerun tune`. Needs matplotlib (the extra "plots")."""

from pathlib import Path

from forerun.bench.tune import OFF, Tuning


def draw(path: Path, tuning: Tuning, title: str) -> None:
    """Speed over plain decoding by batch size, one line per setting, the best one thick."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for setting in dict.fromkeys(trial.setting for trial in tuning.trials):
        mine = [trial for trial in tuning.trials if trial.setting == setting]
        style = "--" if setting == OFF else "-"
        axes.plot(
            [trial.batch for trial in mine],
            [trial.ratio for trial in mine],
            style,
            marker="o",
            linewidth=3 if setting == tuning.best else 1,
            label=setting.name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("sequences at once")
    axes.set_ylabel("tokens per second over plain decoding")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
