"""`forerun tune`: finds the fastest speculation settings on this machine, and stores them for
`serve` and `run`.
"""

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from time import strftime

from rich.table import Table

from forerun.build.tuned import Setting, forget, save
from forerun.cli.console import bars, emit, open_shown, out, say
from forerun.errors import ConfigError, reason_of
from forerun.hub.catalog import open_model
from forerun.machine import stamp
from forerun.measure.pictures import draw_ratios
from forerun.measure.report import columns
from forerun.measure.sweep import OFF, Cell, Sweep, as_dict, default_settings, halving, verdict
from forerun.measure.workload import read_prompts
from forerun.options.config import EngineConfig
from forerun.options.flags import configured


def main(arguments: argparse.Namespace) -> int:
    """Run the command: measures settings and stores the best. Raises ConfigError if speculation is
    off.
    """
    config = configured(EngineConfig, arguments)
    if arguments.forget:
        return _forget(config)
    if not config.speculates:
        raise ConfigError("there is nothing to tune with speculation off; choose a drafter.")
    if arguments.out:
        _check_picture(Path(arguments.out))
    prompts, batches = tuple(read_prompts(arguments.prompts)), arguments.batches
    config = replace(config, max_sequences=max(batches), policy="adaptive")
    with closing(open_shown(config)) as target:
        if not target.config.speculates:
            raise ConfigError("there is nothing to tune: the draft cannot be used.")
        sweep = Sweep(prompts, default_settings(target.config), batches, arguments.tokens)
        with bars() as progress:
            cells = halving(target, sweep, progress)
    fastest, found = verdict(cells)
    facts = {"best": fastest and asdict(fastest), "cells": as_dict(cells), "model": target.name}
    facts |= {"machine": stamp(), "time": strftime("%Y-%m-%d %H:%M:%S")}
    emit(arguments, facts, lambda: out.print(table(cells, fastest, target.name)))
    different = sum(cell.answers - cell.identical for cell in cells)
    if different:
        say(f"{different} answers differed from plain decoding: run `forerun prove` before serving")
    say(f"{found} ({save(target.config, fastest, facts)})" if fastest else found)
    if arguments.out:
        _draw(Path(arguments.out), cells, fastest, target.name)
    return 0


def _forget(config: EngineConfig) -> int:
    name = "toy" if config.toy else open_model(config.model, revision=config.revision).name
    count = forget(name)
    say(f"{name}: {count} profiles deleted; the defaults apply again")
    return 0


def table(cells: Sequence[Cell], fastest: Setting | None, title: str) -> Table:
    """Return a table with a row per setting and a column per batch size: tokens per second of plain
    decoding, and of other settings the speed over it, the tokens per step and the last round.
    """
    batches = list(dict.fromkeys(cell.batch for cell in cells))
    names = ("setting", *(f"{batch} at once" for batch in batches))
    view = columns(f"{title}: speed over plain decoding (tokens per step)", names)
    by_setting = {(cell.setting, cell.batch): cell for cell in cells}
    for setting in dict.fromkeys(cell.setting for cell in cells):
        cells_text = [
            f"{cell.speed:.0f} tokens/s"
            if setting == OFF
            else f"{cell.ratio:.2f} ({cell.acceptance_length:.2f}), round {cell.rounds}"
            for cell in (by_setting[setting, batch] for batch in batches)
        ]
        view.add_row(setting.name, *cells_text, style="bold" if setting == fastest else None)
    return view


def _check_picture(path: Path) -> None:
    """Raise ConfigError if no picture can be written to `path`; called before the measurement."""
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path}: there is no folder {path.parent}.")
    if path.suffix != ".png":
        raise ConfigError(f"--out {path}: the picture is a PNG; let its name end in .png.")
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file for the picture.")


def _draw(path: Path, cells: Sequence[Cell], fastest: Setting | None, title: str) -> None:
    """Draw the ratios as PNG, if matplotlib is installed. Raises ConfigError if the file cannot be
    written.
    """
    if find_spec("matplotlib") is None:
        say("no picture: matplotlib is not installed (pip install 'forerun[plots]')")
        return
    try:
        draw_ratios(path, cells, fastest, title)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {reason_of(error)}.") from error
    say(f"wrote {path}")
