"""Which way to speculate is fastest here: a sweep with successive halving, in one process.

Every setting runs on the same loaded model. For each batch size the settings answer a few
prompts; the better half goes on to twice as many, until one is left. Plain decoding is never
dropped: it runs in every round, beside the others, and all speeds are ratios to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from math import exp, log
from time import perf_counter
from typing import Any

from forerun.bench.workload import Prompt, spread
from forerun.build.engine import Target, encode_chat, make_engine
from forerun.build.tuned import Setting
from forerun.client.completion import acceptance_length, complete, make_request
from forerun.options.algorithms import capacity
from forerun.options.config import EngineConfig

Progress = Callable[[str, int, int], None]

OFF = Setting("OFF", 1, 0, "fixed")
SHAPES = ((2, 2), (4, 4), (8, 4), (8, 8), (16, 8), (16, 16))
"""(nodes, depth) that are tried, as a ceiling for the adaptive policy and as they are."""
TOPKS = (1, 4)
"""Widths that are tried where a draft model drafts alone and nobody said one."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to try.

    batches   sequences at once
    tokens    output tokens per prompt
    settings  to compare with OFF, which is always there; see `settings_for`
    """

    prompts: tuple[Prompt, ...]
    settings: tuple[Setting, ...]
    batches: tuple[int, ...] = (1, 4, 16)
    tokens: int = 48


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting at one batch size, in the last round it reached.

    rounds           rounds it ran in, the last with the most prompts
    speed            output tokens per second
    ratio            speed over that of OFF in the same round
    tokens_per_step  1.0 means that no draft token was accepted
    """

    setting: Setting
    batch: int
    rounds: int
    speed: float
    ratio: float
    tokens_per_step: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """All trials, and the setting that is best over all batch sizes."""

    trials: tuple[Trial, ...]
    best: Setting


def settings_for(config: EngineConfig) -> tuple[Setting, ...]:
    """What is tried with the drafter of a resolved configuration."""
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


def tune(target: Target, sweep: Sweep, progress: Progress = lambda *_: None) -> Tuning:
    """Run the sweep on `target`, which needs measured costs (policy "adaptive")."""
    trials: list[Trial] = []
    _run(target, OFF, sweep, max(sweep.batches), 1)  # Warm up.
    for batch in sweep.batches:
        trials += _halve(target, sweep, batch, progress)
    return Tuning(tuple(trials), _best(trials))


def as_dict(tuning: Tuning) -> dict[str, Any]:
    """Plain values."""
    return {
        "best": asdict(tuning.best),
        "trials": [asdict(trial) | {"name": trial.setting.name} for trial in tuning.trials],
    }


def _halve(target: Target, sweep: Sweep, batch: int, progress: Progress) -> list[Trial]:
    """The last trial of every setting at one batch size."""
    left, last = list(sweep.settings), dict[Setting, Trial]()
    rounds = len(left).bit_length()
    for number in range(1, rounds + 1):
        ran: list[tuple[Setting, float, float]] = []
        count = max(batch, 2 ** min(number, 3))
        for index, setting in enumerate([OFF, *left]):
            progress(f"{batch} at once, round {number} of {rounds}", index, len(left) + 1)
            ran.append((setting, *_run(target, setting, sweep, batch, count)))
        # Plain decoding runs again at the end: a machine that changed speed meets both.
        again, _ = _run(target, OFF, sweep, batch, count)
        progress(f"{batch} at once, round {number} of {rounds}", len(left) + 1, len(left) + 1)
        plain = (ran[0][1] + again) / 2
        for setting, speed, length in ran:
            ratio = 1.0 if setting == OFF else speed / plain
            last[setting] = Trial(setting, batch, number, ratio * plain, ratio, length)
        left.sort(key=lambda setting: -last[setting].ratio)
        left = left[: max(1, len(left) // 2)]
    return list(last.values())


def _run(
    target: Target, setting: Setting, sweep: Sweep, batch: int, count: int
) -> tuple[float, float]:
    """(tokens per second, tokens per step) over `count` prompts, `batch` at once."""
    prompts = spread(sweep.prompts, min(count, len(sweep.prompts)))
    tokens = [_encode(target, prompt) for prompt in islice(cycle(prompts), count)]
    requests = [make_request(prompt, max_tokens=sweep.tokens, ignore_eos=True) for prompt in tokens]
    engine = make_engine(target, setting.on(target.config))
    engine.start()
    try:
        begun = perf_counter()
        answers = [choice for choices in complete(engine, requests, batch) for choice in choices]
        seconds = perf_counter() - begun
    finally:
        engine.shutdown()
    made = sum(len(answer.tokens) for answer in answers)
    return made / seconds, acceptance_length([answer.stats for answer in answers])


def _encode(target: Target, prompt: Prompt) -> Any:
    if target.chat is None:
        return target.tokenizer.encode(prompt.text, bos=True)
    return encode_chat(target, prompt.messages)


def _best(trials: Sequence[Trial]) -> Setting:
    """The setting with the highest geometric mean of its ratios; OFF where none is above 1.

    Only settings that won somewhere are looked at. Where one was dropped early, it counts with
    the ratio it had then, but no more than the winner: it lost against it.
    """
    winners = {
        batch: max((t for t in trials if t.batch == batch and t.setting != OFF), key=_progress)
        for batch in {trial.batch for trial in trials}
    }
    finalists = {OFF, *(winner.setting for winner in winners.values())}
    ratios: dict[Setting, list[float]] = {}
    for trial in trials:
        if trial.setting in finalists:
            most = 1.0 if trial.setting == OFF else winners[trial.batch].ratio
            ratios.setdefault(trial.setting, []).append(log(min(trial.ratio, most)))
    mean = {setting: exp(sum(logs) / len(logs)) for setting, logs in ratios.items()}
    return max(mean, key=lambda setting: (mean[setting], setting == OFF))


def _progress(trial: Trial) -> tuple[int, float]:
    return trial.rounds, trial.ratio
