"""Other servers' names for our options, for the command line, the environment, files and
docs/use/migrating.md.

A row is an Alias (alias.py): here those that set fields of ours, in without_effect.json those that
set none, grouped by the sentence with the reason. Names and their meanings are those of SGLang
0.5.23, vLLM 0.32.0 and llama.cpp's server.
"""

import json
from pathlib import Path

from forerun.options.alias import (
    LLAMA,
    METHODS,
    SGLANG,
    VLLM,
    Alias,
    Verdict,
    chain_length,
    default_length,
    default_seed,
    effort,
    file_quantization,
    gpu,
    gpu_layers,
    grammar_backend,
    named_format,
    sampling_default,
    sampling_object,
    speculative_config,
    speculative_method,
    speculative_types,
    structured_outputs,
)
from forerun.options.flags import MANY, NOTHING, VALUE

_S, _V, _L, _SV = (SGLANG,), (VLLM,), (LLAMA,), (SGLANG, VLLM)
SETS = Verdict.SETS

_ONE_STEP = "prompts and answers share steps of at most --chunked-prefill-size tokens"
_GRAMMARS = (
    "llguidance matches all grammars; auto, guidance and, with a warning, xgrammar, outlines and "
    "lm-format-enforcer are taken"
)
_AS_LEFT_OUT = "0, -1 or auto: as if it were left out"

_LEFT_OUT = dict.fromkeys(("0", "-1", "auto"))
_DTYPES = dict.fromkeys(("auto", "f16", "bf16", "bfloat16"), "same")
_DTYPES |= dict.fromkeys(("fp8", "fp8_e4m3"), "float8")
_WEIGHTS = {"fp8": "float8", "gguf": "file", "q8_0": "q8_0", "q4_1": "q4_1", "q4_k": "q4_k"}
_HERMES = dict.fromkeys(("hermes", "qwen", "qwen25", "qwen3"), "hermes")
_LLAMA3 = dict.fromkeys(("llama3", "llama3_json"), "llama3")
_GLM = dict.fromkeys(("glm", "glm45", "glm47"), "glm")
_HARMONY = dict.fromkeys(("gpt-oss", "openai"), "harmony")
_KIMI = dict.fromkeys(("kimi", "kimi_k2"), "kimi")
_QWEN = dict.fromkeys(("qwen3-coder", "qwen3_coder", "qwen3_xml"), "qwen3-coder")
_SEED = dict.fromkeys(("seed-oss", "seed_oss"), "seed-oss")
_MORE = {"mistral": "mistral", "granite": "granite", "phi4_mini_json": "phi4", "lfm2": "lfm2"}
_MORE |= {"olmo3": "olmo3", "functiongemma": "functiongemma"}
_MORE |= {"gemma4": "gemma4", "minimax-m2": "minimax-m2", "minimax_m2": "minimax-m2"}
_MORE |= dict.fromkeys(("deepseekv3", "deepseek_v3"), "deepseek-v3")
_MORE |= dict.fromkeys(("deepseekv31", "deepseek_v31"), "deepseek-v3.1")
_MORE |= dict.fromkeys(("deepseekv32", "deepseek_v32"), "deepseek-v3.2")
_MORE |= dict.fromkeys(("deepseekv4", "deepseek_v4"), "deepseek-v4")
_OTHERS = _KIMI | _QWEN | _SEED | _MORE | _HARMONY
_TOOLS = {"auto": "auto"} | _HERMES | _LLAMA3 | _GLM | _OTHERS
_THINKERS = ("deepseek-r1", "deepseek_r1", "qwen3", "qwen3-thinking", "glm45", "nemotron_3")
_CHANNELS = dict.fromkeys(("gpt-oss", "openai_gptoss"), "auto")
_SWITCHED = {
    "auto": "{}",
    "on": '{"enable_thinking": true, "thinking": true}',
    "off": '{"enable_thinking": false, "thinking": false}',
}
_REASONING = {"auto": "auto", "off": "off"} | _CHANNELS | dict.fromkeys(_THINKERS, "</think>")

