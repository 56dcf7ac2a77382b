"""The command line: names, flags, errors, exit codes. What a command does is in the other files
here.

Flags are derived from the dataclasses in `config.py`. Nothing heavy is imported before the
command is known, so `--help` answers at once.

Exit codes:
    0    done
    1    the command ran and its verdict is negative (`prove` diverged, `bench` saw errors)
    2    the command line or a request is wrong
    3    the model cannot be used or fetched
    4    it does not fit into memory
    5    the engine failed
    130  interrupted; 141 the reader of our output went away
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from forerun import __version__
from forerun.aliases import OPTIONS
from forerun.cli.layers import settle
from forerun.cli.parser import Parser
from forerun.config import AskConfig, EngineConfig, ServeSettings
from forerun.errors import (
    ConfigError,
    EngineError,
    ForerunError,
    MemoryPlanError,
    ModelError,
    RequestError,
)
from forerun.flags import add_aliases, flags_of
from forerun.train.presets import PRESETS, TrainConfig

Flags = Callable[[argparse.ArgumentParser], None]

EXIT_CODES: tuple[tuple[type[ForerunError], int], ...] = (
    (ConfigError, 2),
    (RequestError, 2),
    (ModelError, 3),
    (MemoryPlanError, 4),
    (EngineError, 5),
)
INTERRUPTED, BROKEN_PIPE = 130, 141

SHAPE = ("speculative_num_draft_tokens", "speculative_num_steps")
"""Fields that some commands vary themselves."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, translate errors into a sentence on stderr and an exit code."""
    parser = build_parser()
    try:
        arguments = parser.parse_args(argv)
        if arguments.command is None:
            parser.print_help()
            return 0
        settle(arguments)
        # Measuring without a server needs torch, which takes seconds to import.
        sized = getattr(arguments, "random_weights", None) is not None
        name = "sized" if sized else arguments.command
        command = importlib.import_module(f"forerun.cli.{name}")
        code: int = command.main(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python would complain again while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except ForerunError as error:
        for line in str(error).splitlines():
            print(f"forerun: {line}", file=sys.stderr)
        return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 5)
    return code


