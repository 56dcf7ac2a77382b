"""Configuration is values: frozen, checked at birth, resolved into *new* values.

Every option is declared once, here, with its help text and bounds. The command line's flags,
the validation and the printed configuration all derive from these fields.
"""

from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

from forerun.errors import ConfigError

MAX_CHOICES = 128
"""Largest n of a request that any engine takes; a server may allow less."""


def option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    flag: str | None = None,
) -> Any:
    """A dataclass field that knows its help text, its bounds (inclusive) and its flag.

    `choices` lists the allowed strings; `flag` overrides the flag's name, which is otherwise
    the field's.
    """
    facts = {"help": text, "choices": choices, "low": low, "high": high, "flag": flag}
    return field(default=default, metadata=facts)


def validate(config: Any) -> None:
    """Hold every field of a configuration to its declared bounds. Raises ConfigError."""
    for item in fields(config):
        value, facts = getattr(config, item.name), item.metadata
        name = item.name.replace("_", "-")
        if facts.get("choices") and value not in facts["choices"]:
            allowed = ", ".join(facts["choices"])
            raise ConfigError(f"{name} is {value!r}, but must be one of: {allowed}.")
        if value is None or isinstance(value, str | bool | tuple):
            continue
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{name} is {value}, but must be a finite number.")
        low, high = facts.get("low"), facts.get("high")
        if not ((low is None or value >= low) and (high is None or value <= high)):
            span = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"{name} is {value}, but must be {span}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to load and how to run it. `None` and "auto" are resolved by
    `forerun.build.engine.load`, whose result carries the configuration that was chosen.
    """

    model: str = option(
        "smollm2-135m",
        "built-in name, folder with config.json and safetensors, GGUF file, hub id, or 'toy'",
    )
    executor: str = option(
        "auto",
        "what computes: the native CPU core, torch, jax, or the toy; auto prefers the native core, "
        "and jax on a machine with a TPU",
        choices=("auto", "cpu", "torch", "jax", "toy"),
    )
    device: str = option(
        "auto",
        "cpu, a torch device (cuda or cuda:N, which imply the torch executor), or tpu, which "
        "implies the jax executor; auto is tpu where there is one, cuda where torch can use a GPU "
        "and the executor leaves it open, else cpu",
    )
    tp_size: int = option(
        1, "devices that share every layer, tensor parallel (jax executor)", low=1, high=4096
    )
    dtype: str = option(
        "auto",
        "numbers: as the model's file has them (native core), or a torch format; auto is file, "
        "or with torch float32 on cpu and bfloat16 on cuda; float8 keeps bfloat16 outside of "
        "the blocks' products",
        choices=("auto", "file", "float32", "bfloat16", "float16", "float8"),
    )
    kv_dtype: str = option(
        "same",
        "numbers in the key/value cache: those computed with, or float8 with a scale per head and "
        "token (torch executor; a draft head's cache stays as it is)",
        choices=("same", "float8"),
    )
    disable_cuda_graph: bool = option(
        False, "launch every kernel by itself instead of replaying captured rounds (cuda)"
    )
    enable_torch_compile: bool = option(
        False, "let torch.compile write the kernels between the matrix products (torch executor)"
    )
    overlap: bool = option(
        False,
        "plan the next step while this one runs (cuda, captured rounds, speculation off or head; "
        "the text stays the same; not measured on a GPU yet)",
    )
    threads: int | None = option(
        None, "compute threads (default: one per physical core, 16 at most)", low=1, high=1024
    )
    context: int | None = option(
        None, "longest sequence in tokens (default: the model's, as far as memory allows)", low=8
    )
    page_size: int = option(16, "tokens per page of the key/value cache", low=1, high=256)
    kv_tokens: int | None = option(
        None, "room in the key/value cache, in tokens (default: planned from memory)", low=16
    )
    max_sequences: int = option(64, "sequences that run at once", low=1, high=4096)
    max_step_nodes: int = option(
        512, "tokens and draft tokens in one step over all sequences", low=1, high=65536
    )
    max_waiting: int = option(1024, "sequences that may wait; more are refused", low=0, high=10**6)
    speculation: str = option(
        "auto",
        "what drafts: a draft head, n-grams (lookup in the text so far, and the draft's table of "
        "what the model usually says), both (n-grams where they are sure, the head elsewhere), or "
        "nothing; auto is both if --draft names a head, else n-gram",
        choices=("auto", "head", "ngram", "both", "off"),
    )
    draft: str | None = option(
        None,
        "folder of a draft: a head (EAGLE-1/2, EAGLE-3, 3.1), an n-gram table, or both; the "
        "default is the one that comes with a built-in model, if one does; none = no draft",
    )
    draft_reading: str | None = option(
        None,
        "how the draft head's configuration is meant, as --probe found it, such as "
        "features=2/15/27,residual=raw,feedback=normed,theta=10000",
    )
    draft_width: int = option(
        1, "children per node of a draft head's tree; 1 = chains", low=1, high=16
    )
    draft_on_error: str = option(
        "stop",
        "what a draft that cannot be used means: stop, or disable speculation and say so",
        choices=("stop", "disable"),
    )
    draft_nodes: int = option(8, "draft tokens per sequence and step, at most", low=0, high=256)
    draft_depth: int = option(8, "longest path of draft tokens", low=0, high=64)
    grammar_backend: str = option(
        "llguidance",
        "what matches grammars; xgrammar takes fewer kinds and is a package of its own",
        choices=("llguidance", "xgrammar"),
    )
    policy: str = option(
        "auto",
        "how many draft tokens: always draft-nodes (fixed), or as many as pay by measured costs "
        "and acceptance (adaptive); auto is adaptive, but fixed on the toy",
        choices=("auto", "adaptive", "fixed"),
    )

    def __post_init__(self) -> None:
        """Refuse what is out of bounds or contradicts itself. Raises ConfigError."""
        validate(self)
        self._check_device()
        chosen = self.executor in ("cpu", "torch", "jax") and self.dtype != "auto"
        if chosen and (self.dtype == "file") != (self.executor == "cpu"):
            raise ConfigError(
                f"dtype {self.dtype} does not go with the {self.executor} executor: the native "
                "core computes with the file's own numbers, the others with a format."
            )
        if self.kv_dtype != "same" and (self.toy or self.executor in ("cpu", "jax", "toy")):
            raise ConfigError(
                f"kv-dtype {self.kv_dtype} needs the torch executor; the others have a format of "
                "their own."
            )
        if (self.model == "toy") != (self.executor == "toy") and self.executor != "auto":
            raise ConfigError("the toy model and the toy executor only work with each other.")

    def _check_device(self) -> None:
        kind = self.device.split(":")[0]
        if not (self.device in ("auto", "cpu", "tpu") or kind == "cuda"):
            raise ConfigError(
                f"device is {self.device!r}, but must be auto, cpu, cuda, cuda:N or tpu."
            )
        needed = {"cuda": "torch", "tpu": "jax"}.get(kind)
        if needed is not None and self.executor not in ("auto", needed):
            raise ConfigError(
                f"device {self.device} needs the {needed} executor, but executor is "
                f"{self.executor}."
            )

    @property
    def toy(self) -> bool:
        """True for the hand-computable model, which needs no file and no torch."""
        return self.model == "toy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How the HTTP server listens, whom it lets in, and what it refuses."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 opens it to the network")
    port: int = option(8000, "port to listen on; 0 takes any free one", low=0, high=65535)
    api_keys: tuple[str, ...] = option(
        (), "require this key (may be repeated); without one the server is open", flag="api-key"
    )
    served_name: str = option("", "the model's name in the API (default: the model's own)")
    tool_parser: str = option(
        "auto",
        "how the model writes tool calls; auto looks at its chat template",
        choices=("auto", "hermes", "llama3", "mistral", "mistral-args", "glm"),
    )
    reasoning_end: str = option(
        "auto",
        "text that ends the model's reasoning, such as </think>; auto looks at its chat "
        "template, off takes all text for the answer",
    )
    max_body_bytes: int = option(4 << 20, "largest request body, in bytes", low=1024)
    max_choices: int = option(16, "largest n of one request", low=1, high=MAX_CHOICES)
    max_logprobs: int = option(20, "largest top_logprobs", low=0, high=1000)
    max_stop: int = option(16, "most stop strings of one request", low=0, high=256)
    keep_alive_seconds: float = option(
        10.0, "silence on a stream before a keep-alive comment", low=0.1
    )
    send_seconds: float = option(
        60.0, "a client that reads nothing for this long is dropped", low=0.1
    )
    request_seconds: float = option(600.0, "longest a request may take", low=0.1)
    drain_seconds: float = option(
        30.0, "time for running requests to finish after SIGTERM", low=0.0
    )

    def __post_init__(self) -> None:
        """Refuse what is out of bounds. Raises ConfigError."""
        validate(self)
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty; leave api-key out to run without keys.")
        if not all(key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key holds characters that no header can carry.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskConfig:
    """How `run`, `chat` and `bench` ask for text. Names are those of the API."""

    max_tokens: int = option(512, "longest answer in tokens", low=1)
    temperature: float = option(0.0, "0 is greedy; higher is more varied", low=0.0, high=100.0)
    top_p: float = option(
        1.0, "sample from the most likely tokens that reach this share", low=0, high=1
    )
    top_k: int = option(0, "sample from this many most likely tokens; 0 is all", low=0)
    min_p: float = option(0.0, "drop tokens below this share of the most likely", low=0.0, high=1.0)
    seed: int = option(0, "same seed, same text, whatever speculation does", low=0, high=2**63 - 1)
    repetition_penalty: float = option(1.0, "divide the logits of what was said", low=0.01)
    stop: tuple[str, ...] = option((), "end before this text (may be repeated)")
    ignore_eos: bool = option(False, "do not end at the model's end-of-text token")

    def __post_init__(self) -> None:
        """Refuse what is out of bounds. Raises ConfigError."""
        validate(self)
        if not all(self.stop):
            raise ConfigError("a stop text is empty; leave stop out to have none.")