_WITH_EFFECT = (
    # Speculation.
    Alias("--speculative-draft-model", _S, SETS, "speculative_draft_model_path"),
    Alias("--speculative-config", _V, SETS,
          "speculative_algorithm speculative_draft_model_path speculative_draft_model_revision "
          "speculative_num_steps speculative_num_draft_tokens",
          why=f"a JSON object: method ({', '.join(METHODS)}), model, revision, "
          "num_speculative_tokens (N means `--speculative-num-steps N "
          "--speculative-num-draft-tokens N+1`); prompt_lookup_min and -max change nothing, "
          "other keys are refused", read=speculative_config),
    Alias("--speculative-adaptive", _S, SETS, "policy", values={"true": "adaptive"},
          takes=NOTHING),
    Alias("--draft --draft-max --draft-n --spec-draft-n-max", _L, SETS,
          "speculative_num_steps speculative_num_draft_tokens",
          why="N means `--speculative-num-steps N --speculative-num-draft-tokens N+1`",
          read=chain_length),
    Alias("--spec-tokens --num-speculative-tokens", _V, SETS,
          "speculative_num_steps speculative_num_draft_tokens",
          why="N means `--speculative-num-steps N --speculative-num-draft-tokens N+1`",
          read=chain_length),
    Alias("--spec-method", _V, SETS, "speculative_algorithm",
          why="a method of `--speculative-config`", read=speculative_method),
    Alias("--spec-model --speculative-model", _V, SETS, "speculative_draft_model_path"),
    Alias("--speculative-draft", _S, SETS, "speculative_draft_model_path"),
    Alias("--speculative-algo", _S, SETS, "speculative_algorithm"),
    Alias("--model-draft -md --spec-draft-model --hf-repo-draft -hfd -hfrd --spec-draft-hf", _L,
          SETS, "speculative_draft_model_path"),
    Alias("--spec-type", _L, SETS, "speculative_algorithm",
          why="none is OFF, draft-simple STANDALONE, draft-eagle3 EAGLE3, draft-mtp NEXTN, "
          "draft-dflash and draft-dspark DFLASH, ngram-... NGRAM; a draft and an ngram: both",
          read=speculative_types),
    # The model and how it runs.
    Alias("--model-path", _S, SETS, "model"),
    Alias("-m", _L, SETS, "model"),
    Alias("-hf -hfr --hf-repo", _L, SETS, "model", why="with --hf-file FILE, its file"),
    Alias("--context-length", _S, SETS, "context", why=_AS_LEFT_OUT, values=_LEFT_OUT,
          others=True),
    Alias("--max-model-len", _V, SETS, "context", why=_AS_LEFT_OUT, values=_LEFT_OUT, others=True),
    Alias("--ctx-size -c --n-ctx", _L, SETS, "context", why=_AS_LEFT_OUT, values=_LEFT_OUT,
          others=True),
    Alias("--max-running-requests", _S, SETS, "max_sequences"),
    Alias("--max-num-seqs", _V, SETS, "max_sequences"),
    Alias("--parallel -np", _L, SETS, "max_sequences"),
    Alias("--max-queued-requests", _S, SETS, "max_waiting"),
    Alias("--max-total-tokens", _S, SETS, "kv_tokens"),
    Alias("--mem-fraction", _S, SETS, "mem_fraction_static"),
    Alias("--gpu-memory-utilization", _V, SETS, "mem_fraction_static"),
    Alias("--max-prefill-tokens", _S, SETS, "chunked_prefill_size", why=_ONE_STEP),
    Alias("--max-num-batched-tokens", _V, SETS, "chunked_prefill_size", why=_ONE_STEP),
    Alias("--ubatch-size -ub", _L, SETS, "chunked_prefill_size", why=_ONE_STEP),
    Alias("--block-size", _V, SETS, "page_size"),
    Alias("-t --n-threads", _L, SETS, "threads"),
    Alias("-dev", _L, SETS, "device"),
    Alias("--kv-cache-dtype", _SV, SETS, "kv_dtype", values=_DTYPES),
    Alias("--cache-type-k --cache-type-v -ctk -ctv", _L, SETS, "kv_dtype",
          values={"f16": "same", "q8_0": "q8_0"},
          why="with torch --kv-dtype float8 halves the cache"),
    Alias("--quantization -q", _SV, SETS, "dtype",
          why=f"`--dtype`; takes {', '.join(_WEIGHTS)}; names of quantised files (awq, gptq, ...) "
          "change nothing: they say so themselves", read=file_quantization(_WEIGHTS)),
    Alias("--gpu-layers --n-gpu-layers -ngl", _L, SETS, "device",
          why="0: `--device cpu`; else `auto`", read=gpu_layers),
    Alias("--base-gpu-id", _S, SETS, "device", why="`--device cuda:N`", read=gpu),
    Alias("--enforce-eager", _V, SETS, "disable_cuda_graph", values={"true": True}, takes=NOTHING),
    Alias("--async-scheduling", _V, SETS, "overlap", values={"true": True}, takes=NOTHING),
    Alias("--disable-overlap-schedule", _S, SETS, "overlap", values={"true": False},
          takes=NOTHING),
    Alias("--no-async-scheduling", _V, SETS, "overlap", values={"true": False}, takes=NOTHING),
    Alias("--disable-frontend-multiprocessing", _V, SETS, "engine_process",
          values={"true": False}, takes=NOTHING),
    Alias("--grammar-backend", _S, SETS, "", why=_GRAMMARS, read=grammar_backend),
    Alias("--structured-outputs-backend", _V, SETS, "", why=_GRAMMARS, read=grammar_backend),
    Alias("--guided-decoding-backend", _V, SETS, "", why=_GRAMMARS, read=grammar_backend),
    Alias("--structured-outputs-config", _V, SETS, "additional_properties",
          why="a JSON object: backend, and disable_additional_properties, which is "
          "`--additional-properties deny`", read=structured_outputs),
    Alias("--generation-config", _V, SETS, "sampling_defaults", why="auto is model, vllm is none"),
    Alias("--chat-template-file", _L, SETS, "chat_template"),
    Alias("--default-chat-template-kwargs", _V, SETS, "chat_template_kwargs"),
    Alias("--slot-save-path", _L, SETS, "kv_store"),
    Alias("--tp", _S, SETS, "tp_size"),
    Alias("-tp", _V, SETS, "tp_size"),
    Alias("--tensor-parallel-size", _SV, SETS, "tp_size"),
    Alias("--ep --expert-parallel-size", _S, SETS, "ep_size"),
    Alias("--enable-expert-parallel", _V, SETS, "ep_size", values={"true": 0}, takes=NOTHING),
    # The server.
    Alias("--lora-paths", _S, SETS, "lora_modules", takes=MANY),
    Alias("--served-model-name", _SV, SETS, "served_name", takes=MANY),
    Alias("--alias -a", _L, SETS, "served_name"),
    Alias("--tool-call-parser", _SV, SETS, "tool_parser",
          why="`--tool-parser`; a name without a format here: auto, by the model's template",
          read=named_format("tool_parser", _TOOLS)),
    Alias("--reasoning-parser", _SV, SETS, "reasoning_end",
          why="`--reasoning-end`, the text that ends the reasoning; an unknown name: auto",
          read=named_format("reasoning_end", _REASONING)),
    Alias("--reasoning-format", _L, SETS, "reasoning_end",
          values={"auto": "auto", "deepseek": "auto", "none": "off"}),
    Alias("--reasoning -rea", _L, SETS, "chat_template_kwargs", values=_SWITCHED),
    Alias("--reasoning-effort", _L, SETS, "chat_template_kwargs",
          why="`--chat-template-kwargs`, its reasoning_effort", read=effort),
    Alias("--reasoning-budget", _L, SETS, "thinking_budget"),
    Alias("--reasoning-budget-message", _L, SETS, "thinking_budget_message"),
    Alias("--enable-metrics", _S, SETS, "sglang_metrics", values={"true": True}, takes=NOTHING),
    Alias("--uvicorn-log-level --log-level-http", _SV, SETS, "log_level"),
    Alias("--ssl-key-file", _L, SETS, "ssl_keyfile"),
    Alias("--ssl-cert-file", _L, SETS, "ssl_certfile"),
    Alias("--cors-origins", _L, SETS, "allowed_origins"),
    Alias("--timeout -to", _L, SETS, "request_seconds"),
    Alias("--sse-ping-interval", _L, SETS, "keep_alive_seconds"),
    Alias("--models-max", _L, SETS, "max_loaded_models"),
    Alias("--log-jsonl", _L, SETS, "log_format", values={"true": "json"}, takes=NOTHING),
    Alias("--no-webui", _L, SETS, "ui", values={"true": False}, takes=NOTHING),
    Alias("--webui", _L, SETS, "ui", values={"true": True}, takes=NOTHING),
    Alias("--verbose -v", _L, SETS, "log_level", values={"true": "debug"}, takes=NOTHING),
    Alias("--log-disable", _L, SETS, "log_level", values={"true": "critical"}, takes=NOTHING),
    Alias("--watchdog-timeout", _S, SETS, "watchdog_seconds"),
    # Asking.
    Alias("--predict --n-predict -n", _L, SETS, "max_tokens"),
    Alias("--max-new-tokens", _S, SETS, "max_tokens"),
    Alias("--temp", _L, SETS, "temperature"),
    Alias("--repeat-penalty", _L, SETS, "repetition_penalty"),
    Alias("-s", _L, SETS, "seed"),
    # In commands without the options above: defaults of requests.
    *(
        Alias(flags, _L, SETS, "sampling_override", why=f"`--sampling-override {name}=N`",
              read=sampling_default(name))
        for flags, name in {
            "--temp --temperature": "temperature",
            "--top-k": "top_k",
            "--top-p": "top_p",
            "--min-p": "min_p",
            "--repeat-penalty": "repetition_penalty",
            "--frequency-penalty": "frequency_penalty",
            "--presence-penalty": "presence_penalty",
        }.items()
    ),
    Alias("--seed", (VLLM, LLAMA), SETS, "sampling_override",
          why="`--sampling-override seed=N`: requests without a seed have this one",
          read=default_seed),
    Alias("--predict --n-predict -n", _L, SETS, "sampling_override",
          why="`--sampling-override max_tokens=N`: of requests that have none; -1: no limit",
          read=default_length),
    Alias("-s", _L, SETS, "sampling_override", why="`--sampling-override seed=N`",
          read=default_seed),
    Alias("--override-generation-config", _V, SETS, "sampling_override",
          why="`--sampling-override`, a JSON object", read=sampling_object),
    Alias("--preferred-sampling-params", _S, SETS, "sampling_override",
          why="`--sampling-override`, a JSON object", read=sampling_object),
)  # fmt: skip


