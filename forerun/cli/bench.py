"""`forerun bench`: measures any OpenAI endpoint under load."""

import argparse
import asyncio
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import cycle, islice
from math import inf
from time import strftime
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from forerun.cli.console import bars, emit_json, numbered, out, say
from forerun.cli.layers import PREFIX
from forerun.errors import ConfigError
from forerun.machine import stamp
from forerun.measure import report
from forerun.measure.client import Endpoint, body_of, find_model, load_level
from forerun.measure.launch import launched
from forerun.measure.paired import Interval
from forerun.measure.report import Level
from forerun.measure.workload import (
    LEVELS,
    GeneratedPrompts,
    Lengths,
    Prompt,
    labelled,
    read_prompts,
    spread,
    words_of,
)
from forerun.options.config import EngineConfig, SamplingConfig
from forerun.options.flags import configured

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
"""Untimed requests per side at the start."""
RATED = 64
"""Requests of a level with --rate if no number is given."""
LABEL_TOKENS = 10
"""Approximate length in tokens of the label that makes a prompt unique."""
COUNTED = 50, 200
"""Words of the two prompts from which the number of tokens per word is estimated."""


@dataclass(frozen=True, slots=True)
class LoadSweep:
    """The measurements to make. Sides alternate within a repeat, so that drift affects them
    equally.

    rate         requests per second, or inf
    completions  whether to use /completions instead of /chat/completions
    """

    prompts: tuple[Prompt, ...]
    levels: tuple[int, ...]
    sides: tuple[str, ...]
    repeats: int
    requests: int | None
    lengths: Lengths
    rate: float
    completions: bool

    def count(self, at_once: int) -> int:
        """Return the number of requests of a level with `at_once` in flight."""
        return self.requests or max(8, 2 * at_once)


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 0, or 1 if a request failed. Raises ForerunError for an endpoint or
    options that cannot be measured.
    """
    if not (arguments.url or arguments.launch):
        raise ConfigError("what is measured? Give --url URL, or --launch to start a server here.")
    sampling, sweep = configured(SamplingConfig, arguments), _sweep(arguments)
    config = configured(EngineConfig, arguments)
    if arguments.launch:
        if arguments.api_key:
            raise ConfigError("--api-key is for --url; a launched server needs none.")
        with launched(config) as url:
            endpoint = Endpoint(url, find_model(url, "", None))
            levels, facts = _measure(endpoint, sweep, sampling, config)
    else:
        _refuse_engine_flags(arguments)
        model = config.model if config.model != EngineConfig().model else None
        url = _with_version(arguments.url)
        endpoint = Endpoint(url, find_model(url, arguments.api_key, model), arguments.api_key)
        levels, facts = _measure(endpoint, sweep, sampling, None)
    if arguments.json:
        emit_json(report.as_dict(levels, facts))
    else:
        out.print(report.table(levels, f"{facts['model']} at {facts['url']}"))
        for at_once, ratio in facts["on_over_off"].items():
            out.print(f"on over off, {at_once} at once: {report.worded(ratio)}")
    for level in levels:
        if level.errors:
            say(f"{level.errors} of {level.requests} requests failed, first: {level.first_error}")
            if "no_chat_template" in str(level.first_error):
                say("A base model is measured with --completions.")
    if facts["interrupted"]:
        raise KeyboardInterrupt
    return 1 if any(level.errors for level in levels) else 0


def _with_version(url: str) -> str:
    """Return the base URL of an OpenAI API, with /v1 appended if it has no path, as in other
    commands.
    """
    with suppress(ValueError):  # `find_model` refuses an invalid address.
        if urlsplit(url).path.strip("/"):
            return url
    return f"{url.rstrip('/')}/v1"


def _refuse_engine_flags(arguments: argparse.Namespace) -> None:
    """Raise ConfigError naming an engine's option on the command line or in a file, because the
    measured server already runs with its own. FORERUN_* are ignored: they may be meant for that
    server.
    """
    own = {item.name for item in fields(EngineConfig)} - {"model", "draft_on_error"}
    for name, where in arguments.written.items():
        if name in own and not where.startswith(PREFIX):
            raise ConfigError(f"{where} is for --launch; the server at --url is already running.")


def _sweep(arguments: argparse.Namespace) -> LoadSweep:
    if arguments.repeats < 1 or (arguments.requests is not None and arguments.requests < 1):
        raise ConfigError("repeats and requests must be 1 or more.")
    if arguments.range_ratio < 1.0 and not (arguments.input_len or arguments.output_len):
        raise ConfigError("--range-ratio needs --input-len or --output-len.")
    if arguments.prompts and arguments.input_len:
        raise ConfigError("--input-len makes prompts of its own; leave --prompts out.")
    kind = arguments.speculative or ("both" if arguments.launch else "as-is")
    # With --rate, requests do not wait for others.
    alone = (arguments.requests or RATED,) if arguments.rate < inf else LEVELS
    return LoadSweep(
        prompts=tuple(read_prompts(arguments.prompts)),
        levels=arguments.concurrency or alone,
        sides=SIDES[kind],
        repeats=arguments.repeats,
        requests=arguments.requests or (RATED if arguments.rate < inf else None),
        lengths=Lengths(arguments.input_len, arguments.output_len, arguments.range_ratio),
        rate=arguments.rate,
        completions=arguments.completions,
    )


def _measure(
    endpoint: Endpoint, sweep: LoadSweep, sampling: SamplingConfig, config: EngineConfig | None
) -> tuple[list[Level], dict[str, Any]]:
    facts = {
        "model": endpoint.model,
        "url": endpoint.url,
        "time": strftime("%Y-%m-%d %H:%M:%S"),
        "machine": stamp(),
        "ask": asdict(sampling),
        "config": asdict(config) if config else None,
        "repeats": sweep.repeats,
    }
    levels: list[Level] = []
    ratios: dict[int, Interval] = {}
    interrupted = False
    runs = len(sweep.levels) * sweep.repeats * len(sweep.sides)
    try:
        with bars() as progress:
            work = _all_levels(endpoint, sweep, sampling, numbered(progress, runs), levels, ratios)
            asyncio.run(work)
    except KeyboardInterrupt:
        if not levels:
            raise
        interrupted = True
    return levels, facts | {"on_over_off": ratios, "interrupted": interrupted}


async def _all_levels(
    endpoint: Endpoint,
    sweep: LoadSweep,
    sampling: SamplingConfig,
    progress: Callable[[str, int, int], None],
    levels: list[Level],
    ratios: dict[int, Interval],
) -> None:
    """Fill `levels` with the medians of every level and side, and `ratios` with the ratio of on to
    off by level; if interrupted, with those of the complete repeats.
    """
    requests = Requests(endpoint, sweep, sampling)
    await requests.prepare()
    for at_once in sweep.levels:
        results: dict[str, list[Level]] = {side: [] for side in sweep.sides}
        # Alternate the order: the first of a pair runs on a colder machine.
        order = [
            (repeat, side)
            for repeat in range(sweep.repeats)
            for side in sweep.sides[:: -1 if repeat % 2 else 1]
        ]
        try:
            for repeat, side in order:
                bodies = requests.bodies(side, sweep.count(at_once), f"{repeat}-{at_once}")
                name = f"{at_once} at once, speculation {side}, repeat {repeat + 1}"
                timings, seconds = await load_level(
                    endpoint, bodies, at_once, _reporter(progress, name, len(bodies)), sweep.rate
                )
                results[side].append(report.one_repeat(side, at_once, timings, seconds))
        finally:
            rounds = min(map(len, results.values()))
            levels += [report.median_of(done[:rounds]) for done in results.values() if rounds]
            if len(results) == 2 and rounds:
                pair = (results[side][:rounds] for side in ("on", "off"))
                if ratio := report.ratio_of(*pair):
                    ratios[at_once] = ratio


def _reporter(
    progress: Callable[[str, int, int], None], name: str, total: int
) -> Callable[[int], None]:
    return lambda done: progress(name, done, total)


class Requests:
    """The bodies of a sweep's requests. No two prompts share a prefix; otherwise a server's prefix
    cache would speed up every repeat but the first.
    """

    def __init__(self, endpoint: Endpoint, sweep: LoadSweep, sampling: SamplingConfig) -> None:
        self._endpoint, self._sweep, self._ask = endpoint, sweep, sampling
        self._made: GeneratedPrompts | None = None
        self._run = secrets.token_hex(3)  # So that prompts differ between runs.

    async def prepare(self) -> None:
        """Warm the server up, and estimate the tokens per word if prompts are generated. Raises
        ConfigError if the server reports no token counts.
        """
        if self._sweep.lengths.prompt is not None:
            counts: dict[int, int] = {}
            for words in COUNTED:
                prompt = words_of(words, np.random.default_rng(words))
                body = self._body(prompt, "as-is", replace(self._ask, max_tokens=8))
                (timing,), _ = await load_level(self._endpoint, [body], 1)
                counts[words] = timing.prompt_tokens
                if not timing.prompt_tokens:
                    why = timing.error or "its usage has no prompt_tokens"
                    raise ConfigError(
                        f"--input-len needs a server that counts prompt tokens: {why}."
                    )
            self._made = GeneratedPrompts(counts)
        for side in self._sweep.sides:
            await load_level(self._endpoint, self.bodies(side, WARM_UP, "warm-up"), 1)

    def bodies(self, side: str, count: int, tag: str) -> list[dict[str, Any]]:
        """Return `count` request bodies, of evenly spaced prompts or generated ones."""
        sweep, label = self._sweep, f"Request {self._run}-{side}-{tag}-"
        # Both sides of a repeat get requests of the same lengths.
        random = np.random.default_rng(list(tag.encode()))
        prompts: Iterable[Prompt] = cycle(spread(sweep.prompts, min(count, len(sweep.prompts))))
        if (made_prompts := self._made) is not None and (
            longest := sweep.lengths.prompt
        ) is not None:
            lengths = [sweep.lengths.draw(longest, random) for _ in range(count)]
            prompts = [made_prompts.make(length - LABEL_TOKENS, random) for length in lengths]
        bodies: list[dict[str, Any]] = []
        for index, prompt in enumerate(islice(prompts, count)):
            sampling = self._ask
            if sweep.lengths.answer is not None:
                max_tokens = sweep.lengths.draw(sweep.lengths.answer, random)
                sampling = replace(sampling, max_tokens=max_tokens, ignore_eos=True)
            bodies.append(self._body(labelled(prompt, f"{label}{index}. "), side, sampling))
        return bodies

    def _body(self, prompt: Prompt, side: str, sampling: SamplingConfig) -> dict[str, Any]:
        completions = self._sweep.completions
        return body_of(prompt, self._endpoint.model, sampling, FIELDS[side], completions)
