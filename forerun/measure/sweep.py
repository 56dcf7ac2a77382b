"""Comparison of speculation settings with plain decoding, on one loaded model, without a restart.

The search runs in pairs: plain decoding and one setting answer the same prompts, in random order,
and every ratio is reported with the number of equal answers. The better half of the settings gets
twice as many prompts, until one is left (successive halving).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from math import exp, log
from statistics import median
from typing import Any

import numpy as np

from forerun.build.target import Target
from forerun.build.tuned import Setting
from forerun.client.completion import acceptance_length, make_request
from forerun.engine.request import Request
from forerun.measure.prove import Completions, answers, encode, first_difference
from forerun.measure.workload import Prompt, spread
from forerun.options.algorithms import capacity
from forerun.options.config import EngineConfig

Progress = Callable[[str, int, int], None]
Pair = tuple[Completions, Completions]
"""The answers of plain decoding, and those of the setting compared with it."""

OFF = Setting("OFF", 1, 0, "fixed")
SHAPES = ((2, 2), (4, 4), (8, 4), (8, 8), (16, 8), (16, 16))
"""The (nodes, depth) to try, as upper bounds of the adaptive policy and as fixed shapes."""
BUSY = 0.15
"""Noise, as a share of the speed, above which no setting is chosen. (The default model on two cores
of a Xeon, at 1 and 4 sequences: .13 and .07 on an idle machine, .26 and .20 under a load of ten.)
"""
TOPKS = (1, 4)
"""Top-k values to try if only a draft model drafts and none is configured."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The measurements to make.

    settings  to compare with plain decoding; see `default_settings`
    batches   sequences in flight
    tokens    output tokens per prompt, greedy, ignoring end-of-text
    """

    prompts: tuple[Prompt, ...]
    settings: tuple[Setting, ...]
    batches: tuple[int, ...] = (1, 4, 16)
    tokens: int = 64


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one setting at one batch size, in the last round it reached; or of plain
    decoding in all rounds.

    rounds              rounds of `halving` that it ran in; the last has the most prompts
    speed               median of the output tokens per second of all sequences
    ratio               median of its speed over that of the plain run of the same pair
    acceptance_length   tokens per sequence and step; 1.0 = nothing was accepted
    identical           how many of `answers` equal plain decoding's
    spread              90th over 10th percentile of the speed of the plain runs; None for a
                        single run
    """

    setting: Setting
    batch: int
    rounds: int
    speed: float
    ratio: float
    acceptance_length: float
    identical: int
    answers: int
    spread: float | None = 1.0

    @property
    def gain(self) -> float:
        """The ratio, capped by the tokens per step, since no step is faster than a plain one."""
        return self.ratio if self.setting == OFF else min(self.ratio, self.acceptance_length)


def default_settings(config: EngineConfig) -> tuple[Setting, ...]:
    """Return the settings to try with the drafter of a resolved configuration: SHAPES under both
    policies, and with each of TOPKS if only a draft model drafts and no top-k was configured.
    """
    method, asked = config.algorithm, config.speculative_eagle_topk
    alone = method.model and not method.lookup
    topks = (asked,) if asked or not alone else TOPKS
    shapes = [
        (nodes, depth, topk)
        for topk in topks
        for nodes, depth in SHAPES
        if not alone or nodes < capacity(depth, topk or 1)
    ]
    return tuple(
        Setting(method.name, nodes + 1, depth, policy, topk)
        for policy in ("adaptive", "fixed")
        for nodes, depth, topk in shapes
    )


