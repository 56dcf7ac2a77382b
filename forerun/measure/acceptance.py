"""Measure a draft on the real engine: tokens per step, and the depths at which draft tokens are
rejected. Speculation is fixed, not adaptive, to measure the draft and not the policy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from forerun.build.target import Target
from forerun.client.completion import Completion, make_request
from forerun.draft_shape import DraftShape
from forerun.measure.prove import answers, encode
from forerun.measure.workload import Prompt
from forerun.options.config import EngineConfig

Progress = Callable[[str, int, int], None]


CHAIN, TREE = DraftShape(3, 1, 3), DraftShape(16, 4, 5)
LOOKUP = DraftShape(8, 1, 8)
"""The shape of n-gram drafts, which branch where the text did."""


@dataclass(frozen=True, slots=True)
class Question:
    """One cell of the table: a prompt set at a temperature.

    tokens  the most output tokens per prompt; answers end where the target ends them
    at_once the most requests in flight
    """

    name: str
    prompts: tuple[Prompt, ...]
    temperature: float
    tokens: int
    at_once: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one question under one draft shape.

    length    mean tokens per step, including the target's own
    agreement agreement[j]: probability of accepting level j + 1 given that level j was accepted
    tokens    output tokens of all answers
    answers   number of answers; same: how many of them equal plain decoding's, token for token
    speed     tokens per second; plain: the same without speculation, in the same session
    """

    question: str
    shape: str
    temperature: float
    length: float
    agreement: tuple[float, ...]
    tokens: int
    answers: int
    same: int
    speed: float
    plain: float


def alone(config: EngineConfig) -> EngineConfig:
    """Return a copy of `config` without the n-gram drafter that runs next to a draft model
    ("+NGRAM"), so that only the model drafts, as in its training; `config` itself without a draft
    model.
    """
    name = config.algorithm.name.removesuffix("+NGRAM")
    return replace(config, speculative_algorithm=name) if config.algorithm.model else config


def measure_shapes(
    target: Target,
    config: EngineConfig,
    question: Question,
    shapes: Sequence[DraftShape],
    progress: Progress,
) -> Iterator[Finding]:
    """Serve a question's prompts without speculation, then with each shape. Yields one Finding per
    shape as soon as it is measured.

    config    of an opened target; its algorithm drafts, with policy "fixed"
    progress  called with (what, answers so far, answers in all)

    Runs one engine after the other on `target`. Raises ContextError if a prompt does not fit,
    EngineError if an engine fails.
    """
    plain = serve(target, replace(config, speculative_algorithm="OFF"), question, progress)
    for shape in shapes:
        done, seconds = serve(target, shaped(config, shape), question, progress)
        histogram = drafting(done)
        yield Finding(
            question=question.name,
            shape=_title(config, shape),
            temperature=question.temperature,
            length=mean_length(histogram),
            agreement=agreement(histogram)[: shape.depth],
            tokens=sum(len(c.tokens) for c in done),
            answers=len(done),
            same=sum(a.tokens == b.tokens for a, b in zip(done, plain[0], strict=True)),
            speed=sum(len(c.tokens) for c in done) / seconds,
            plain=sum(len(c.tokens) for c in plain[0]) / plain[1],
        )


def _title(config: EngineConfig, shape: DraftShape) -> str:
    if not config.algorithm.model:
        return "n-grams"
    return f"chain of {shape.depth}" if shape.width == 1 else f"tree of {shape.nodes}"


def _size(config: EngineConfig) -> str:
    return f"{config.draft_shape.nodes}x{config.draft_shape.depth}"


def shaped(config: EngineConfig, shape: DraftShape) -> EngineConfig:
    """Return a copy of `config` that drafts this shape in every step (policy "fixed"). Raises
    ConfigError if the algorithm cannot draft it.
    """
    return replace(
        config,
        policy="fixed",
        speculative_num_draft_tokens=shape.nodes + 1,
        speculative_num_steps=shape.depth,
        speculative_eagle_topk=shape.width if config.algorithm.model else None,
    )


def serve(
    target: Target, config: EngineConfig, question: Question, progress: Progress
) -> tuple[list[Completion], float]:
    """Answer a question on a fresh engine. Returns the answers, prompt by prompt, and the wall time
    in seconds. At most question.at_once requests are in flight; prompt i has seed question.seed +
    i. Raises ContextError if a prompt does not fit, EngineError if the engine fails.
    """
    requests = [
        make_request(
            encode(target, prompt, question.tokens),
            max_tokens=question.tokens,
            temperature=question.temperature,
            seed=question.seed + index,
            eos=tuple(sorted(target.tokenizer.eos_ids)),
        )
        for index, prompt in enumerate(question.prompts)
    ]
    shape = _size(config) if config.speculates else "plain"
    name = f"{question.name}, T={question.temperature:g}, {shape}"
    found = answers(
        target,
        config,
        requests,
        question.at_once,
        lambda count: progress(name, count, len(requests)),
    )
    return found.done, found.seconds


def summed(histograms: Sequence[Sequence[int]]) -> np.ndarray:
    """Return int64[.] whose entry k is the number of steps that accepted k draft tokens, summed
    over all sequences' histograms; [0] without any.
    """
    total = np.zeros(max(map(len, histograms), default=1), np.int64)
    for histogram in histograms:
        total[: len(histogram)] += np.array(histogram, np.int64)
    return total


def drafting(done: Sequence[Completion]) -> np.ndarray:
    """Return int64[.] as `summed`, over the answers with statistics, without the first step of
    each, which is the prefill and cannot draft.
    """
    total = summed([c.stats.histogram for c in done if c.stats])
    total[0] -= sum(1 for c in done if c.stats and c.stats.steps)
    return total


def mean_length(histogram: np.ndarray) -> float:
    """Return the acceptance length, mean tokens per step including the target's own, of a histogram
    of `summed`; 1.0 without steps.
    """
    steps = histogram.sum()
    return 1.0 + float((np.arange(len(histogram)) * histogram).sum() / max(steps, 1))


def agreement(histogram: np.ndarray) -> tuple[float, ...]:
    """Return, from a histogram of `summed`, the share of steps that accepted draft token j + 1
    among those that accepted token j, as entry j; 0.0 if no step accepted token j.
    """
    reached = histogram[::-1].cumsum()[::-1]
    return tuple(float(b / a) if a else 0.0 for a, b in pairwise(reached))


def metrics_beside(folder: str | None) -> Path | None:
    """Return the path of the metrics.json that `forerun train` wrote next to a draft's folder; None
    if there is no such file or no draft.
    """
    if folder is None:
        return None
    metrics = Path(folder).parent / "metrics.json"
    return metrics if metrics.is_file() else None
