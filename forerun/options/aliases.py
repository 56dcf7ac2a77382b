"""What other servers call our options: one table, which the command line, the environment, files
and docs/migrating.md are made of.

A name is honoured, or taken with a line in the log where it changes no text here, or refused with
a sentence that names what to do. Names and their meanings are those of SGLang 0.5.23, vLLM 0.32.0
and llama.cpp's server.
"""

from forerun.options.alias_kinds import (
    FORMER,
    LLAMA,
    SGLANG,
    VLLM,
    Alias,
    choice,
    draft_model,
    drafted,
    former_draft,
    former_nodes,
    gpu,
    grammar_backend,
    layers,
    length,
    other,
    refused,
    same,
    speculative_config,
    switch,
    taken,
    usual,
)
from forerun.options.flags import MANY, MAYBE, NOTHING

_ONE_DEVICE = (
    "a model is cut over devices by --tp-size alone (jax executor); beyond that start several "
    "servers and put a proxy before them"
)
_LOOKUP = "lookup and table have no such setting; --speculative-num-draft-tokens bounds their trees"
_ONE_STEP = "prompts and answers share steps of at most --chunked-prefill-size tokens"
_KERNEL = "the device decides: Triton on cuda, the native core's or torch's own on cpu"
_GRAMMARS = (
    "takes auto, llguidance, guidance; llguidance matches all grammars, as a sentence says where "
    "xgrammar, outlines or lm-format-enforcer is named"
)
_PREFIX = "prefixes are always cached; that changes no token"
_NO_CODE = "no code from a model's folder is ever run, and none is needed"
_TOKENIZER = "the tokenizer is the model's own, from its folder or file"

_DRAFTING = [
    *same("--speculative-draft-model", "speculative_draft_model_path", SGLANG),
    *other(
        "--speculative-config",
        ("speculative_algorithm", "speculative_draft_model_path",
         "speculative_draft_model_revision", "speculative_num_steps",
         "speculative_num_draft_tokens"),
        speculative_config, VLLM,
        meaning="a JSON object: method, model, revision, num_speculative_tokens (N means "
        "`--speculative-num-steps N --speculative-num-draft-tokens N+1`); other keys are refused",
    ),
    *taken("--speculative-attention-mode --speculative-draft-attention-backend", SGLANG,
            why=_KERNEL),
    *usual("--speculative-draft-model-quantization", ("unquant", "none"), SGLANG,
            why="a draft is computed in the target's numbers"),
    *switch("--speculative-adaptive", {"policy": "adaptive"}, SGLANG),
    *refused("--speculative-adaptive-config", SGLANG,
              why="the policy measures what steps cost and what is accepted; it has no table"),
    *refused("--speculative-use-rejection-sampling --speculative-use-block-verification", SGLANG,
              why="acceptance is exact by a rule of its own", takes=NOTHING),
    *refused(
        "--speculative-ngram-min-match-window-size --speculative-ngram-max-match-window-size "
        "--speculative-ngram-min-bfs-breadth --speculative-ngram-max-bfs-breadth "
        "--speculative-ngram-match-type --speculative-ngram-branch-length "
        "--speculative-ngram-max-trie-depth --speculative-ngram-capacity "
        "--speculative-ngram-external-corpus-path", SGLANG, why=_LOOKUP),
    *usual("--enable-multi-layer-eagle", (), SGLANG, takes=NOTHING, why="where a checkpoint has a "
            "prediction layer per depth, each drafts its depth"),
    *[alias for flag in ("--draft-max", "--draft-n", "--spec-draft-n-max") for alias in other(
        flag, ("speculative_num_steps", "speculative_num_draft_tokens"), drafted, LLAMA,
        meaning="N means `--speculative-num-steps N --speculative-num-draft-tokens N+1`")],
    *refused("--draft-min --draft-n-min --draft-p-min --spec-draft-n-min --spec-draft-p-min",
              LLAMA, why="--policy adaptive drafts as many tokens as pay, down to none"),
    *[alias for flag in ("--model-draft", "-md", "--spec-draft-model") for alias in other(
        flag, ("speculative_algorithm", "speculative_draft_model_path"), draft_model, LLAMA,
        meaning="`--speculative-algorithm STANDALONE --speculative-draft-model-path`")],
    *refused("-ctkd -ctvd -ngld --gpu-layers-draft --ctx-size-draft -cd", LLAMA,
              why="a draft is computed where and how the target is"),
    *same("--speculation", "speculative_algorithm", FORMER,
           note="head is EAGLE, both is EAGLE+NGRAM"),
    *other("--draft", ("speculative_draft_model_path",), former_draft, FORMER,
            meaning="`--speculative-draft-model-path`; a number (llama.cpp) is refused"),
    *other("--draft-nodes", ("speculative_num_draft_tokens",), former_nodes, FORMER,
            meaning="N means `--speculative-num-draft-tokens N+1`"),
    *same("--draft-depth", "speculative_num_steps", FORMER),
    *same("--draft-width", "speculative_eagle_topk", FORMER),
]  # fmt: skip