def console() -> None:
    """Entry point of the `forerun` command."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A terminal that cannot show a letter of an answer gets another in its place.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(main())


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog="forerun",
        description="LLM inference whose heart is speculative decoding: same text, only sooner.",
    )
    parser.add_argument("--version", action="version", version=f"forerun {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (summary, flags) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        flags(command)
        if command.get_default("options"):
            add_aliases(command, OPTIONS)
            command.add_argument(
                "--config",
                metavar="FILE",
                help="YAML file of option names and values; flags and FORERUN_* go before it",
            )
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] [PROMPT]",
        help="what to ask, and before it whom; '-' or nothing reads stdin; a model alone opens a "
        "chat, or reads stdin",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the text: no chat template")
    parser.add_argument(
        "--parse-special",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --raw: control strings such as <|im_start|> are their tokens (default: yes)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="answer again, three times without speculation and with it: compare speed and text",
    )
    _grammar_flags(parser)
    _probe_flag(parser)
    flags_of(AskConfig, parser, "answer")
    flags_of(EngineConfig, parser, "model and engine", max_sequences=2)


def _probe_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--probe",
        action="store_true",
        help="serve a few hundred tokens under every plausible reading of the draft head's "
        "configuration first, and keep the best",
    )


def _grammar_flags(parser: argparse.ArgumentParser) -> None:
    one = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    one.add_argument("--schema", metavar="FILE", help="the text must be JSON valid under a schema")
    one.add_argument("--regex", metavar="PATTERN", help="the text must match, as a whole")
    one.add_argument(
        "--grammar", metavar="FILE", help="the text must follow a grammar, GBNF or Lark"
    )


def _model_word(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_word",
        nargs="?",
        metavar="MODEL",
        help="what --model takes: a built-in name, folder, GGUF file or hub id",
    )


def _chat_flags(parser: argparse.ArgumentParser) -> None:
    _model_word(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    flags_of(AskConfig, parser, "answers", seed=None)
    flags_of(EngineConfig, parser, "model and engine", max_sequences=1)


def _serve_flags(parser: argparse.ArgumentParser) -> None:
    _model_word(parser)
    flags_of(ServeSettings, parser, "server")
    _probe_flag(parser)
    flags_of(EngineConfig, parser, "model and engine")


def _train_flags(parser: argparse.ArgumentParser) -> None:
    presets = "; ".join(f"{name}: {text}" for name, (text, _) in PRESETS.items())
    parser.add_argument("--out", metavar="DIR", required=True, help="where everything is kept")
    parser.add_argument("--prompts", metavar="FILE", help="jsonl of chats (default: the target's)")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="cpu", help=presets)
    unsaid: dict[str, Any] = {item.name: None for item in fields(TrainConfig)}
    flags_of(TrainConfig, parser, "training (default: the preset's)", **unsaid)
    # The toy has no weights to make a draft for.
    model = "built-in name, folder with config.json and safetensors, GGUF file or hub id"
    parser.add_argument(
        "--model", metavar="TEXT", default=EngineConfig().model, help=f"target: {model}"
    )
    parser.add_argument(
        "--executor", choices=("auto", "cpu", "torch"), default="auto", help="what runs the target"
    )
    own = ("model", "executor", "max_sequences", "policy")
    flags_of(EngineConfig, parser, "target and engine", without=own)


def _eval_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="jsonl of chats; may be repeated (default: the built-in prompts)",
    )
    parser.add_argument(
        "--count", type=_positive, metavar="N", help="prompts per set (default: all)"
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=128,
        metavar="N",
        help="tokens per answer (default: 128)",
    )
    parser.add_argument(
        "--group", type=_positive, default=1, metavar="N", help="sequences at once (default: 1)"
    )
    parser.add_argument(
        "--temperatures",
        type=_temperatures,
        default=(0.0, 0.8, 1.0),
        metavar="X,X,...",
        help="one pass for each (default: 0,0.8,1)",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="beside greedy chains, what the trainer simulates for the same answers (torch)",
    )
    _probe_flag(parser)
    own = ("max_sequences", "policy", *SHAPE, "speculative_eagle_topk")
    flags_of(EngineConfig, parser, "model and engine", without=own, draft_on_error="stop")


def _bench_flags(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", metavar="URL", help="an OpenAI endpoint, such as http://host/v1")
    where.add_argument(
        "--launch", action="store_true", help="start a Forerun server and measure that"
    )
    where.add_argument(
        "--random-weights",
        metavar="SHAPE",
        help="no server: steps of the torch executor at a model's size, such as llama-3.1-8b or "
        "qwen3-32b, its weights random; --concurrency gives the batches",
    )
    parser.add_argument("--api-key", metavar="KEY", default="", help="key for --url")
    parser.add_argument(
        "--concurrency",
        type=_numbers,
        default=(1, 4, 16),
        metavar="N,N,...",
        help="requests in flight at once, one level after the other (default: 1,4,16)",
    )
    parser.add_argument(
        "--requests",
        type=_positive,
        metavar="N",
        help="requests per level (default: 2 x level, min. 8)",
    )
    parser.add_argument(
        "--repeats", type=_positive, default=3, metavar="N", help="median over repeats (default: 3)"
    )
    parser.add_argument("--prompts", metavar="FILE", help="jsonl of messages (default: built in)")
    parser.add_argument(
        "--speculative",
        choices=("as-is", "on", "off", "both"),
        help="what to ask of the server; 'both' alternates (default: both with --launch, else "
        "as-is, which sends nothing that is not OpenAI's)",
    )
    parser.add_argument("--out", metavar="FOLDER", help="write report.json and report.png there")
    flags_of(AskConfig, parser, "requests", max_tokens=128, temperature=0.0)
    title = "model and engine (--launch; --model also with --url)"
    flags_of(EngineConfig, parser, title, draft_on_error="stop")


def _fuzz_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("differential fuzzing")
    group.add_argument(
        "--fuzz",
        action="store_true",
        help="random requests, configurations, arrival times, aborts and cache sizes; every answer "
        "against the same request alone, without speculation",
    )
    group.add_argument("--minutes", type=float, metavar="N", help="look so long (default: 2)")
    group.add_argument("--cases", type=_positive, metavar="N", help="stop after so many cases")
    group.add_argument(
        "--reproduction",
        default="forerun-fuzz.json",
        metavar="FILE",
        help="where a failing case is written, made as small as can be (default: %(default)s)",
    )
    group.add_argument("--replay", metavar="FILE", help="run a failing case again")


def _prove_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="8 prompts x 32 tokens, groups of 4")
    parser.add_argument("--prompts", metavar="FILE", help="jsonl of messages (default: built in)")
    parser.add_argument(
        "--count", type=_positive, metavar="N", help="prompts to use (default: all)"
    )
    parser.add_argument("--tokens", type=_positive, metavar="N", help="tokens each (default: 128)")
    parser.add_argument(
        "--temperatures",
        type=_temperatures,
        default=(0.0, 0.8),
        metavar="X,X,...",
        help="one pass for each (default: 0,0.8)",
    )
    parser.add_argument(
        "--group",
        type=_positive,
        metavar="N",
        help="sequences at once in the batched runs (default: 16)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompt 0")
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="each prompt asks for other things: penalties, logit_bias, n, stop strings, "
        "logprobs, cut-offs, some without the grammar",
    )
    _fuzz_flags(parser)
    _grammar_flags(parser)
    usual = {"policy": "fixed", "draft_on_error": "stop"}
    flags_of(EngineConfig, parser, "model and engine", without=("max_sequences",), **usual)


def _tune_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", metavar="FILE", help="jsonl of messages (default: built in)")
    parser.add_argument(
        "--batches",
        type=_numbers,
        default=(1, 4, 16),
        metavar="N,N,...",
        help="sequences at once, one after the other (default: 1,4,16)",
    )
    parser.add_argument(
        "--tokens", type=_positive, default=48, metavar="N", help="tokens per prompt (default: 48)"
    )
    parser.add_argument("--out", metavar="FILE", help="draw the frontier there, as PNG")
    own = ("max_sequences", "policy", *SHAPE)
    flags_of(EngineConfig, parser, "model and engine", without=own, draft_on_error="stop")


def _doctor_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-torch", action="store_true", help="do not import torch (it is slow)")


def _models_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "show", "rm", "pull"), help="what to do")
    parser.add_argument("model", nargs="?", help="built-in name or hub id; not for list")


def _fetch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="built-in name or hub id")


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 0,0.8") from None
    if not all(0 <= value <= 100 for value in values):  # False for NaN.
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 100")
    return values


COMMANDS: dict[str, tuple[str, Flags]] = {
    "run": ("Answer one prompt and show how fast.", _run_flags),
    "chat": ("Talk to a model.", _chat_flags),
    "serve": ("Serve a model over the OpenAI API.", _serve_flags),
    "bench": ("Measure any OpenAI endpoint under load.", _bench_flags),
    "prove": ("Show that speculation changes no token.", _prove_flags),
    "eval": ("Measure what a draft reaches on prompt sets.", _eval_flags),
    "tune": ("Find the fastest way to speculate here and keep it.", _tune_flags),
    "train": ("Make a draft head for a model.", _train_flags),
    "doctor": ("Describe this machine and what works on it.", _doctor_flags),
    "models": ("List, describe, remove or download models.", _models_flags),
    "fetch": ("Download a model into the cache.", _fetch_flags),
}
