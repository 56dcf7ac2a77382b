"""`forerun bench --speculative-grid`: settings of speculation side by side, without a server."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import strftime

from rich.table import Table

from forerun.build.target import Target
from forerun.build.tuned import save
from forerun.cli.argument_types import refuse_load
from forerun.cli.console import bars, emit, open_shown, out, say
from forerun.errors import ConfigError
from forerun.machine import stamp
from forerun.measure.files import check_folder, write
from forerun.measure.pictures import draw_frontier
from forerun.measure.report import columns
from forerun.measure.sweep import Cell, Sweep, as_dict, combinations, every, verdict
from forerun.measure.workload import LEVELS, read_prompts
from forerun.options.config import AskConfig, EngineConfig
from forerun.options.flags import configured

TOPK = (1, 4)
"""Default widths; the other defaults are those of the options."""


def main(arguments: argparse.Namespace) -> int:
    """Run the command. 1 where an answer differed from plain decoding's."""
    if arguments.out:
        check_folder(Path(arguments.out))
    refuse_load(arguments, "--speculative-grid")
    config = configured(EngineConfig, arguments)
    if not config.speculates:
        raise ConfigError(
            "the grid measures drafting, but speculative-algorithm is OFF; choose another."
        )
    ask = configured(AskConfig, arguments)
    config = replace(config, max_sequences=max(arguments.concurrency or LEVELS), policy="fixed")
    target = open_shown(config)
    cells: list[Cell] = []
    interrupted = False
    try:
        sweep = _sweep(target, arguments, ask)
        batches, pairs = ", ".join(map(str, sweep.batches)), len(sweep.batches) * sweep.runs
        say(
            f"{len(sweep.settings)} settings, {sweep.repeats} times at each of {batches} at once: "
            f"{pairs} pairs of runs; results so far are kept if you interrupt it"
        )
        with bars() as progress:
            every(target, sweep, progress, cells)
    except KeyboardInterrupt:
        if not cells:
            raise
        interrupted = True
    finally:
        target.close()
    facts = {"model": target.name, "machine": stamp(), "time": strftime("%Y-%m-%d %H:%M:%S")}
    result = facts | {"interrupted": interrupted, "cells": as_dict(cells)}
    emit(arguments, result, lambda: out.print(table(cells, target.name)))
    if arguments.out:
        draw = partial(draw_frontier, cells=cells, title=target.name)
        say(f"wrote {write(Path(arguments.out), 'grid', result, draw)[0]}")
    if arguments.keep and not interrupted:
        setting, found = verdict(cells)
        say(found)
        if setting:
            save(target.config, setting, result)
    if interrupted:
        raise KeyboardInterrupt
    return int(any(cell.identical < cell.answers for cell in cells))


def _sweep(target: Target, arguments: argparse.Namespace, ask: AskConfig) -> Sweep:
    """Return the measurements on an opened target. Raises ConfigError if it cannot draft."""
    config = target.config
    if not config.speculates:
        raise ConfigError("there is nothing to measure: the draft cannot be used.")
    shaped = config.algorithm.max_topk == 0
    if arguments.grid_topk and shaped:
        raise ConfigError(f"--grid-topk: {config.algorithm.name} has no top-k; leave it out.")
    topks = () if shaped else arguments.grid_topk or TOPK
    settings, refused = combinations(config, arguments.grid_steps, topks, arguments.grid_tokens)
    for sentence in refused:
        say(f"left out: {sentence}")
    return Sweep(
        prompts=tuple(read_prompts(arguments.prompts)),
        settings=tuple(settings),
        batches=arguments.concurrency or LEVELS,
        tokens=ask.max_tokens,
        repeats=arguments.repeats,
        temperature=ask.temperature or 0.0,
    )


def table(cells: list[Cell], title: str) -> Table:
    """Return a table for the terminal: a row per setting and batch."""
    names = ("at once", "steps", "top-k", "draft tokens", "tokens/s", "over plain (interval)",
             "ms per step", "tokens per step", "accepted", "identical")  # fmt: skip
    view = columns(f"{title}: plain decoding beside every setting", names, left=0)
    for cell in cells:
        setting = cell.setting
        view.add_row(
            str(cell.batch),
            str(setting.speculative_num_steps),
            str(setting.speculative_eagle_topk or "-"),
            str(setting.speculative_num_draft_tokens),
            f"{cell.speed:.0f}",
            f"{cell.ratio:.2f}" + f" ({cell.low:.2f} to {cell.high:.2f})" * (cell.confidence > 0.0),
            f"{cell.ms_per_step:.1f}",
            f"{cell.acceptance_length:.2f}",
            f"{cell.accept_rate:.0%}",
            f"{cell.identical} of {cell.answers}",
        )
    return view
