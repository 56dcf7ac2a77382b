"""`forerun bench`: any OpenAI endpoint under load."""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from time import strftime
from typing import Any
from urllib.parse import urlsplit

from forerun.cli.console import bars, emit_json, out, say
from forerun.errors import ConfigError
from forerun.machine import stamp
from forerun.measure import report
from forerun.measure.client import Endpoint, body_of, find_model, load_level
from forerun.measure.files import check_folder, write
from forerun.measure.launch import launched
from forerun.measure.pictures import draw_load
from forerun.measure.report import Level
from forerun.measure.workload import Prompt, labelled, read_prompts, spread
from forerun.options.config import AskConfig, EngineConfig
from forerun.options.flags import command_line, configured

SIDES: dict[str, tuple[str, ...]] = {
    "as-is": ("as-is",),
    "on": ("on",),
    "off": ("off",),
    "both": ("on", "off"),
}
FIELDS: dict[str, dict[str, Any] | None] = {
    "as-is": None,
    "on": {"enabled": True},
    "off": {"enabled": False},
}
WARM_UP = 2
"""Requests per side before anything is timed."""


@dataclass(frozen=True, slots=True)
class LoadSweep:
    """The measurements to make: sides alternate within a repeat, so that drift hits them alike."""

    prompts: tuple[Prompt, ...]
    levels: tuple[int, ...]
    sides: tuple[str, ...]
    repeats: int
    requests: int | None

    def count(self, at_once: int) -> int:
        """Return how many requests a level of so many at once makes."""
        return self.requests or max(8, 2 * at_once)


def main(arguments: argparse.Namespace) -> int:
    """Run `forerun bench`: 0, or 1 where a request failed. Raises ForerunError for what cannot be
    measured.
    """
    if arguments.out:
        check_folder(Path(arguments.out))
    ask, sweep = configured(AskConfig, arguments), _sweep(arguments)
    config = configured(EngineConfig, arguments)
    if arguments.launch:
        if arguments.api_key:
            raise ConfigError("--api-key is for --url; a launched server needs none.")
        with launched(config) as url:
            endpoint = Endpoint(url, find_model(url, "", None))
            levels, facts = _measure(endpoint, sweep, ask, config)
    else:
        _refuse_engine_flags(config)
        wanted = config.model if config.model != EngineConfig().model else None
        url = _with_version(arguments.url)
        endpoint = Endpoint(url, find_model(url, arguments.api_key, wanted), arguments.api_key)
        levels, facts = _measure(endpoint, sweep, ask, None)
    result, title = report.as_dict(levels, facts), f"{facts['model']} at {facts['url']}"
    if arguments.json:
        emit_json(result)
    else:
        out.print(report.table(levels, title))
    if arguments.out:
        written = write(
            Path(arguments.out), "report", result, lambda path: draw_load(path, levels, title)
        )
        say("wrote " + ", ".join(map(str, written)))
    for level in levels:
        if level.errors:
            say(f"{level.errors} of {level.requests} requests failed, first: {level.first_error}")
    return 1 if any(level.errors for level in levels) else 0


def _with_version(url: str) -> str:
    """The address of an OpenAI API; /v1 where it has no path, as other commands take it."""
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"


def _refuse_engine_flags(config: EngineConfig) -> None:
    """A server that runs already has its own. Raises ConfigError naming the flag."""
    usual = EngineConfig()
    given = command_line(replace(config, model=usual.model, draft_on_error=usual.draft_on_error))
    if given:
        raise ConfigError(f"{given[0]} is for --launch; the server at --url is already running.")


def _sweep(arguments: argparse.Namespace) -> LoadSweep:
    path = Path(arguments.prompts) if arguments.prompts else None
    if arguments.repeats < 1 or (arguments.requests is not None and arguments.requests < 1):
        raise ConfigError("repeats and requests must be 1 or more.")
    kind = arguments.speculative or ("both" if arguments.launch else "as-is")
    return LoadSweep(
        prompts=tuple(read_prompts(path)),
        levels=arguments.concurrency,
        sides=SIDES[kind],
        repeats=arguments.repeats,
        requests=arguments.requests,
    )


def _measure(
    endpoint: Endpoint, sweep: LoadSweep, ask: AskConfig, config: EngineConfig | None
) -> tuple[list[Level], dict[str, Any]]:
    facts = {
        "model": endpoint.model,
        "url": endpoint.url,
        "time": strftime("%Y-%m-%d %H:%M:%S"),
        "machine": stamp(),
        "ask": asdict(ask),
        "config": asdict(config) if config else None,
        "repeats": sweep.repeats,
    }
    with bars() as progress:
        return asyncio.run(_all_levels(endpoint, sweep, ask, progress)), facts


async def _all_levels(
    endpoint: Endpoint, sweep: LoadSweep, ask: AskConfig, progress: Callable[[str, int, int], None]
) -> list[Level]:
    levels: list[Level] = []
    for side in sweep.sides:
        warm = _bodies(endpoint, sweep.prompts, side, ask, WARM_UP, "warm-up")
        await load_level(endpoint, warm, 1)
    for at_once in sweep.levels:
        results: dict[str, list[Level]] = {side: [] for side in sweep.sides}
        for repeat in range(sweep.repeats):
            # The other order every other time: the first of a pair finds a colder machine.
            for side in sweep.sides[:: -1 if repeat % 2 else 1]:
                count = sweep.count(at_once)
                bodies = _bodies(endpoint, sweep.prompts, side, ask, count, f"{repeat}-{at_once}")
                name = f"{at_once} at once, speculation {side}, repeat {repeat + 1}"
                timings, seconds = await load_level(
                    endpoint, bodies, at_once, _reporter(progress, name, count)
                )
                results[side].append(report.one_repeat(side, at_once, timings, seconds))
        levels += [report.median_of(repeats) for repeats in results.values()]
    return levels


def _reporter(
    progress: Callable[[str, int, int], None], name: str, total: int
) -> Callable[[int], None]:
    return lambda done: progress(name, done, total)


def _bodies(
    endpoint: Endpoint, prompts: Sequence[Prompt], side: str, ask: AskConfig, count: int, tag: str
) -> list[dict[str, Any]]:
    """`count` requests over evenly spread prompts.

    Each prompt begins with a label of its own, or a server's prefix cache would answer for the
    prompt of every repeat but the first.
    """
    chosen = spread(prompts, min(count, len(prompts)))
    return [
        body_of(
            labelled(prompt, f"Request {side}-{tag}-{index}. "), endpoint.model, ask, FIELDS[side]
        )
        for index, prompt in enumerate(islice(cycle(chosen), count))
    ]
