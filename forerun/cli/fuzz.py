"""`forerun prove --fuzz`: random batches of requests, each answer compared with that of the same
request alone.
"""

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from time import monotonic

from forerun.cli.console import bars, emit, say
from forerun.measure.fuzz import Fuzzer, Report
from forerun.measure.workload import read_prompts
from forerun.options.config import EngineConfig, exact
from forerun.options.flags import configured

MINUTES = 2.0
"""Default duration, without --minutes and --cases."""


def fuzz(arguments: argparse.Namespace) -> int:
    """Search for an answer that depends on its batch. Returns 1 if one is found, else 0."""
    config = exact(configured(EngineConfig, arguments))
    fuzzer = Fuzzer(config, tuple(read_prompts(arguments.prompts)), arguments.seed)
    enough, total = _limit(arguments)
    with closing(fuzzer), bars() as progress:

        def report_and_check(report: Report) -> bool:
            progress("cases", report.cases, total)
            return enough(report)

        report = fuzzer.run(report_and_check, arguments.case or 1)
    emit(arguments, asdict(report), lambda: _show(report, arguments.seed))
    return 0 if report.failure is None and report.accepted else 1


def _limit(arguments: argparse.Namespace) -> tuple[Callable[[Report], bool], int]:
    """Return the function that decides when to stop, and the number of cases, 0 = unknown."""
    cases = 1 if arguments.case else arguments.cases
    if cases is not None:
        return lambda report: report.cases >= cases, int(cases)
    end = monotonic() + 60.0 * (arguments.minutes or MINUTES)
    return lambda report: monotonic() > end, 0


def _show(report: Report, seed: int) -> None:
    say(
        f"{report.cases} cases, {report.answers} answers, {report.tokens:,} tokens; "
        f"{report.draft_tokens:,} draft tokens, {report.accepted:,} accepted; "
        f"{report.preemptions} preemptions, {report.cached_tokens:,} prompt tokens from the cache."
    )
    if report.failure is not None:
        say(f"A case fails: {report.failure.what}")
        say(f"Again, with the same options: --fuzz --seed {seed} --case {report.failure.number}")
    elif not report.accepted:
        say("NOTHING PROVED: no draft token was accepted.")
    else:
        say("No answer differs from the one that its request gets alone, without speculation.")
