"""`forerun tune`: find the fastest way to speculate here, and keep it for `serve` and `run`."""

import argparse
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import strftime

from rich.table import Table

from forerun.bench.frontier import draw
from forerun.bench.tune import OFF, Sweep, Tuning, as_dict, settings_for, tune
from forerun.bench.workload import read_prompts
from forerun.build.tuned import forget, save
from forerun.cli.console import bars, emit_json, open_shown, out, say
from forerun.errors import ConfigError
from forerun.hub.catalog import open_model
from forerun.machine import stamp
from forerun.options.config import EngineConfig
from forerun.options.flags import configured


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    config = configured(EngineConfig, arguments)
    if arguments.forget:
        return _forget(config)
    if not config.speculates:
        raise ConfigError("there is nothing to tune with speculation off; choose a drafter.")
    if arguments.out:
        _check_picture(Path(arguments.out))
    path = Path(arguments.prompts) if arguments.prompts else None
    prompts, batches = tuple(read_prompts(path)), arguments.batches
    target = open_shown(replace(config, max_sequences=max(batches), policy="adaptive"))
    try:
        if not target.config.speculates:
            raise ConfigError("there is nothing to tune: the draft cannot be used.")
        settings = settings_for(target.config)
        sweep = Sweep(prompts, settings, batches, arguments.tokens)
        with bars() as progress:
            tuning = tune(target, sweep, progress)
    finally:
        target.close()
    facts = as_dict(tuning) | {"model": target.name, "machine": stamp()}
    facts["time"] = strftime("%Y-%m-%d %H:%M:%S")
    if arguments.json:
        emit_json(facts)
    else:
        out.print(table(tuning, target.name))
    written = save(target.config, tuning.best, facts)
    say(f"best: {tuning.best.name}; serve, run and chat use it from now on ({written})")
    if arguments.out:
        _draw(Path(arguments.out), tuning, target.name)
    return 0


def _forget(config: EngineConfig) -> int:
    name = "toy" if config.toy else open_model(config.model, revision=config.revision).name
    count = forget(name)
    say(f"{name}: {count} profiles forgotten; the defaults hold again")
    return 0


def table(tuning: Tuning, title: str) -> Table:
    """One row per setting, one column per batch size; dropped settings show when."""
    batches = list(dict.fromkeys(trial.batch for trial in tuning.trials))
    view = Table(title=f"{title}: speed over plain decoding (tokens per step)")
    view.add_column("setting")
    for batch in batches:
        view.add_column(f"{batch} at once", justify="right")
    found = {(trial.setting, trial.batch): trial for trial in tuning.trials}
    for setting in dict.fromkeys(trial.setting for trial in tuning.trials):
        trials = [found[setting, batch] for batch in batches]
        cells = [
            f"{trial.speed:.0f} tokens/s"
            if setting == OFF
            else f"{trial.ratio:.2f} ({trial.tokens_per_step:.2f}), round {trial.rounds}"
            for trial in trials
        ]
        view.add_row(setting.name, *cells, style="bold" if setting == tuning.best else None)
    return view


def _check_picture(path: Path) -> None:
    """Before minutes of work. Raises ConfigError where no picture can be written."""
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path}: there is no folder {path.parent}.")
    if path.suffix != ".png":
        raise ConfigError(f"--out {path}: the picture is a PNG; let its name end in .png.")


def _draw(path: Path, tuning: Tuning, title: str) -> None:
    """The frontier as PNG, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        say("no picture: matplotlib is not installed (pip install 'forerun[plots]')")
        return
    draw(path, tuning, title)
    say(f"wrote {path}")
