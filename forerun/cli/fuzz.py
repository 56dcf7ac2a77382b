"""`forerun prove --fuzz` and `--replay`: random requests against themselves, alone."""

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from time import monotonic

from forerun.cli.console import bars, emit, emit_json, say
from forerun.measure.fuzz import Fuzzer, Report, replay
from forerun.measure.fuzz_case import write
from forerun.measure.workload import read_prompts
from forerun.options.config import EngineConfig, exact
from forerun.options.flags import configured

MINUTES = 2.0
"""Default time, without --minutes and --cases."""


def fuzz(arguments: argparse.Namespace) -> int:
    """Search for an answer that depends on its batch. Returns 1 if one is found, else 0."""
    config = exact(configured(EngineConfig, arguments))
    fuzzer = Fuzzer(config, tuple(read_prompts(arguments.prompts)), arguments.seed)
    enough, total = _limit(arguments)
    with closing(fuzzer), bars() as progress:

        def told(report: Report) -> bool:
            progress("cases", report.cases, total)
            return enough(report)

        report = fuzzer.run(told)
    if report.failure is not None:
        write(report.failure, config, Path(arguments.reproduction))
    emit(arguments, asdict(report), lambda: _show(report, arguments.reproduction))
    return 0 if report.failure is None and report.accepted else 1


def again(arguments: argparse.Namespace) -> int:
    """Run a reproduction again: 0, or 1 where it still fails."""
    what = replay(Path(arguments.replay))
    if arguments.json:
        emit_json({"fails": what is not None, "what": what})
    elif what is None:
        say("The case passes: every answer equals that of its request alone.")
    else:
        say(f"The case fails: {what}")
    return 0 if what is None else 1


def _limit(arguments: argparse.Namespace) -> tuple[Callable[[Report], bool], int]:
    """Return when to stop, and how many cases there will be, 0 = unknown."""
    if arguments.cases is not None:
        return lambda report: report.cases >= arguments.cases, int(arguments.cases)
    end = monotonic() + 60.0 * (arguments.minutes or MINUTES)
    return lambda report: monotonic() > end, 0


def _show(report: Report, reproduction: str) -> None:
    say(
        f"{report.cases} cases, {report.answers} answers, {report.tokens:,} tokens; "
        f"{report.draft_tokens:,} draft tokens, {report.accepted:,} accepted; "
        f"{report.preemptions} preemptions, {report.cached_tokens:,} prompt tokens from the cache."
    )
    if report.failure is not None:
        say(f"A case fails: {report.failure.what}")
        say(f"Its reproduction: forerun prove --replay {reproduction}")
    elif not report.accepted:
        say("NOTHING PROVED: no draft token was accepted.")
    else:
        say("No answer differs from the one that its request gets alone, without speculation.")
