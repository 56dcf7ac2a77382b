"""`forerun bench --speculative-grid`: settings of speculation side by side, without a server."""

import argparse
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import strftime
from typing import Any

from rich.table import Table

from forerun.bench.grid import Cell, Grid, as_dict, best, measure, settings_of
from forerun.bench.grid_picture import draw
from forerun.bench.workload import read_prompts
from forerun.build.engine import Target
from forerun.build.tuned import save
from forerun.cli.console import bars, emit_json, open_shown, out, say
from forerun.errors import ConfigError
from forerun.machine import stamp
from forerun.options.config import AskConfig, EngineConfig
from forerun.options.flags import configured

TOPK = (1, 4)
"""Widths where nobody says; the other defaults are those of the options."""


def main(arguments: argparse.Namespace) -> int:
    """Run the command. 1 where an answer differed from plain decoding's."""
    config = configured(EngineConfig, arguments)
    if not config.speculates:
        raise ConfigError("there is nothing to measure with speculation off; choose a method.")
    ask = configured(AskConfig, arguments)
    config = replace(config, max_sequences=max(arguments.concurrency), policy="fixed")
    target = open_shown(config)
    cells: list[Cell] = []
    interrupted = False
    try:
        grid = _grid(target, arguments, ask)
        batches, pairs = ", ".join(map(str, grid.batches)), len(grid.batches) * grid.runs
        say(
            f"{len(grid.settings)} settings, {grid.repeats} times at each of {batches} at once: "
            f"{pairs} pairs of runs; what is measured is kept when you interrupt it"
        )
        with bars() as progress:
            measure(target, grid, progress, cells)
    except KeyboardInterrupt:
        if not cells:
            raise
        interrupted = True
    finally:
        target.close()
    facts = {"model": target.name, "machine": stamp(), "time": strftime("%Y-%m-%d %H:%M:%S")}
    result = facts | {"interrupted": interrupted, "cells": as_dict(cells)}
    if arguments.json:
        emit_json(result)
    else:
        out.print(table(cells, target.name))
    if arguments.out:
        _write(Path(arguments.out), result, cells, target.name)
    if arguments.keep and not interrupted:
        setting = best(cells)
        say(f"best: {setting.name}; serve, run and chat use it from now on")
        save(target.config, setting, result)
    if interrupted:
        raise KeyboardInterrupt
    return int(any(cell.identical < cell.answers for cell in cells))


def _grid(target: Target, arguments: argparse.Namespace, ask: AskConfig) -> Grid:
    """What to measure on an opened target. Raises ConfigError where nothing can be drafted."""
    config = target.config
    if not config.speculates:
        raise ConfigError("there is nothing to measure: the draft cannot be used.")
    shaped = config.algorithm.max_topk == 0
    if arguments.grid_topk and shaped:
        raise ConfigError(f"--grid-topk: {config.algorithm.name} has no top-k; leave it out.")
    topks = () if shaped else arguments.grid_topk or TOPK
    settings, refused = settings_of(config, arguments.grid_steps, topks, arguments.grid_tokens)
    for sentence in refused:
        say(f"left out: {sentence}")
    path = Path(arguments.prompts) if arguments.prompts else None
    return Grid(
        prompts=tuple(read_prompts(path)),
        settings=tuple(settings),
        batches=arguments.concurrency,
        tokens=ask.max_tokens,
        repeats=arguments.repeats,
        temperature=ask.temperature or 0.0,
    )


def table(cells: list[Cell], title: str) -> Table:
    """A row per setting and batch."""
    view = Table(title=f"{title}: plain decoding beside every setting")
    for name in ("at once", "steps", "top-k", "draft tokens", "tokens/s", "over plain (interval)",
                 "ms per step", "tokens per step", "accepted", "identical"):  # fmt: skip
        view.add_column(name, justify="right")
    for cell in cells:
        setting = cell.setting
        view.add_row(
            str(cell.batch),
            str(setting.speculative_num_steps),
            str(setting.speculative_eagle_topk or "-"),
            str(setting.speculative_num_draft_tokens),
            f"{cell.speed:.0f}",
            f"{cell.ratio:.2f} ({cell.low:.2f}-{cell.high:.2f})",
            f"{cell.ms_per_step:.1f}",
            f"{cell.acceptance_length:.2f}",
            f"{cell.accept_rate:.0%}",
            f"{cell.identical} of {cell.answers}",
        )
    return view


def _write(folder: Path, result: dict[str, Any], cells: list[Cell], title: str) -> None:
    """grid.json and, where matplotlib is installed, grid.png."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "grid.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        if find_spec("matplotlib"):
            draw(folder / "grid.png", cells, title)
    except OSError as error:
        raise ConfigError(f"The grid cannot be written to {folder}: {error}.") from error
    say(f"wrote {folder / 'grid.json'}")
