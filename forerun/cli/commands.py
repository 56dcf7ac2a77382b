"""The options of every command. Each command's code is in the module of its name."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from math import inf
from typing import Any

from forerun.cli import verbs
from forerun.cli.argument_types import numbers, positive, rate, share, temperatures
from forerun.options.config import EngineConfig, SamplingConfig, ServeSettings
from forerun.options.flags import flags_of
from forerun.train.presets import PRESETS, TrainConfig

Flags = Callable[[argparse.ArgumentParser], None]

SHOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "run": (
        "[MODEL] [PROMPT] ",
        (
            'forerun run "Why is the sky blue?"',
            'forerun run model.gguf "Say it in JSON." --schema answer.json',
            "forerun run smollm2-135m < question.txt",
            'forerun run "Count to 30." --compare',
            "forerun run --batch requests.jsonl --out answers.jsonl",
        ),
    ),
    "chat": ("[MODEL] ", ("forerun chat", "forerun chat org/model:Q4_K_M --system 'Be brief.'")),
    "serve": (
        "[MODEL ...] ",
        (
            "forerun serve",
            "forerun serve org/model --port 9000 --api-key SECRET --context 8192",
            "forerun serve org/model --speculative-algorithm EAGLE3 \\\n"
            "        --speculative-draft-model-path org/draft",
            "forerun serve --config server.yaml",
            "FORERUN_PORT=9000 forerun serve model.gguf",
        ),
    ),
    "bench": ("[MODEL] ", ("forerun bench --launch", "forerun bench --url http://host:8000")),
    "train": ("[MODEL] ", ("forerun train --out FOLDER", "forerun train org/model --out FOLDER")),
    "eval": ("[MODEL] ", ()),
    "tune": ("[MODEL] ", ()),
    "prove": ("[MODEL] ", ("forerun prove --quick",)),
    "plan": ("[MODEL] ", ()),
    "models": ("{list,show,rm,pull} [MODEL] ", ("forerun models", "forerun pull org/model")),
    "launch": ("AGENT ", ("forerun launch claude", "forerun launch codex -- exec 'Say hi'")),
    "completion": ("SHELL ", ('eval "$(forerun completion bash)"',)),
}
"""Usage line and examples of each command."""

FIRST = {
    "host",
    "port",
    "api_keys",
    "served_name",
    "context",
    "max_sequences",
    "device",
    "mem_fraction_static",
    "speculative_algorithm",
    "speculative_draft_model_path",
}
"""Options that `serve --help` lists first."""

SHAPE = ("speculative_num_draft_tokens", "speculative_num_steps")
"""Fields that some commands vary themselves, and so do not take as options."""


def _run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] [PROMPT]",
        help="the model (optional), then the prompt; '-' or no prompt reads stdin; a model alone "
        "opens a chat in a terminal",
    )
    parser.add_argument(
        "--batch",
        metavar="FILE",
        help="answer requests in OpenAI's batch format, one per line; continues an interrupted run",
    )
    parser.add_argument("--out", metavar="FILE", help="with --batch: the answers, a line each")
    parser.add_argument("--prompt", "-p", metavar="TEXT", help="the prompt, as in llama-cli")
    _system_flag(parser)
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
        help="answer again, five times without speculation and with it: compare speed and text; "
        "finished answers are not remembered meanwhile",
    )
    _grammar_flags(parser)
    flags_of(SamplingConfig, parser, "answer")
    flags_of(EngineConfig, parser, "model and engine", max_sequences=2)


def _grammar_flags(parser: argparse.ArgumentParser) -> None:
    one = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    json_schema = "the text must be JSON valid under a schema"
    one.add_argument("--schema", "--json-schema-file", "-jf", metavar="FILE", help=json_schema)
    one.add_argument("--regex", metavar="PATTERN", help="the text must match, as a whole")
    grammar = "the text must follow a grammar, GBNF or Lark"
    one.add_argument("--grammar", "--grammar-file", metavar="FILE", help=grammar)


def _system_flag(parser: argparse.ArgumentParser) -> None:
    names = ("--system", "--system-prompt", "-sys")
    parser.add_argument(*names, metavar="TEXT", help="system message")


def _model_word(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_word",
        nargs="?",
        metavar="MODEL",
        help="what --model takes: a built-in name, folder, GGUF file or hub id",
    )


def _chat_flags(parser: argparse.ArgumentParser) -> None:
    _model_word(parser)
    _system_flag(parser)
    flags_of(SamplingConfig, parser, "answers", seed=None)
    flags_of(EngineConfig, parser, "model and engine", max_sequences=1)


def _serve_flags(parser: argparse.ArgumentParser) -> None:
    _model_word(parser)
    parser.add_argument(
        "more_models",
        nargs="*",
        metavar="MODEL",
        help="more models to serve; with several, each is loaded when a request names it",
    )
    parser.add_argument(
        "--models-dir",
        metavar="FOLDER",
        help="serve every GGUF file and model folder in this folder",
    )
    parser.add_argument(
        "--models-file",
        metavar="FILE",
        help="serve the models that a YAML file names, each with options of its own",
    )
    parser.add_argument(
        "--replicas",
        type=positive,
        default=1,
        metavar="N",
        help="number of engines behind one address, by Ray Serve (pip install 'forerun[ray]')",
    )
    flags_of(ServeSettings, parser, "server", first=FIRST)
    flags_of(EngineConfig, parser, "model and engine", first=FIRST)
    parser.epilog = (
        "Names of SGLang, vLLM and llama.cpp for these options are known too, and\n"
        "FORERUN_* in the environment: docs/use/migrating.md."
    )


def _train_flags(parser: argparse.ArgumentParser) -> None:
    _model_word(parser)
    presets = "; ".join(f"{name}: {text}" for name, (text, _) in PRESETS.items())
    parser.add_argument(
        "--out",
        metavar="DIR",
        required=True,
        help="folder for the draft and all intermediate results",
    )
    parser.add_argument("--prompts", metavar="FILE", help="jsonl of chats (default: the target's)")
    parser.add_argument(
        "--raw", action="store_true", help="for base models: texts that go on, without a template"
    )
    parser.add_argument(
        "--token-map",
        metavar="FILE",
        help="only count the tokens of this text file, into DIR/token_map.json",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        nargs="+",
        help="only count the n-grams of these text files, into DIR/draft: no answer is written",
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), default="cpu", help=presets)
    unsaid: dict[str, Any] = {item.name: None for item in fields(TrainConfig)}
    flags_of(TrainConfig, parser, "training (default: the preset's)", **unsaid)
    # The toy model has no weights to train a draft for.
    model = "built-in name, folder with config.json and safetensors, GGUF file or hub id"
    parser.add_argument(
        "--model", metavar="TEXT", default=EngineConfig().model, help=f"target: {model}"
    )
    parser.add_argument(
        "--executor", choices=("auto", "cpu", "torch"), default="auto", help="what runs the target"
    )
    own = ("model", "executor", "max_sequences", "policy", "lora_modules")
    flags_of(EngineConfig, parser, "target and engine", without=own)


def _eval_flags(parser: argparse.ArgumentParser) -> None:
    _model_word(parser)
    parser.add_argument(
        "--set",
        "--prompts",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="jsonl of chats; may be repeated (default: the built-in prompts)",
    )
    parser.add_argument(
        "--count", type=positive, metavar="N", help="prompts per set (default: all)"
    )
    parser.add_argument(
        "--tokens",
        "--max-tokens",
        type=positive,
        default=128,
        metavar="N",
        help="tokens per answer (default: 128)",
    )
    parser.add_argument(
        "--group", type=positive, default=1, metavar="N", help="sequences at once (default: 1)"
    )
    parser.add_argument(
        "--temperatures",
        type=temperatures,
        default=(0.0, 0.8, 1.0),
        metavar="X,X,...",
        help="one pass for each (default: 0,0.8,1)",
    )
    own = ("max_sequences", "policy", *SHAPE, "speculative_eagle_topk", "lora_modules")
    flags_of(EngineConfig, parser, "model and engine", without=own, draft_on_error="stop")


def _bench_flags(parser: argparse.ArgumentParser) -> None:
    _model_word(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", metavar="URL", help="an OpenAI endpoint, such as http://host/v1")
    where.add_argument(
        "--launch", action="store_true", help="start a Forerun server and measure that"
    )
    parser.add_argument("--api-key", metavar="KEY", default="", help="key for --url")
    _load_flags(parser)
    parser.add_argument(
        "--speculative",
        choices=("as-is", "on", "off", "both"),
        help="speculation of the requests; 'both' alternates on and off (default: both with "
        "--launch, else as-is, which sends only OpenAI's fields)",
    )
    flags_of(SamplingConfig, parser, "requests", max_tokens=128, temperature=0.0)
    title = "model and engine (--launch; --model also with --url)"
    flags_of(EngineConfig, parser, title, without=("lora_modules",), draft_on_error="stop")


def _load_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("--concurrency", "--max-concurrency"),
        type=numbers,
        metavar="N,N,...",
        help="requests in flight at once, one level after the other (default: 1,4,16; with --rate "
        "as many as come)",
    )
    parser.add_argument(
        *("--rate", "--request-rate"),
        type=rate,
        default=inf,
        metavar="N",
        help="requests a second that come at random times (Poisson), or inf (default: inf)",
    )
    parser.add_argument(
        *("--requests", "--num-prompts"),
        type=positive,
        metavar="N",
        help="requests per level (default: 2 x level, min. 8)",
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="median over repeats (default: 3)"
    )
    parser.add_argument(
        *("--prompts", "--dataset-path"),
        metavar="FILE",
        help="jsonl of messages or prompt (default: built in)",
    )
    parser.add_argument(
        *("--input-len", "--random-input-len"),
        type=positive,
        metavar="N",
        help="make prompts of random words, N tokens long by the server's own count",
    )
    parser.add_argument(
        *("--output-len", "--random-output-len"),
        type=positive,
        metavar="N",
        help="answers of exactly N tokens (--max-tokens N --ignore-eos)",
    )
    parser.add_argument(
        *("--range-ratio", "--random-range-ratio"),
        type=share,
        default=1.0,
        metavar="R",
        help="draw each length evenly from R x N to N (default: 1)",
    )
    parser.add_argument(
        "--completions",
        action="store_true",
        help="ask /v1/completions, as base models need it, instead of chats",
    )


def _fuzz_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("differential fuzzing")
    group.add_argument(
        "--fuzz",
        action="store_true",
        help="random requests, configurations, arrival times, aborts and cache sizes; every answer "
        "against the same request alone, without speculation",
    )
    group.add_argument(
        "--minutes", type=rate, metavar="N", help="time to search, in minutes (default: 2)"
    )
    group.add_argument("--cases", type=positive, metavar="N", help="stop after so many cases")
    group.add_argument(
        "--case", type=positive, metavar="N", help="run only the case of this number, of a --seed"
    )


def _prove_flags(parser: argparse.ArgumentParser) -> None:
    _model_word(parser)
    parser.add_argument("--quick", action="store_true", help="8 prompts x 32 tokens, groups of 4")
    parser.add_argument("--prompts", metavar="FILE", help="jsonl of messages (default: built in)")
    parser.add_argument("--count", type=positive, metavar="N", help="prompts to use (default: all)")
    parser.add_argument("--tokens", type=positive, metavar="N", help="tokens each (default: 128)")
    parser.add_argument(
        "--temperatures",
        type=temperatures,
        default=(0.0, 0.8),
        metavar="X,X,...",
        help="one pass for each (default: 0,0.8)",
    )
    parser.add_argument(
        "--group",
        type=positive,
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
    own = ("max_sequences", "lora_modules")
    flags_of(EngineConfig, parser, "model and engine", without=own, **usual)


def _tune_flags(parser: argparse.ArgumentParser) -> None:
    _model_word(parser)
    parser.add_argument("--prompts", metavar="FILE", help="jsonl of messages (default: built in)")
    parser.add_argument(
        "--batches",
        type=numbers,
        default=(1, 4, 16),
        metavar="N,N,...",
        help="sequences at once, one after the other (default: 1,4,16)",
    )
    parser.add_argument(
        "--tokens", type=positive, default=48, metavar="N", help="tokens per prompt (default: 48)"
    )
    parser.add_argument("--out", metavar="FILE", help="draw the frontier there, as PNG")
    parser.add_argument(
        "--forget", action="store_true", help="only delete this model's saved profiles"
    )
    own = ("max_sequences", "policy", *SHAPE, "lora_modules")
    flags_of(EngineConfig, parser, "model and engine", without=own, draft_on_error="stop")


def _doctor_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-torch", action="store_true", help="do not import torch (it is slow)")


def _models_flags(parser: argparse.ArgumentParser) -> None:
    how: dict[str, Any] = {"nargs": "?", "default": "list", "help": "what to do (default: list)"}
    parser.add_argument("action", choices=("list", "show", "rm", "pull"), **how)
    parser.add_argument("model", nargs="?", help="built-in name or hub id; not for list")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="show: write the tokenizer there, in Hugging Face's format",
    )


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    _model_word(parser)
    parser.add_argument(
        "--device-memory",
        type=float,
        metavar="GIB",
        help="of each device, a GPU unless --device or --executor says otherwise (default: what is "
        "free here)",
    )
    flags_of(EngineConfig, parser, "model and engine")


def _completion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"), help="which shell")


COMMANDS: dict[str, tuple[str, Flags]] = {
    "run": ("Answer one prompt and show how fast.", _run_flags),
    "chat": ("Talk to a model.", _chat_flags),
    "serve": ("Serve a model over the OpenAI API.", _serve_flags),
    "bench": ("Measure any OpenAI endpoint under load.", _bench_flags),
    "prove": ("Show that speculation changes no token.", _prove_flags),
    "eval": ("Measure what a draft reaches on prompt sets.", _eval_flags),
    "tune": ("Find the fastest way to speculate here and keep it.", _tune_flags),
    "train": ("Train a draft head for a model.", _train_flags),
    "doctor": ("Describe this machine and what works on it.", _doctor_flags),
    "plan": ("Show the memory that a model would need, without loading it.", _plan_flags),
    "models": ("List, describe, remove or download models.", _models_flags),
    "completion": ("Print a completion script for a shell.", _completion_flags),
    **verbs.COMMANDS,
}
