"""Configurations are values: frozen, checked when created, resolved into *new* values.

Every option is declared once, here, with its help text and bounds. The command line's flags, the
validation and the printed configuration are all derived from these fields.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from forerun.draft_shape import DraftShape
from forerun.errors import ConfigError
from forerun.options.algorithms import (
    MOST_STEPS,
    NAMES,
    Algorithm,
    algorithm,
    check_shape,
    draft_shape,
)
from forerun.options.fields import adapters_in, addresses, option, settle
from forerun.options.sampling_params import NEUTRAL, RANGES, parse_overrides

log = logging.getLogger(__name__)

_KERNELS = frozenset(
    {"fa", "fa3", "fa4", "flash_attn", "flash_attention", "flashinfer",
     "flex_attention", "flashmla", "cutlass_mla", "trtllm_mla", "trtllm_mha", "triton_attn",
     "xformers", "torch_sdpa", "aiter", "native"}
)  # fmt: skip
"""Other servers' names of attention kernels that do not exist here."""


def attention_kernel(name: str) -> str:
    """Return the attention backend for a name: the name itself, or "auto", with a line in the log,
    for kernels that only other servers have.
    """
    if name.lower() not in _KERNELS:
        return name
    log.warning("attention backend %s: the device decides what computes attention here.", name)
    return "auto"


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.-]+(:[0-9]+)?|[a-z]+://\[[0-9a-f:]+\](:[0-9]+)?")

MAX_CHOICES = 128
"""Largest n of a request that any engine accepts; a server may allow less."""


def _device(name: str) -> str:
    """Return a device by llama.cpp's names, none and CUDA1, or ROCm's as torch's; of several the
    first, with a line in the log.
    """
    first, *others = name.split(",")
    if others:
        log.warning("device %s: the first counts here; --tp-size shares a model.", name)
    gpu = re.fullmatch(r"(?:cuda|rocm|hip)(?::?(\d+))?", first.lower())
    if gpu is not None:
        return f"cuda:{gpu[1]}" if gpu[1] else "cuda"
    return "cpu" if first == "none" else first


def _no_minus_one(text: str) -> str | None:
    """Return the text of a number, but None for -1, llama.cpp's word for its own choice."""
    return None if text == "-1" else text