def _without_effect() -> list[Alias]:
    """Read the names that set no field."""
    groups = json.loads(Path(__file__).with_name("without_effect.json").read_text("utf-8"))
    return [
        Alias(
            row["flags"],
            tuple(row["servers"]),
            Verdict(row["verdict"]),
            why=group["why"],
            allowed=tuple(row.get("allowed", ())),
            takes=row.get("takes", VALUE),
        )
        for group in groups
        for row in group["rows"]
    ]


ALIASES = (*_WITH_EFFECT, *_without_effect())
"""Every name, including those that are rejected for some values or always."""

_DRAFT_NAMES = (
    "speculative_algorithm speculative_draft_model_path speculative_draft_model_revision "
    "speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
    "speculative_token_map speculative_accept_threshold_single speculative_accept_threshold_acc"
)
SAME_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_DRAFT_NAMES.split(), (SGLANG,)),
    **dict.fromkeys(("model", "host", "port", "api_keys"), (SGLANG, VLLM, LLAMA)),
    **dict.fromkeys(("dtype", "device", "revision", "ssl_keyfile", "ssl_certfile"), (SGLANG, VLLM)),
    **dict.fromkeys(("page_size", "mem_fraction_static", "disable_cuda_graph"), (SGLANG,)),
    **dict.fromkeys(("enable_torch_compile",), (SGLANG,)),
    **dict.fromkeys(("chunked_prefill_size",), (SGLANG,)),
    **dict.fromkeys(("prefill_attention_backend",), (SGLANG,)),
    **dict.fromkeys(("sampling_defaults",), (SGLANG,)),
    **dict.fromkeys(("log_level", "decode_log_interval"), (SGLANG,)),
    **dict.fromkeys(("chat_template",), (SGLANG, VLLM, LLAMA)),
    **dict.fromkeys(("allowed_origins", "max_logprobs"), (VLLM,)),
    **dict.fromkeys(
        ("chat_template_kwargs", "threads", "api_key_file", "top_k", "top_p", "min_p", "seed"),
        (LLAMA,),
    ),
}
"""Fields whose own names have the same meaning in other servers."""

OPTIONS = tuple(option for alias in ALIASES for option in alias.options)


def elsewhere(field: str) -> list[str]:
    """Return the options of other servers that set this field, each as "--name (server, server)";
    none if only its own name does.
    """
    return [
        f"{flag} ({', '.join(alias.sources)})"
        for alias in ALIASES
        for flag in alias.flags.split()
        if alias.fields == field and flag.startswith("--")
    ]
