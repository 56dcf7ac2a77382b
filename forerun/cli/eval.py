"""`forerun eval`: the acceptance length of a draft on named prompt sets, compared with its
trainer's prediction.
"""

import argparse
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from forerun.cli.console import bars, emit, numbered, open_shown, out, say
from forerun.errors import ConfigError
from forerun.machine import stamp
from forerun.measure.acceptance import (
    CHAIN,
    LOOKUP,
    TREE,
    Finding,
    Question,
    alone,
    measure_shapes,
    metrics_beside,
)
from forerun.measure.report import columns
from forerun.measure.workload import read_prompts, spread
from forerun.options.config import EngineConfig
from forerun.options.flags import configured


def main(arguments: argparse.Namespace) -> int:
    """Run the command. If interrupted, prints the results so far and raises KeyboardInterrupt."""
    config = configured(EngineConfig, arguments)
    if not config.speculates:
        raise ConfigError("there is nothing to measure with speculation off; choose a drafter.")
    named = [_named(text) for text in arguments.set]
    sets: dict[str, Path | None] = dict(named) or {"built in": None}
    if twice := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise ConfigError(
            f"two sets are called {twice[0]}; give each a name of its own: --set NAME=FILE"
        )
    # Read all sets before running the first, so that a bad file does not lose minutes of results.
    chosen = {
        name: tuple(spread(read_prompts(path), arguments.count)) for name, path in sets.items()
    }
    target = open_shown(replace(config, max_sequences=arguments.group))
    findings: list[Finding] = []
    interrupted = False
    # n-gram lookup chooses the shapes of its trees itself, so one shape is enough.
    headed = target.draft is not None
    shapes = (CHAIN, TREE) if headed else (LOOKUP,)
    try:
        if not target.config.speculates:
            raise ConfigError("there is nothing to measure: the draft cannot be used.")
        chosen_one = config.speculative_algorithm.upper() != "AUTO"
        measured = target.config if chosen_one else alone(target.config)
        questions = [
            Question(name, prompts, temperature, arguments.tokens, arguments.group)
            for name, prompts in chosen.items()
            for temperature in arguments.temperatures
        ]
        with bars() as report:
            progress = numbered(report, len(questions) * (1 + len(shapes)))
            for question in questions:
                for finding in measure_shapes(target, measured, question, shapes, progress):
                    findings.append(finding)
    except KeyboardInterrupt:
        if not findings:
            raise
        interrupted = True
    finally:
        target.close()
    promised = _promised(target.config.speculative_draft_model_path)
    found = [asdict(finding) for finding in findings]
    facts = {"findings": found, "simulated_length": promised, "machine": stamp()}
    emit(arguments, facts, lambda: _show(findings, promised))
    if interrupted:
        raise KeyboardInterrupt
    return 0


def _named(text: str) -> tuple[str, Path]:
    """Return the name and path in NAME=FILE; a FILE alone is its own name."""
    name, _, path = ("", "", text) if Path(text).is_file() else text.rpartition("=")
    file = Path(path)
    if not file.is_file():
        problem = f"{file} is not a file" if file.exists() else f"there is no file {file}"
        raise ConfigError(f"{problem}; --set or --prompts takes [NAME=]FILE, a jsonl of chats")
    return name or file.stem, file


def _promised(draft: str | None) -> float | None:
    """Return the acceptance length that the trainer simulated on its held-out answers, from its
    metrics.json; None without one.
    """
    metrics = metrics_beside(draft)
    if metrics is None:
        return None
    try:
        value = json.loads(metrics.read_text(encoding="utf-8"))["best_simulated_length"]
        return float(value)
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(f"{metrics} cannot be read ({error}): what the trainer simulated is not known")
        return None


def table(findings: list[Finding]) -> Table:
    """Return a table for the terminal: a row per prompt set, draft shape and temperature."""
    names = ("prompts", "drafts", "T", "tokens per step", "agreement by position", "identical",
             "tokens/s", "over plain")  # fmt: skip
    drawn = columns("Acceptance, served", names, left=3)
    for item in findings:
        drawn.add_row(
            item.question,
            item.shape,
            f"{item.temperature:g}",
            f"{item.length:.3f}",
            " ".join(f"{share:.2f}" for share in item.agreement),
            f"{item.same} of {item.answers}",
            f"{item.speed:.1f}",
            f"{item.speed / item.plain:.2f}",
        )
    return drawn


def _show(findings: list[Finding], promised: float | None) -> None:
    out.print(table(findings))
    if promised is not None:
        say(f"The trainer's simulation on its own held-out answers: {promised:.3f}.")