NATIVE_DTYPES = ("file", "q8_0", "q4_1", "q4_k")
"""Values of `dtype` for the compiled core."""
KV_DTYPES = {"q8_0": "cpu", "float8": "torch"}
"""Formats of keys and values that only one executor supports, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The model to load, and the options of its engine. `None` and "auto" are resolved by
    `forerun.build.engine.load`, whose result has the resolved configuration.
    """

    model: str = option(
        "smollm2-135m",
        "built-in name, folder with config.json and safetensors, GGUF file, hub id, or 'toy'",
    )
    revision: str | None = option(
        None, "branch, tag or commit of a model that is named by its hub id (default: main)"
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "LoRA adapter beside the model, in peft's format: NAME=FOLDER (may be repeated); requests "
        "choose it by the model's name (cpu, and torch on one device)",
        spellings=adapters_in,
    )
    chat_template: str | None = option(
        None,
        "instead of the model's own chat template: a file with one (Jinja), the template itself, "
        "or a name that llama.cpp knows, such as chatml",
    )
    chat_template_kwargs: str | None = option(
        None,
        "variables of the chat template where requests do not set them: a JSON object, such as "
        '{"enable_thinking": false}',
    )
    sampling_defaults: str = option(
        "model",
        "defaults of temperature, top_p, top_k, min_p and repetition_penalty: the model's "
        "recommendation (generation_config.json), or neutral values (1, 1, 0, 0, 1)",
        choices=("model", "none"),
        spellings=lambda name: {"openai": "none", "vllm": "none", "auto": "model"}.get(name, name),
    )
    sampling_override: tuple[str, ...] = option(
        (),
        "defaults of sampling parameters instead of the model's, as NAME=VALUE, such as "
        "temperature=0.7 (may be repeated)",
    )
    executor: str = option(
        "auto",
        "what runs the model: cpu (the compiled core), torch, jax, or the toy; auto prefers the "
        "compiled core, and jax on a machine with a TPU",
        choices=("auto", "cpu", "torch", "jax", "toy"),
    )
    device: str = option(
        "auto",
        "cpu, a torch device (cuda or cuda:N, which imply the torch executor), or tpu, which "
        "implies the jax executor; auto is tpu where there is one, cuda where torch can use a GPU "
        "and the executor leaves it open, else cpu",
        spellings=_device,
    )
    tp_size: int = option(
        1,
        "devices that share every layer, tensor parallel (docs/use/scaling.md): on torch one "
        "process each, sharing the CPU without GPUs; on jax devices of one process",
        low=1,
        high=4096,
    )
    ep_size: int = option(
        1,
        "expert parallel: number of groups of those devices among which whole experts are "
        "divided; 1 splits every expert over all devices, 0 means as many as --tp-size (jax "
        "always does that)",
        low=0,
        high=4096,
    )
    replicate_shared_expert: bool = option(
        False,
        "keep the expert that every token visits whole on each of those devices, instead of "
        "splitting its columns (torch)",
    )
    prefill_attention_backend: str = option(
        "auto",
        "attention kernel for prompt chunks on cuda: triton, which is Forerun's own, or "
        "torch_native, torch's FlashAttention, one call a layer for all prompts (layers with a "
        "softcap or sinks always use triton); auto is torch_native in 16 bits",
        choices=("auto", "triton", "torch_native"),
        spellings=attention_kernel,
    )
    dtype: str = option(
        "auto",
        "format of the weights: file, as stored (compiled core and torch); q8_0, q4_1, q4_k, which "
        "quantise floats to 8 or 4 bits (compiled core; embedding and output head 8); or a torch "
        "format, to which all weights are converted; auto is file, but with torch float32 on cpu, "
        "and on cuda bfloat16 for unquantised weights; float8 rounds the layers' weights to it, "
        "with a scale per row, and computes in bfloat16",
        choices=("auto", *NATIVE_DTYPES, "float32", "bfloat16", "float16", "float8"),
        spellings=lambda name: {"half": "float16", "float": "float32"}.get(name, name),
    )
    kv_dtype: str = option(
        "same",
        "format of the key/value cache: the same as in computation; q8_0, 8 bits with a 16-bit "
        "scale for every 32 numbers (compiled core); or float8 with a scale per head and token "
        "(torch executor); not for a draft model's cache",
        choices=("same", *KV_DTYPES),
    )
    disable_cuda_graph: bool = option(
        False, "launch every kernel by itself instead of replaying captured rounds (cuda)"
    )
    enable_torch_compile: bool = option(
        False, "let torch.compile write the kernels between the matrix products (torch executor)"
    )
    overlap: bool | None = option(
        None,
        "begin the next step before the host has processed this one, or, with drafts from the text "
        "or a grammar, before it has sent this one's outputs (captured rounds on cuda, jax; the "
        "text stays the same; not measured on a TPU yet; default: on with captured rounds, else "
        "off)",
    )
    threads: int | None = option(
        None,
        "compute threads (default: one per physical core, 16 at most)",
        low=1,
        high=1024,
        spellings=_no_minus_one,
    )
    context: int | None = option(
        None, "longest sequence in tokens (default: the model's, as far as memory allows)", low=8
    )
    page_size: int = option(16, "tokens per page of the key/value cache", low=1, high=256)
    kv_tokens: int | None = option(
        None, "room in the key/value cache, in tokens (default: planned from memory)", low=16
    )
    kv_store: str | None = option(
        None,
        "folder for pages of the key/value cache and for what drafting learnt, found again after a "
        "restart; made if it is missing; as sensitive as prompts (default: none)",
    )
    kv_store_size: int | None = option(
        None,
        "most bytes of that folder, such as 10GB; what was used longest ago goes first (default: "
        "10 GB, or a quarter of what is free on the disk)",
        low=1 << 16,
    )
    max_sequences: int = option(
        64, "sequences that run at once", low=1, high=4096, spellings=_no_minus_one
    )
    mem_fraction_static: float | None = option(
        None,
        "share of the free memory that weights, key/value cache and scratch may take; the rest is "
        "for prompts and the machine (default: 0.6; 0.88 on a GPU or TPU)",
        low=0.05,
        high=0.98,
    )
    chunked_prefill_size: int | None = option(
        None,
        "most tokens of prompts and draft tokens in one step over all sequences (default: 512; on "
        "a GPU 2048, from 35 GB of its memory 4096, from 60 GB 8192)",
        low=1,
        high=65536,
    )
    max_waiting: int = option(1024, "sequences that may wait; more are refused", low=0, high=10**6)
    speculative_algorithm: str = option(
        "AUTO",
        "how to draft: a draft head (EAGLE, EAGLE3), a block drafter (DFLASH), n-grams (NGRAM: "
        "lookup in the text so far, and the draft's n-gram table, or counts of finished answers), "
        "or not at all (OFF); AUTO uses what a named draft holds, with n-grams beside a head, and "
        "on a CPU beside any; with none named the model's own prediction layers (jax: just one) or "
        "assistant, else NGRAM",
        choices=NAMES,
        spellings=lambda name: algorithm(name).name,
    )
    speculative_draft_model_path: str | None = option(
        None,
        "folder or hub id of a draft: a head (EAGLE-1/2, EAGLE-3, 3.1) or a block drafter (DFlash, "
        "JetSpec, DSpark; as EAGLE-3 also in GGUF), an n-gram table, or both; or a smaller model; "
        "the default is the one that comes with a built-in model, if one does; none = no draft",
    )
    speculative_draft_model_revision: str | None = option(
        None, "branch, tag or commit of a draft that is named by its hub id (default: main)"
    )
    speculative_token_map: str | None = option(
        None,
        "file of the target ids that a draft model may propose (.json, .safetensors, .pt), or "
        "one of a hub's model: org/name/freq_32768.pt; on a CPU the default for drafts that score "
        "150,000 tokens or more is a map of the 32,768 most frequent in ordinary text, counted at "
        "the first start; none = no map",
    )
    speculative_ngram_capacity: int = option(
        1 << 19,
        "n-grams of finished answers that are remembered to draft from, where the draft has no "
        "n-gram table of its own: each a run of 1 to 4 tokens and what followed it, up to 80 "
        "bytes; 0 = none",
        low=0,
        high=1 << 26,
    )
    speculative_ngram_text: bool = option(
        True,
        "where the draft has no n-gram table, count one of a text that ships, beside serving and "
        "once per tokenizer; it is kept in the cache",
    )
    speculative_num_steps: int | None = option(
        None,
        "longest path of draft tokens (default: 8, or a block drafter's block)",
        low=0,
        high=MOST_STEPS,
    )
    speculative_eagle_topk: int | None = option(
        None,
        "children per node of a draft head's tree, and expanded nodes per level (with a block "
        "drafter every node is); 1 = chains (default: 1)",
        low=1,
        high=16,
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        "most tokens to verify per sequence and step: the last accepted one and its draft tokens "
        "(default: steps x top-k + 1)",
        low=1,
        high=257,
    )
    speculative_accept_threshold_single: float = option(
        1.0,
        "when sampling, accept a draft token with at least this probability, even if the model "
        "chose another; below 1 is lossy, and answers report it",
        low=0.0,
        high=1.0,
    )
    speculative_accept_threshold_acc: float = option(
        1.0,
        "when sampling, divide the random draw's threshold by this, so that more draft tokens are "
        "accepted than the model chose; below 1 is lossy, and answers report it",
        low=0.0,
        high=1.0,
    )
    draft_on_error: str = option(
        "disable",
        "if the draft cannot be used: disable speculation and report it, or stop",
        choices=("disable", "stop"),
    )
    policy: str = option(
        "auto",
        "number of draft tokens: always the most (fixed), or as many as save time by measured "
        "costs and acceptance (adaptive); auto is adaptive, but fixed on the toy",
        choices=("auto", "adaptive", "fixed"),
    )

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is out of bounds, or two contradict each other."""
        settle(self)
        parse_overrides(self.sampling_override)
        self._check_speculation()
        self._check_device()
        chosen = self.executor in ("cpu", "torch", "jax") and self.dtype != "auto"
        keeps_format = self.dtype == "file" and self.executor == "torch"
        if (
            chosen
            and not keeps_format
            and (self.dtype in NATIVE_DTYPES) != (self.executor == "cpu")
        ):
            native, formats = ", ".join(NATIVE_DTYPES), "float32, bfloat16, float16"
            able = {"cpu": native, "torch": f"file, {formats}, float8"}.get(self.executor, formats)
            raise ConfigError(
                f"dtype is {self.dtype}, but the {self.executor} executor computes in: {able}. "
                "Choose one of these, or leave dtype or executor out."
            )
        if self.enable_torch_compile and self.executor in ("cpu", "jax", "toy"):
            raise ConfigError(
                f"enable-torch-compile needs the torch executor, but executor is {self.executor}; "
                "leave one of them out."
            )
        if self.prefill_attention_backend not in ("auto", "triton") and (
            self.toy or self.executor in ("cpu", "jax", "toy") or self.device in ("cpu", "tpu")
        ):
            raise ConfigError(
                f"prefill-attention-backend {self.prefill_attention_backend} needs the torch "
                "executor on cuda; elsewhere the device decides: leave it out."
            )
        able = KV_DTYPES.get(self.kv_dtype, self.executor)
        if self.executor not in ("auto", able) or (self.kv_dtype != "same" and self.toy):
            raise ConfigError(
                f"kv-dtype {self.kv_dtype} needs the {able} executor: leave it out, or use "
                f"--executor {able}."
            )
        if self.kv_store_size is not None and self.kv_store is None:
            raise ConfigError(
                "kv-store-size limits the size of the kv-store folder, but there is none: add "
                "--kv-store FOLDER, or leave it out."
            )
        if self.lora_modules and self.toy:
            raise ConfigError("lora-modules needs a model with weights; the toy has none.")
        names = [name for name, _ in self.adapters]
        if len(set(names)) < len(names):
            raise ConfigError(f"lora-modules names an adapter twice: {', '.join(names)}.")
        if (self.model == "toy") != (self.executor == "toy") and self.executor != "auto":
            raise ConfigError(
                f"model is {self.model} and executor is {self.executor}, but the toy model and the "
                "toy executor only work together: leave executor out."
            )
        if self.toy and self.tp_size > 1:
            raise ConfigError(
                f"tp-size is {self.tp_size}, but the toy model runs in one process: leave it out."
            )
        if self.toy and self.device not in ("auto", "cpu"):
            raise ConfigError(
                f"device is {self.device}, but the toy model runs on the CPU: leave it out."
            )

    def _check_device(self) -> None:
        if self.ep_size > self.tp_size:
            raise ConfigError(
                f"ep-size is {self.ep_size}, but tp-size is {self.tp_size}: experts are divided "
                "among the devices of tp-size. Raise that or lower ep-size."
            )
        kind = self.device.split(":")[0]
        if not re.fullmatch(r"auto|cpu|tpu|cuda(:\d+)?", self.device):
            raise ConfigError(
                f"device is {self.device!r}, but must be auto, cpu, cuda, cuda:N or tpu."
            )
        needed = {"cuda": "torch", "tpu": "jax"}.get(kind)
        if needed is not None and self.executor not in ("auto", needed):
            raise ConfigError(
                f"device {self.device} needs the {needed} executor, but executor is "
                f"{self.executor}: leave one of them out."
            )

    def _check_speculation(self) -> None:
        shape = (self.speculative_num_steps, self.speculative_eagle_topk)
        check_shape(self.algorithm, *shape, self.speculative_num_draft_tokens)
        named = self.speculative_token_map not in (None, "", "none")
        if named and self.speculates and not self.algorithm.model:
            raise ConfigError(
                f"speculative-token-map limits what a draft model proposes, but "
                f"{self.algorithm.name} has none; leave it out."
            )
        if self.speculative_draft_model_revision and not self.speculative_draft_model_path:
            raise ConfigError(
                "speculative-draft-model-revision names a version of a draft on the hub, but "
                "speculative-draft-model-path names no draft: give both or neither."
            )

    @property
    def overridden_sampling(self) -> dict[str, float]:
        """The sampling parameters that `sampling_override` sets, by name."""
        return parse_overrides(self.sampling_override)

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """(name, folder) of each LoRA adapter."""
        found = (one.partition("=") for one in self.lora_modules)
        return tuple((name, folder) for name, _, folder in found)

    @property
    def algorithm(self) -> Algorithm:
        """The row of the speculative algorithm in options.algorithms."""
        return algorithm(self.speculative_algorithm)

    @property
    def speculates(self) -> bool:
        """Whether the algorithm drafts, whatever the other options are."""
        return self.algorithm.model or self.algorithm.lookup

    @property
    def lossy(self) -> bool:
        """Whether sampled texts may differ from plain decoding's if a request sets no accept
        thresholds.
        """
        single, acc = (
            self.speculative_accept_threshold_single,
            self.speculative_accept_threshold_acc,
        )
        return self.speculates and min(single, acc) < 1

    @property
    def draft_shape(self) -> DraftShape:
        """The largest draft, with defaults for options that are not set."""
        steps = self.speculative_num_steps
        return draft_shape(
            self.algorithm.max_steps if steps is None else steps,
            self.speculative_eagle_topk,
            self.speculative_num_draft_tokens,
        )

    @property
    def toy(self) -> bool:
        """Whether the model is the hand-computable one, which needs no file and no torch."""
        return self.model == "toy"


def exact(config: EngineConfig) -> EngineConfig:
    """Return the configuration unchanged. Raises ConfigError if its accept thresholds let
    speculation change texts.
    """
    if config.lossy:
        raise ConfigError(
            "this compares texts that are to be the same, but accept thresholds below 1 let them "
            "differ; leave speculative-accept-threshold-single and -acc out."
        )
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The options of the HTTP server: its address, and the requests that it accepts."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 opens it to the network")
    port: int = option(8000, "port to listen on; 0 takes any free one", low=0, high=65535)
    api_keys: tuple[str, ...] = option(
        (),
        "require this key (several: separated by commas, or repeated); default: no key is needed",
        flag="api-key",
        spellings=addresses,
    )
    api_key_file: str | None = option(
        None, "file with one key per line, kept out of the list of processes"
    )
    ssl_keyfile: str | None = option(None, "private key; with a certificate the server speaks TLS")
    ssl_certfile: str | None = option(None, "certificate that goes with the key")
    allowed_origins: tuple[str, ...] = option(
        (),
        "web page that may use this server from a browser, such as https://chat.example, or * for "
        "any (may be repeated)",
        spellings=addresses,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "public host name that requests may use, such as llm.example.org or *.example.org, or * "
        "for any (may be repeated); addresses and local names are always allowed",
        spellings=addresses,
    )
    log_level: str = option(
        "info",
        "lowest level of lines in the log",
        choices=("debug", "info", "warning", "error", "critical"),
        spellings=str.lower,
    )
    log_format: str = option(
        "text",
        "the log's lines: text, or json, one object per line",
        choices=("text", "json"),
        spellings=str.lower,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "send a span per request to this OpenTelemetry collector, by OTLP over HTTP, such as "
        "http://localhost:4318 (needs the extra otel)",
    )
    decode_log_interval: int = option(
        0, "steps between two lines about decoding in the log; 0 = none", low=0
    )
    sglang_metrics: bool = option(False, "add SGLang's names to /metrics")
    served_name: tuple[str, ...] = option(
        (),
        "the model's name in the API (several: separated by commas, or repeated; answers have the "
        "first; default: the model's own)",
        spellings=addresses,
    )
    unload_after: float = option(
        300.0,
        "with several models: seconds that a model stays loaded after its last request; 0 = until "
        "another needs the room",
        low=0.0,
    )
    max_loaded_models: int = option(
        0, "with several models: most models loaded at once; 0 = as memory allows", low=0
    )
    strict_model_names: bool = option(
        False, "answer 404 to requests for another model, instead of using the one served"
    )
    ui: bool = option(True, "show the web UI at /: chat, speculation, dashboard")
    engine_process: bool = option(
        True, "run the engine in a process of its own, so that HTTP work does not delay it"
    )
    tool_parser: str = option(
        "auto",
        "format of the model's tool calls; auto detects it from the chat template",
        choices=(
            *("auto", "hermes", "llama3", "mistral", "mistral-args", "glm"),
            *("qwen3-coder", "seed-oss"),
            *("granite", "phi4", "kimi", "harmony", "lfm2", "gemma4"),
            *("minimax-m2", "deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "deepseek-v4"),
            *("gigachat3.1", "gigachat3.5", "minicpm5", "functiongemma"),
            *("nemotron", "apriel", "olmo3"),
        ),
    )
    reasoning_end: str = option(
        "auto",
        "text that ends the model's reasoning, such as </think>; auto detects it from the chat "
        "template, off treats all text as the answer",
    )
    thinking_budget: int = option(
        -1,
        "most tokens of a model's thought, which is ended then; requests may have their own; "
        "-1 = no limit",
        low=-1,
    )
    thinking_budget_message: str = option(
        "", "text that stands before the end of a thought whose budget is used up"
    )
    additional_properties: str = option(
        "allow",
        "keys that a JSON schema does not name: allow them, as JSON Schema does, or deny them "
        "unless the schema mentions further keys",
        choices=("allow", "deny"),
    )
    max_body_bytes: int = option(4 << 20, "largest request body, in bytes", low=1024)
    max_choices: int = option(16, "largest n of one request", low=1, high=MAX_CHOICES)
    fit_max_tokens: bool = option(
        False,
        "cut a request's max_tokens to what the context has room for, instead of refusing it; "
        "x-forerun-ignored says so",
    )
    max_logprobs: int = option(20, "largest top_logprobs", low=0, high=1000)
    max_stop: int = option(16, "most stop strings of one request", low=0, high=256)
    keep_alive_seconds: float = option(
        10.0, "seconds of silence on a stream before a keep-alive comment", low=0.1
    )
    send_seconds: float = option(
        60.0,
        "seconds after which a client is dropped that reads nothing of its answer, or does not "
        "finish sending a request's head or body",
        low=0.1,
    )
    request_seconds: float = option(600.0, "longest time of a request, in seconds", low=0.1)
    watchdog_seconds: float = option(
        300.0,
        "seconds after which a step of the engine counts as stuck: /health fails, clients get 503",
        low=0.1,
    )
    drain_seconds: float = option(
        30.0, "seconds for running requests to finish after SIGTERM", low=0.0
    )

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is out of bounds."""
        settle(self)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl-keyfile and ssl-certfile go together: give both or neither.")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty; leave api-key out to run without keys.")
        if not all(key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key has characters that an HTTP header cannot carry.")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed-origins has {origin!r}, which no browser sends: an origin is * or "
                    "scheme, host and port without a path, such as https://chat.example.org."
                )


