"""The losslessness promise as an experiment: the same prompts with and without speculation.

Every run at one temperature is compared, token by token, with the reference run: no speculation,
one sequence at a time. Equal tokens in the batched runs thus also show that a sequence's result
does not depend on its batch.

A broken drafter cannot be seen in the text: if nothing is drafted, nothing is proved. So each run
also reports its draft tokens, and the proof fails if no draft token was accepted.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from forerun.build.engine import encode_chat, make_engine
from forerun.build.target import Target
from forerun.client.completion import Completion, acceptance_length, complete, make_request
from forerun.constrain.grammar import Grammar
from forerun.constrain.matcher.matcher import CompiledGrammar
from forerun.engine.request import Request, choice_seed
from forerun.errors import ContextError
from forerun.interface.plan import TokenLogprobs
from forerun.measure import mixed
from forerun.measure.workload import Prompt
from forerun.options.config import EngineConfig
from forerun.speculative.noise import gumbel
from forerun.types import Ints

TOP = 20
"""Top logits examined where two runs diverge."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """The prompts and settings of a proof.

    tokens        output tokens per prompt; the model's end-of-text token is ignored
    temperatures  one comparison for each
    group         sequences at once in the batched runs
    seed          of prompt 0; prompt i uses seed + i
    grammar       what every answer must follow; it then ends where the grammar does
    mixed         the prompts have various options (mixed.py), and some need not follow
                  the grammar
    """

    prompts: tuple[Prompt, ...]
    tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.8)
    group: int = 16
    seed: int = 0
    grammar: Grammar | None = None
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first output token at which a run differs from the reference.

    choice     of the prompt's answers
    expected, found  where they are equal, something else differs: text, end or log-probabilities
    logit_gap  how much the target's raw logit of the reference's token exceeds that of the
               other, and score_gap the same after temperature and noise, which is what was
               compared; None if a token is not among the top 20. A gap near 0 points to
               rounding, a large one to a mistake.
    """

    prompt: str
    choice: int
    position: int
    expected: int
    found: int
    logit_gap: float | None
    score_gap: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one pass over all prompts, compared with its reference. identical: number of
    `answers` that are equal.
    """

    temperature: float
    speculation: str
    at_once: int
    identical: int
    answers: int
    tokens: int
    seconds: float
    steps: int
    draft_tokens: int
    accepted: int
    preemptions: int
    tokens_per_step: float
    divergence: Divergence | None

    @property
    def share_accepted(self) -> float:
        """Accepted draft tokens over all draft tokens, 0 to 1; 0 without any."""
        return self.accepted / self.draft_tokens if self.draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Proof:
    """The results of all runs, and the verdict."""

    runs: tuple[Run, ...]
    speculation: str

    @property
    def identical(self) -> bool:
        """Whether no run diverged from its reference."""
        return all(run.divergence is None for run in self.runs)

    @property
    def speculated(self) -> bool:
        """Whether every speculative run had draft tokens, and at least one was accepted in some
        run; otherwise nothing was proved.
        """
        runs = [run for run in self.runs if run.speculation != "OFF"]
        return all(run.draft_tokens > 0 for run in runs) and any(run.accepted > 0 for run in runs)

    @property
    def holds(self) -> bool:
        """Whether all answers are identical, and speculation was active unless it was switched
        off.
        """
        return self.identical and (self.speculated or self.speculation == "OFF")


def prove(
    target: Target, config: EngineConfig, trial: Trial, progress: Progress = lambda *_: None
) -> Proof:
    """Run every prompt of the trial at each temperature, with and without `config`'s speculation,
    one at a time and in groups, and compare with the reference: without speculation, one at a time.

    target    opened; its engines run one after the other
    progress  called with (what, answers so far, answers in all)

    Raises ContextError if a prompt does not fit, RequestError if the grammar cannot be used,
    EngineError if the engine fails.
    """
    prompts = [encode(target, prompt, trial.tokens) for prompt in trial.prompts]
    plain = replace(config, speculative_algorithm="OFF")
    compiled = target.compile(trial.grammar) if trial.grammar is not None else None
    sides = [plain] if not config.speculates else [plain, config]
    runs: list[Run] = []
    for temperature in trial.temperatures:
        reference: Completions | None = None
        for at_once in (1, trial.group):
            for side in sides:
                how = f"speculation {side.speculative_algorithm}, {at_once} at once"
                name = f"T={temperature:g}, {how}"
                done = answers(
                    target,
                    side,
                    _requests(target, prompts, trial, temperature, compiled),
                    at_once,
                    lambda count, name=name: progress(name, count, len(prompts)),  # type: ignore[misc]
                )
                reference = reference or done
                gap = _first_divergence(target, trial, prompts, temperature, (reference, done))
                runs.append(_run(side, temperature, at_once, (reference, done), gap))
    return Proof(tuple(runs), config.speculative_algorithm)


def _requests(
    target: Target,
    prompts: Sequence[Ints],
    trial: Trial,
    temperature: float,
    grammar: CompiledGrammar | None,
) -> list[Request]:
    return [
        make_request(
            prompt,
            max_tokens=trial.tokens,
            temperature=temperature,
            seed=trial.seed + index,
            ignore_eos=True,
            grammar=None if trial.mixed and index % mixed.FREE == mixed.FREE - 1 else grammar,
            **(mixed.options(index, target.tokenizer) if trial.mixed else {}),
        )
        for index, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True, slots=True)
class Completions:
    """The answers of an engine.

    prompts  the index of each answer's request
    seconds  wall time of all
    waited   seconds until the first token, summed over the answers (bench/never_slower.py)
    """

    done: list[Completion]
    prompts: list[int]
    seconds: float
    preemptions: int
    waited: float

    @property
    def speed(self) -> float:
        """Output tokens of all answers per second of wall time."""
        return sum(len(item.tokens) for item in self.done) / self.seconds


def answers(
    target: Target,
    config: EngineConfig,
    requests: list[Request],
    at_once: int,
    finished: Callable[[int], None] = lambda _: None,
) -> Completions:
    """Run requests on a fresh engine, `at_once` in flight, and shut it down. Returns all choices of
    all requests, in the order of the requests.

    finished  called with the number of requests that have ended

    Raises EngineError if one fails.
    """
    engine = make_engine(target, config)
    engine.start()
    try:
        started = perf_counter()
        found = complete(engine, requests, at_once, finished)
        seconds, stats = perf_counter() - started, engine.stats()
        return Completions(
            done=[choice for choices in found for choice in choices],
            prompts=[index for index, choices in enumerate(found) for _ in choices],
            seconds=seconds,
            preemptions=stats.preemptions,
            waited=stats.first_token.total,
        )
    finally:
        engine.shutdown()


def _run(
    side: EngineConfig,
    temperature: float,
    at_once: int,
    pair: tuple[Completions, Completions],
    divergence: Divergence | None,
) -> Run:
    reference, found = pair
    done = found.done
    stats = [item.stats for item in done]
    return Run(
        temperature=temperature,
        speculation=side.speculative_algorithm,
        at_once=at_once,
        identical=sum(_differs(*two) is None for two in zip(reference.done, done, strict=True)),
        answers=len(done),
        tokens=sum(len(item.tokens) for item in done),
        seconds=found.seconds,
        steps=sum(item.steps for item in stats if item),
        draft_tokens=sum(item.draft_tokens for item in stats if item),
        accepted=sum(item.accepted for item in stats if item),
        preemptions=found.preemptions,
        tokens_per_step=acceptance_length(stats),
        divergence=divergence,
    )


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Return the index of the first token that differs or that one side lacks; None if the
    sequences are equal.
    """
    for index, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))