_DTYPES = {"auto": "same", "f16": "same", "fp8": "float8", "fp8_e4m3": "float8"}

_MODEL = [
    *same("--model-path", "model", SGLANG),
    *same("-m -hf --hf-repo", "model", LLAMA),
    *length("--context-length", "context", SGLANG),
    *length("--max-model-len", "context", VLLM),
    *length("--ctx-size -c", "context", LLAMA),
    *same("--max-running-requests", "max_sequences", SGLANG),
    *same("--max-num-seqs", "max_sequences", VLLM),
    *same("--parallel -np", "max_sequences", LLAMA),
    *same("--max-queued-requests", "max_waiting", SGLANG),
    *same("--max-total-tokens", "kv_tokens", SGLANG),
    *same("--mem-fraction", "mem_fraction_static", SGLANG),
    *same("--gpu-memory-utilization", "mem_fraction_static", VLLM),
    *same("--max-prefill-tokens", "chunked_prefill_size", SGLANG, note=_ONE_STEP),
    *same("--max-step-nodes", "chunked_prefill_size", FORMER),
    *same("--max-num-batched-tokens", "chunked_prefill_size", VLLM, note=_ONE_STEP),
    *same("--ubatch-size -ub", "chunked_prefill_size", LLAMA, note=_ONE_STEP),
    *refused("--batch-size -b", LLAMA, why=_ONE_STEP),
    *usual("--enable-mixed-chunk", (), SGLANG, why=_ONE_STEP, takes=NOTHING),
    *usual("--enable-chunked-prefill", (), VLLM, why=_ONE_STEP, takes=NOTHING),
    *same("--block-size", "page_size", VLLM),
    *same("-t", "threads", LLAMA),
    *refused("--threads-batch -tb", LLAMA, why="--threads is for prompts and answers alike"),
    *choice("--kv-cache-dtype", "kv_dtype", _DTYPES, SGLANG, VLLM),
    *choice("--cache-type-k --cache-type-v -ctk -ctv", "kv_dtype", {"f16": "same"}, LLAMA,
             note="--kv-dtype float8 halves the cache, on torch"),
    *choice("--quantization -q", "dtype", {"fp8": "float8", "gguf": "file"}, SGLANG, VLLM,
             note="weights are read as the model's file has them"),
    *usual("--load-format", ("auto", "safetensors", "gguf"), SGLANG, VLLM,
            why="weights are safetensors, GGUF, or tensors of pytorch_model.bin"),
    *other("--gpu-layers", ("device",), layers, LLAMA, meaning="0: `--device cpu`; all: `cuda`"),
    *other("--n-gpu-layers", ("device",), layers, LLAMA, meaning="as `--gpu-layers`"),
    *other("-ngl", ("device",), layers, LLAMA, meaning="as `--gpu-layers`"),
    *other("--base-gpu-id", ("device",), gpu, SGLANG, meaning="`--device cuda:N`"),
    *switch("--enforce-eager", {"disable_cuda_graph": True}, VLLM),
    *switch("--async-scheduling", {"overlap": True}, VLLM),
    *switch("--disable-overlap-schedule", {"overlap": False}, SGLANG),
    *switch("--no-async-scheduling", {"overlap": False}, VLLM),
    *other("--grammar-backend", (), grammar_backend, SGLANG, meaning=_GRAMMARS),
    *other("--structured-outputs-backend", (), grammar_backend, VLLM, meaning=_GRAMMARS),
    *other("--guided-decoding-backend", (), grammar_backend, VLLM, meaning=_GRAMMARS),
    *same("--generation-config", "sampling_defaults", VLLM, note="auto is model, vllm is none"),
    *same("--chat-template-file", "chat_template", LLAMA),
    *usual("--jinja", (), LLAMA, why="templates are always Jinja", takes=NOTHING),
    *usual("--flash-attn -fa", ("true", "on", "auto"), LLAMA, why=_KERNEL, takes=MAYBE),
    *taken("--sampling-backend --decode-attention-backend --mm-attention-backend", SGLANG, VLLM,
            why=_KERNEL),
    *taken("--moe-runner-backend --fp8-gemm-backend", SGLANG, why=_KERNEL),
    *taken("--disable-shared-experts-fusion --disable-custom-all-reduce --requests-all-greedy "
            "--disable-cuda-graph-padding --disable-precompile --skip-server-warmup", SGLANG,
            why="this decides how fast others are; texts are the same", takes=NOTHING),
    *taken("--schedule-conservativeness", SGLANG,
            why="a request is let in when its prompt has room, and goes back to the queue when "
            "pages run out; texts stay the same"),
    *taken("--precompile-token-paddings --precompile-bs-paddings", SGLANG, takes=MANY,
            why="sizes of steps are chosen from --max-sequences and --chunked-prefill-size"),
    *taken("--cuda-graph-bs", SGLANG, takes=MANY,
            why="rounds of every batch up to --max-sequences are captured at start-up"),
    *taken("--mamba-scheduler-strategy", SGLANG, why="no model with such states is read yet"),
    *same("--tp", "tp_size", SGLANG),
    *same("-tp", "tp_size", VLLM),
    *same("--tensor-parallel-size", "tp_size", SGLANG, VLLM),
    *usual("--pp-size --dp-size --ep-size --nnodes", ("1",), SGLANG, why=_ONE_DEVICE),
    *usual("--node-rank", ("0",), SGLANG, why=_ONE_DEVICE),
    *taken("--dist-init-addr", SGLANG, why=_ONE_DEVICE),
    *usual("-pp -dp --pipeline-parallel-size --data-parallel-size", ("1",), VLLM,
            why=_ONE_DEVICE),
    *taken("--disable-radix-cache", SGLANG, why=_PREFIX, takes=NOTHING),
    *taken("--no-enable-prefix-caching", VLLM, why=_PREFIX, takes=NOTHING),
    *usual("--enable-prefix-caching", (), VLLM, why=_PREFIX, takes=NOTHING),
    *taken("--trust-remote-code", SGLANG, VLLM, why=_NO_CODE, takes=NOTHING),
    *refused("--tokenizer-path", SGLANG, why=_TOKENIZER),
    *refused("--tokenizer", VLLM, why=_TOKENIZER),
    *usual("--tokenizer-mode", ("auto",), SGLANG, VLLM, why=_TOKENIZER),
    *usual("--schedule-policy", ("fcfs", "lpm"), SGLANG, why="requests run as they come, and "
            "shared prefixes are reused"),
    *taken("--download-dir", SGLANG, VLLM,
            why="models are kept where huggingface_hub keeps them; HF_HOME names another place"),
    *taken("--random-seed", SGLANG,
            why="a request brings its own seed, or gets a fresh one"),
    *refused("--enable-lora --lora-paths", SGLANG, VLLM, why="adapters are not loaded; merge them "
              "into the weights"),
    *refused("--compilation-config", VLLM, why="use --enable-torch-compile or "
              "--disable-cuda-graph"),
]  # fmt: skip

