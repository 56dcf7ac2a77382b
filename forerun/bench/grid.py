"""Every setting of a way to draft, on one loaded model: steps x top-k x draft tokens x batch.

What SGLang's bench_speculative.py does with a server per setting, without a restart. Each setting
answers the same prompts as plain decoding, in alternation with it, and no figure stands without the
number of answers that were equal.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice, product
from statistics import median
from typing import Any

import numpy as np

from forerun.bench.paired import median_interval
from forerun.bench.prove import Answers, answers, encode, first_difference
from forerun.bench.workload import Prompt, spread
from forerun.build.engine import Target
from forerun.build.tuned import Setting
from forerun.client.completion import acceptance_length, make_request
from forerun.engine.request import Request
from forerun.errors import ConfigError
from forerun.options.algorithms import check_shape
from forerun.options.config import EngineConfig

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Grid:
    """What to measure.

    settings     compared with plain decoding; see `settings_of`
    batches      sequences at once
    tokens       output tokens per prompt, end of text ignored
    repeats      each setting runs so often per batch; medians are shown
    temperature  of every request; prompt i has seed i
    """

    prompts: tuple[Prompt, ...]
    settings: tuple[Setting, ...]
    batches: tuple[int, ...]
    tokens: int = 64
    repeats: int = 3
    temperature: float = 0.0

    @property
    def runs(self) -> int:
        """Pairs of runs per batch."""
        return self.repeats * len(self.settings)


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting at one batch size, over all repeats.

    speed, ms_per_step  medians: output tokens per second of all sequences; milliseconds of a step
    ratio               median of speed over that of the plain run beside it
    low, high           where the true one lies, with this confidence: see median_interval
    acceptance_length   tokens per sequence and step; 1.0 = nothing was accepted
    accept_rate         accepted draft tokens over verified ones; 0.0 where none was made
    identical, answers  answers equal to plain decoding one at a time, of so many
    """

    setting: Setting
    batch: int
    speed: float
    ms_per_step: float
    ratio: float
    low: float
    high: float
    confidence: float
    acceptance_length: float
    accept_rate: float
    identical: int
    answers: int


def settings_of(
    config: EngineConfig, steps: Sequence[int], topks: Sequence[int], tokens: Sequence[int]
) -> tuple[list[Setting], list[str]]:
    """All combinations that `config`'s method can draft, and a sentence for each that it cannot.

    `tokens` count the last accepted token. Raises ConfigError where none is left.
    """
    found: list[Setting] = []
    refused: list[str] = []
    method = config.algorithm
    for deep, wide, most in product(steps, topks or (None,), tokens):
        try:
            if most < 2:
                raise ConfigError(f"{most} draft tokens are the last accepted one: none is drafted")
            check_shape(method, deep, wide, most)
            setting = Setting(method.name, most, deep, "fixed", wide)
            setting.on(config)
            found.append(setting)
        except ConfigError as error:
            refused.append(str(error))
    if not found:
        raise ConfigError("no setting of the grid can be drafted: " + refused[0])
    return found, refused


def measure(
    target: Target,
    grid: Grid,
    progress: Progress = lambda *_: None,
    cells: list[Cell] | None = None,
) -> list[Cell]:
    """Run the grid. Raises ContextError where a prompt does not fit, EngineError.

    cells  takes what is measured; after a KeyboardInterrupt it has all settings that ran at least
           once
    """
    plain = replace(target.config, speculative_algorithm="OFF")
    cells = [] if cells is None else cells
    draw = np.random.default_rng(0)
    for batch in grid.batches:
        requests = _requests(target, grid, batch)
        reference = answers(target, plain, requests, 1)  # Also warms up.
        pairs: dict[Setting, list[tuple[Answers, Answers]]] = {s: [] for s in grid.settings}
        try:
            for number, setting in enumerate(_visits(grid, draw)):
                progress(f"{batch} at once: {setting.name}", number, grid.runs)
                sides = [plain, setting.on(target.config)]
                first = int(draw.integers(2))
                runs = {
                    side: answers(target, sides[side], requests, batch)
                    for side in (first, 1 - first)
                }
                pairs[setting].append((runs[0], runs[1]))
            progress(f"{batch} at once", 1, 1)
        finally:
            cells += [
                _cell(setting, batch, reference, runs) for setting, runs in pairs.items() if runs
            ]
    return cells


def best(cells: Sequence[Cell]) -> Setting:
    """The setting with the largest ratio in the batch that gains most."""
    return max(cells, key=lambda cell: cell.ratio).setting


def as_dict(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Plain values."""
    return [asdict(cell) | {"name": cell.setting.name} for cell in cells]


def _visits(grid: Grid, draw: np.random.Generator) -> Iterator[Setting]:
    """Every setting once per repeat, in an order drawn anew."""
    for _ in range(grid.repeats):
        for number in draw.permutation(len(grid.settings)).tolist():
            yield grid.settings[number]


def _requests(target: Target, grid: Grid, batch: int) -> list[Request]:
    count = max(4, 2 * batch)
    prompts = spread(grid.prompts, min(count, len(grid.prompts)))
    return [
        make_request(
            encode(target, prompt, grid.tokens),
            max_tokens=grid.tokens,
            temperature=grid.temperature,
            seed=index,
            ignore_eos=True,
        )
        for index, prompt in enumerate(islice(cycle(prompts), count))
    ]


def _cell(
    setting: Setting, batch: int, reference: Answers, runs: list[tuple[Answers, Answers]]
) -> Cell:
    done = [item for _, found in runs for item in found.done]
    expected = [item for _ in runs for item in reference.done]
    stats = [item.stats for item in done if item.stats]
    drafted = sum(item.draft_tokens for item in stats)
    ratio = median_interval([_speed(found) / _speed(before) for before, found in runs])
    return Cell(
        setting=setting,
        batch=batch,
        speed=median(_speed(found) for _, found in runs),
        ms_per_step=median(_ms_per_step(found, batch) for _, found in runs),
        ratio=ratio.middle,
        low=ratio.low,
        high=ratio.high,
        confidence=ratio.confidence,
        acceptance_length=acceptance_length([item.stats for item in done]),
        accept_rate=sum(item.accepted for item in stats) / drafted if drafted else 0.0,
        identical=sum(
            first_difference(a.tokens, b.tokens) is None
            for a, b in zip(expected, done, strict=True)
        ),
        answers=len(done),
    )


def _speed(run: Answers) -> float:
    return sum(len(item.tokens) for item in run.done) / run.seconds


def _ms_per_step(run: Answers, batch: int) -> float:
    """Of the batch's steps: each sequence counts its own."""
    steps = sum(item.stats.steps for item in run.done if item.stats)
    return 1000.0 * run.seconds * min(batch, len(run.done)) / max(1, steps)