def _sampling_param(name: str, text: str) -> Any:
    """Declare the field of a sampling parameter, None unless it is set."""
    low, high = RANGES[name]
    return option(None, text, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """The sampling options of `run`, `chat` and `bench`, named as in the API."""

    max_tokens: int = option(512, "longest answer in tokens", low=1)
    temperature: float | None = _sampling_param(
        "temperature",
        "0 is greedy; higher is more varied (default: the model's recommendation, else 1)",
    )
    top_p: float | None = _sampling_param(
        "top_p",
        "sample from the most likely tokens that reach this share (default: the model's, else 1)",
    )
    top_k: int | None = _sampling_param(
        "top_k",
        "sample from this many most likely tokens; 0 is all (default: the model's, else 0)",
    )
    min_p: float | None = _sampling_param(
        "min_p",
        "drop tokens below this share of the most likely (default: the model's, else 0)",
    )
    seed: int | None = option(
        0, "same seed, same text, whatever speculation does", low=0, high=2**63 - 1
    )
    repetition_penalty: float | None = _sampling_param(
        "repetition_penalty",
        "penalise tokens of prompt and answer (default: the model's, else 1)",
    )
    stop: tuple[str, ...] = option((), "end before this text (may be repeated)")
    ignore_eos: bool = option(False, "do not end at the model's end-of-text token")

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is out of bounds."""
        settle(self)
        if not all(self.stop):
            raise ConfigError("a stop text is empty; leave stop out to have none.")

    def options(self, recommended: Mapping[str, float]) -> dict[str, Any]:
        """Return every field with a value, by name: the requested one, else the model's
        recommendation, else the neutral one (NEUTRAL).
        """
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        return {**NEUTRAL, **recommended, **given}