_HERMES = dict.fromkeys(("hermes", "qwen", "qwen25", "qwen3"), "hermes")
_LLAMA3 = dict.fromkeys(("llama3", "llama3_json"), "llama3")
_GLM = dict.fromkeys(("glm", "glm45", "glm47"), "glm")
_TOOLS = {"auto": "auto"} | _HERMES | _LLAMA3 | {"mistral": "mistral"} | _GLM
_THINKERS = ("deepseek-r1", "deepseek_r1", "qwen3", "qwen3-thinking", "glm45")
_REASONING = {"auto": "auto", "off": "off"} | dict.fromkeys(_THINKERS, "</think>")

_SERVER = [
    *same("--served-model-name", "served_name", SGLANG, VLLM, takes=MANY),
    *same("--alias -a", "served_name", LLAMA),
    *choice("--tool-call-parser", "tool_parser", _TOOLS, SGLANG, VLLM,
             note="--tool-parser auto looks at the model's template"),
    *usual("--enable-auto-tool-choice", (), VLLM, why="tool calls are always parsed",
            takes=NOTHING),
    *choice("--reasoning-parser", "reasoning_end", _REASONING, SGLANG, VLLM,
             note="--reasoning-end names the text that ends the reasoning"),
    *choice("--reasoning-format", "reasoning_end",
             {"auto": "auto", "deepseek": "auto", "none": "off"}, LLAMA),
    *usual("--enable-metrics", (), SGLANG, why="/metrics is always there", takes=NOTHING),
    *usual("--metrics", (), LLAMA, why="/metrics is always there", takes=NOTHING),
    *same("--uvicorn-log-level --log-level-http", "log_level", SGLANG, VLLM),
    *same("--ssl-key-file", "ssl_keyfile", LLAMA),
    *same("--ssl-cert-file", "ssl_certfile", LLAMA),
    *same("--cors-origins", "allowed_origins", LLAMA),
    *same("--timeout -to", "request_seconds", LLAMA),
    *usual("--cont-batching -cb", (), LLAMA, why="requests always share steps", takes=NOTHING),
    *refused("--root-path", VLLM, why="let the proxy take the prefix off"),
    *refused("--stream-interval", SGLANG, VLLM, why="news is sent as it comes"),
    *refused("--enable-log-requests --log-requests", SGLANG, VLLM, takes=NOTHING,
              why="prompts and answers are never logged; each request has its line of numbers"),
    *usual("--disable-log-requests --no-enable-log-requests", (), VLLM, takes=NOTHING,
            why="prompts and answers are never logged"),
]  # fmt: skip