def halving(target: Target, sweep: Sweep, progress: Progress = lambda *_: None) -> list[Cell]:
    """Measure by successive halving: at each batch size all settings run, then the better half with
    twice the prompts, until one is left. Returns a Cell for plain decoding and for each setting's
    last round.

    progress  called with (what, pairs so far, pairs in all)

    Raises ContextError if a prompt does not fit, EngineError if an engine fails.
    """
    cells: list[Cell] = []
    draw = np.random.default_rng(0)
    answers(target, OFF.on(target.config), _requests(target, sweep, 1), max(sweep.batches))
    for batch in sweep.batches:
        left, last = list(sweep.settings), dict[Setting, Cell]()
        plain: list[Pair] = []
        rounds = len(left).bit_length()
        for number in range(1, rounds + 1):
            requests = _requests(target, sweep, max(batch, 2 ** min(number, 3)))
            what = f"{batch} at once, round {number} of {rounds}"
            for index, setting in enumerate(left):
                progress(what, index, len(left))
                run = pair(target, setting.on(target.config), requests, batch, draw)
                plain.append((run[0], run[0]))
                last[setting] = _cell(setting, batch, number, [run])
            progress(what, len(left), len(left))
            left.sort(key=lambda setting: -last[setting].ratio)
            left = left[: max(1, len(left) // 2)]
        cells += [_cell(OFF, batch, rounds, plain), *last.values()]
    return cells


def best(cells: Sequence[Cell]) -> tuple[Setting, float]:
    """Return the setting with the highest geometric mean, over batch sizes, of its speed over plain
    decoding, and that mean; OFF if none is above 1. Only settings that won at some batch size are
    candidates. One that was dropped early at another batch size counts there with its last ratio,
    capped by the winner's, because it lost against it.
    """
    winners = {
        batch: max(
            (cell for cell in cells if cell.batch == batch and cell.setting != OFF),
            key=lambda cell: (cell.rounds, cell.gain),
        )
        for batch in {cell.batch for cell in cells}
    }
    mean = {OFF: 1.0}
    for setting in {winner.setting for winner in winners.values()}:
        mine = [cell for cell in cells if cell.setting == setting]
        logs = [log(min(cell.gain, winners[cell.batch].gain)) for cell in mine]
        mean[setting] = exp(sum(logs) / len(logs))
    fastest = max(mean, key=lambda setting: mean[setting])
    return fastest, mean[fastest]


def noise(cells: Sequence[Cell]) -> float | None:
    """Return how much two runs of the same kind may differ, as a share of the speed: half the
    spread of the plain runs, at the batch size where it is largest; None if a batch size has a
    single run.
    """
    known = {cell.batch for cell in cells if cell.spread is not None}
    if len(known) < len({cell.batch for cell in cells}):
        return None
    return max(cell.spread - 1.0 for cell in cells if cell.spread is not None) / 2.0


def verdict(cells: Sequence[Cell]) -> tuple[Setting | None, str]:
    """Return the setting worth storing, None if the best is within the noise, and a sentence on the
    result.
    """
    (fastest, gain), about = best(cells), noise(cells)
    if about is None:
        return None, "one run of plain decoding shows no noise: nothing is kept"
    if about > BUSY:
        busy = f"the machine was busy, plain decoding's own speed varied by {2 * about:.0%}"
        return None, f"{busy}: nothing is kept; measure again when it is quiet"
    if fastest != OFF and gain < 1.0 + about:
        return None, (
            f"best: {fastest.name} at {gain:.2f} of plain decoding, whose own speed varied by "
            f"{2 * about:.0%}: nothing is kept"
        )
    return fastest, f"best: {fastest.name}; serve, run and chat use it from now on"


def as_dict(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the cells as JSON values, each with its setting's name."""
    return [asdict(cell) | {"name": cell.setting.name} for cell in cells]


def pair(
    target: Target,
    config: EngineConfig,
    requests: list[Request],
    batch: int,
    draw: np.random.Generator,
) -> Pair:
    """Return plain decoding's answers and `config`'s to the same requests, `batch` in flight.
    `draw` decides which side runs first and is advanced. Raises as `halving`.
    """
    sides = [replace(config, speculative_algorithm="OFF"), config]
    first = int(draw.integers(2))
    runs = {side: answers(target, sides[side], requests, batch) for side in (first, 1 - first)}
    return runs[0], runs[1]


def _requests(target: Target, sweep: Sweep, count: int) -> list[Request]:
    prompts = spread(sweep.prompts, min(count, len(sweep.prompts)))
    return [
        make_request(
            encode(target, prompt, sweep.tokens),
            max_tokens=sweep.tokens,
            temperature=0.0,
            seed=index,
            ignore_eos=True,
        )
        for index, prompt in enumerate(islice(cycle(prompts), count))
    ]


def _cell(setting: Setting, batch: int, rounds: int, runs: Sequence[Pair]) -> Cell:
    """Return the Cell of a setting, comparing its answers with those of the plain run of each
    pair.
    """
    done = [item for _, found in runs for item in found.done]
    expected = [item for plain, _ in runs for item in plain.done]
    return Cell(
        setting=setting,
        batch=batch,
        rounds=rounds,
        speed=median(found.speed for _, found in runs),
        ratio=median(found.speed / plain.speed for plain, found in runs),
        acceptance_length=acceptance_length([item.stats for item in done]),
        identical=sum(
            first_difference(a.tokens, b.tokens) is None
            for a, b in zip(expected, done, strict=True)
        ),
        answers=len(done),
        spread=_spread([plain for plain, _ in runs]),
    )


def _spread(plain: Sequence[Completions]) -> float | None:
    """Return the 90th over the 10th percentile of the runs' speeds; None for a single run."""
    if len(plain) < 2:
        return None
    slow, fast = np.percentile([run.speed for run in plain], (10, 90)).tolist()
    return float(fast / slow)
