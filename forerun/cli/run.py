"""`forerun run`: answers one prompt and reports the speed."""

import argparse
import sys
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

from forerun.build.engine import Loaded, encode_chat
from forerun.cli import batch, chat
from forerun.cli.console import emit, interactive, load_shown, say
from forerun.cli.constraint import grammar_of
from forerun.client.adapters import only_adapter
from forerun.client.completion import Completion, acceptance_length, make_request, stream
from forerun.engine.request import Request, Speculation
from forerun.errors import ConfigError, RequestError
from forerun.options.config import EngineConfig, SamplingConfig
from forerun.options.flags import configured_both
from forerun.types import Ints, RequestId

FEWEST = 8
"""Tokens below which no speed is reported, since it would be noise."""

ROUNDS = 5
"""How many answers --compare times on each side. One answer takes about a second, and single ones
are noisy.
"""


@dataclass(frozen=True, slots=True)
class Timed:
    """A completion and its times in seconds: to its first delta, and from the first to the last.

    first_tokens  tokens of the first delta; several if draft tokens were accepted
    """

    completion: Completion
    first: float
    rest: float
    first_tokens: int

    @property
    def speed(self) -> float | None:
        """Tokens per second after the first delta; None if fewer than FEWEST followed."""
        count = len(self.completion.tokens) - self.first_tokens
        return count / self.rest if self.rest > 0 and count >= FEWEST else None


def main(arguments: argparse.Namespace) -> int:
    """Run the command: answers a prompt, or the prompts of a file. Raises ConfigError for options
    that exclude each other.
    """
    sampling, config = configured_both(SamplingConfig, EngineConfig, arguments)
    if arguments.compare and not config.speculates:
        raise ConfigError("--compare has nothing to compare with speculation off.")
    if arguments.raw and arguments.system:
        raise ConfigError("--raw has no place for --system: it uses no chat template.")
    if not (arguments.raw or arguments.parse_special):
        raise ConfigError("--no-parse-special is for --raw: chats never hold control tokens.")
    if arguments.batch:
        return batch.main(arguments)
    if arguments.out:
        raise ConfigError("--out is for --batch; an answer goes to stdout.")
    if arguments.model_word and arguments.prompt is None and interactive():
        if not any(one.option.fields == ("seed",) for one in arguments.given):
            arguments.values["seed"] = None  # As in `chat`: a random seed per session.
        return chat.main(arguments)
    if arguments.compare:  # A counted answer would draft its own repeats.
        config = replace(config, speculative_ngram_capacity=0)
    text, grammar = _prompt(arguments.prompt), grammar_of(arguments)
    adapter = only_adapter(config)
    with closing(load_shown(config)) as loaded:
        request = make_request(
            _encode(loaded, text, arguments),
            loaded.tokenizer.eos_ids,
            grammar=None if grammar is None else loaded.target.compile(grammar),
            **sampling.options(loaded.target.sampling),
        )
        request = replace(request, adapter=adapter)
        answer = answered(loaded, request, show=not arguments.json)
        twins = compared(loaded, request) if arguments.compare else []
        report = summary(answer, twins)
        facts = {"text": answer.completion.text, **report, "info": loaded.info}
        emit(arguments, facts, lambda: say(sentence(report)))
    return 0 if report.get("same_text", True) else 1


def answered(loaded: Loaded, request: Request, show: bool = False) -> Timed:
    """Run one request and time its tokens; with `show`, prints the text to stdout as it arrives."""
    completion, started, first, first_tokens = Completion(), perf_counter(), 0.0, 0
    for delta in stream(loaded.engine, request):
        completion.add(delta)
        if delta.tokens and not first:
            first, first_tokens = perf_counter() - started, len(delta.tokens)
        if show and delta.text:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    if show:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return Timed(completion, first, perf_counter() - started - first, first_tokens)


def compared(loaded: Loaded, request: Request) -> list[tuple[Timed, Timed]]:
    """Measure a request ROUNDS times. Returns pairs (answer without speculation, answer as
    requested), run alternately; the answer that was printed is not reused, since the machine was
    cold. Raises EngineError if the engine fails one.
    """
    plain = replace(request, speculation=Speculation(enabled=False))

    def again(single: Request, number: int) -> Timed:
        # The engine may not have finished the last step when its delta arrives.
        return answered(loaded, replace(single, id=RequestId(f"{request.id}-{number}")))

    return [(again(plain, 2 * number), again(request, 2 * number + 1)) for number in range(ROUNDS)]


def summary(answer: Timed, twins: list[tuple[Timed, Timed]]) -> dict[str, Any]:
    """Return the measurements of one answer; also those of plain decoding if `twins` has pairs."""
    done = answer.completion
    report: dict[str, Any] = {
        "tokens": len(done.tokens),
        "finish": done.finish,
        "first_token_seconds": answer.first,
        "tokens_per_second": answer.speed,
        "tokens_per_step": acceptance_length([done.stats]),
        "speculation": asdict(done.stats) if done.stats else None,
    }
    if twins:
        speeds = [(a.speed, b.speed) for a, b in twins if a.speed and b.speed]
        report["rounds"] = speeds
        report["plain_tokens_per_second"] = median(a for a, _ in speeds) if speeds else None
        report["again_tokens_per_second"] = median(b for _, b in speeds) if speeds else None
        report["speedup"] = median(b / a for a, b in speeds) if speeds else None
        tokens = [twin.completion.tokens for pair in twins for twin in pair]
        report["same_text"] = all(same == done.tokens for same in tokens)
    return report


def sentence(report: dict[str, Any]) -> str:
    """Return the final line: speed, acceptance, and the comparison if there is one."""
    speed = report["tokens_per_second"]
    parts = [
        f"{report['tokens']} tokens, "
        + (f"{speed:.1f} tokens/s, " if speed is not None else "too few to tell a speed, ")
        + f"first after {report['first_token_seconds'] * 1000:.0f} ms, "
        f"{report['tokens_per_step']:.2f} tokens per step"
    ]
    if report.get("speedup"):
        ratios = [again / plain for plain, again in report["rounds"]]
        parts.append(
            f"{len(ratios)} times again, in turns: {report['plain_tokens_per_second']:.1f} "
            f"tokens/s without speculation, {report['again_tokens_per_second']:.1f} with it "
            f"(medians); pair by pair {report['speedup']:.2f} times as fast "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    elif speed is not None and report["speculation"] and report["speculation"]["draft_tokens"]:
        parts.append("--compare measures the speed without speculation")
    if "same_text" in report:
        parts.append("same text" if report["same_text"] else "THE TEXT DIFFERS: please report")
    return "[" + "; ".join(parts) + "]"


def _prompt(given: str | None) -> str:
    if given in (None, "-"):
        if given is None and interactive():
            raise RequestError('Give a prompt: forerun run "Why is the sky blue?"', "prompt")
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        given = sys.stdin.read()
    assert given is not None
    if any("\udc80" <= letter <= "\udcff" for letter in given):
        raise RequestError("The prompt is not valid UTF-8.", "prompt")
    if not given.strip():
        raise RequestError(
            "The prompt is empty; give it in quotes or on the standard input.", "prompt"
        )
    return given


def _encode(loaded: Loaded, text: str, arguments: argparse.Namespace) -> Ints:
    if arguments.raw:
        return loaded.tokenizer.encode(text, arguments.parse_special, bos=True)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return encode_chat(loaded, [*system, {"role": "user", "content": text}])