def _differs(expected: Completion, found: Completion) -> int | None:
    at = first_difference(expected.tokens, found.tokens)
    return mixed.report_difference(expected, found) if at is None else at


def _first_divergence(
    target: Target,
    trial: Trial,
    prompts: Sequence[Ints],
    temperature: float,
    pair: tuple[Completions, Completions],
) -> Divergence | None:
    """Return the divergence of the first answer that differs, with its logit gaps; None if none
    differs.
    """
    both = zip(pair[0].prompts, pair[0].done, pair[1].done, strict=True)
    for index, expected, found in both:
        at = _differs(expected, found)
        if at is None:
            continue
        a = expected.tokens[at] if at < len(expected.tokens) else -1
        b = found.tokens[at] if at < len(found.tokens) else -1
        text = np.concatenate([prompts[index], np.array(expected.tokens[:at], np.int32)])
        gap, score = None, None
        if a != b and a >= 0 and b >= 0:
            seed = choice_seed(trial.seed + index, expected.index)
            noise = gumbel(seed, at, target.memory.limits.vocab)
            gap = _logit_gap(target, text, a, b)
            score = gap
            if gap is not None and temperature > 0:
                score = gap / temperature + float(noise[a] - noise[b])
        return Divergence(trial.prompts[index].id, expected.index, at, a, b, gap, score)
    return None


def _logit_gap(target: Target, text: Ints, a: int, b: int) -> float | None:
    """Return the raw logit of token `a` minus that of `b` after `text`; None if one is not among
    the TOP logits.
    """
    request = make_request(text, max_tokens=1, logprobs=TOP, ignore_eos=True)
    found = answers(target, replace(target.config, speculative_algorithm="OFF"), [request], 1)
    entry: TokenLogprobs = found.done[0].logprobs[0]
    scores = dict(entry.top) | {entry.token: entry.logprob}
    return scores[a] - scores[b] if a in scores and b in scores else None


def encode(target: Target, prompt: Prompt, tokens: int) -> Ints:
    """Return int32[T], the prompt's token ids, by the chat template if the model has one, else of
    its last user message. Raises ContextError if `tokens` of output would not fit after it.
    """
    if target.chat is not None:
        ids = encode_chat(target, prompt.messages)
    else:
        ids = target.tokenizer.encode(prompt.text, bos=True)
    room = target.memory.limits.context - tokens
    if len(ids) > room:
        raise ContextError(
            f"Prompt {prompt.id} has {len(ids)} tokens; with {tokens} of output only {room} fit."
        )
    return ids


def as_dict(proof: Proof) -> dict[str, Any]:
    """Return the proof as JSON values, for --json: verdicts, and each run's fields."""
    return {
        "identical": proof.identical,
        "speculated": proof.speculated,
        "holds": proof.holds,
        "runs": [asdict(run) | {"share_accepted": run.share_accepted} for run in proof.runs],
    }