_ASKING = [
    *same("--predict --n-predict -n", "max_tokens", LLAMA),
    *same("--max-new-tokens", "max_tokens", SGLANG),
    *same("--temp", "temperature", LLAMA),
    *same("-s", "seed", LLAMA),
    *same("--repeat-penalty", "repetition_penalty", LLAMA),
]

ALIASES: tuple[Alias, ...] = (*_DRAFTING, *_MODEL, *_SERVER, *_ASKING)
"""Every name. One that is refused by some value or always stands here too."""

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
    **dict.fromkeys(("cuda_graph_max_bs", "enable_torch_compile"), (SGLANG,)),
    **dict.fromkeys(("chunked_prefill_size",), (SGLANG,)),
    **dict.fromkeys(("attention_backend",), (SGLANG, VLLM)),
    **dict.fromkeys(("prefill_attention_backend",), (SGLANG,)),
    **dict.fromkeys(("torch_compile_max_bs", "sampling_defaults"), (SGLANG,)),
    **dict.fromkeys(("log_level", "decode_log_interval"), (SGLANG,)),
    **dict.fromkeys(("chat_template",), (SGLANG, VLLM)),
    **dict.fromkeys(("allowed_origins", "max_logprobs"), (VLLM,)),
    **dict.fromkeys(("threads", "api_key_file", "top_k", "top_p", "min_p", "seed"), (LLAMA,)),
}
"""Fields whose own names are others' names for the same."""

OPTIONS = tuple(alias.option for alias in ALIASES)


def elsewhere(field: str) -> list[str]:
    """What a field's option is called by others: "--max-model-len (vLLM)"."""
    return [
        f"{alias.option.flag} ({', '.join(alias.sources)})"
        for alias in ALIASES
        if alias.option.fields == (field,) and alias.option.flag.startswith("--")
    ]
