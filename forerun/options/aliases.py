"""Other servers' names for our options: one table, for the command line, the environment, files and
docs/use/migrating.md. A row is an Alias (alias.py).

Names and their meanings are those of SGLang 0.5.23, vLLM 0.32.0 and llama.cpp's server.
"""

from forerun.options.alias import (
    LLAMA,
    SGLANG,
    VLLM,
    Alias,
    Verdict,
    chain_length,
    draft_model,
    gpu,
    gpu_layers,
    grammar_backend,
    speculative_config,
)
from forerun.options.flags import MANY, MAYBE, NOTHING

_S, _V, _L, _SV = (SGLANG,), (VLLM,), (LLAMA,), (SGLANG, VLLM)
SETS, ONLY, IGNORED, REFUSED = Verdict

_ONE_DEVICE = (
    "a model is shared by the devices of one machine, by --tp-size alone; --replicas N serves it "
    "by several engines"
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
_LORA = "adapters are not loaded; merge them into the weights"
_TEXT = "this server reads and writes text only"
_NO_EMBEDDINGS = "this server writes text; run an embedding server beside it"
_ALL_BATCHES = "every batch up to --max-sequences is captured, or compiled, at start-up"
_AS_LEFT_OUT = "0, -1 or auto: as if it were left out"

_LEFT_OUT = dict.fromkeys(("0", "-1", "auto"))
_DTYPES = {"auto": "same", "f16": "same", "fp8": "float8", "fp8_e4m3": "float8"}
_WEIGHTS = {"fp8": "float8", "gguf": "file", "q8_0": "q8_0", "q4_1": "q4_1", "q4_k": "q4_k"}
_HERMES = dict.fromkeys(("hermes", "qwen", "qwen25", "qwen3"), "hermes")
_LLAMA3 = dict.fromkeys(("llama3", "llama3_json"), "llama3")
_GLM = dict.fromkeys(("glm", "glm45", "glm47"), "glm")
_HARMONY = dict.fromkeys(("gpt-oss", "openai"), "harmony")
_KIMI = dict.fromkeys(("kimi", "kimi_k2"), "kimi")
_QWEN = dict.fromkeys(("qwen3-coder", "qwen3_coder", "qwen3_xml"), "qwen3-coder")
_SEED = dict.fromkeys(("seed-oss", "seed_oss"), "seed-oss")
_MORE = {"mistral": "mistral", "granite": "granite", "phi4_mini_json": "phi4", "lfm2": "lfm2"}
_OTHERS = _KIMI | _QWEN | _SEED | _MORE | _HARMONY
_TOOLS = {"auto": "auto"} | _HERMES | _LLAMA3 | _GLM | _OTHERS
_THINKERS = ("deepseek-r1", "deepseek_r1", "qwen3", "qwen3-thinking", "glm45", "nemotron_3")
_CHANNELS = dict.fromkeys(("gpt-oss", "openai_gptoss"), "auto")
_REASONING = {"auto": "auto", "off": "off"} | _CHANNELS | dict.fromkeys(_THINKERS, "</think>")

ALIASES: tuple[Alias, ...] = (
    # Speculation.
    Alias("--speculative-draft-model", _S, SETS, "speculative_draft_model_path"),
    Alias("--speculative-config", _V, SETS,
          "speculative_algorithm speculative_draft_model_path speculative_draft_model_revision "
          "speculative_num_steps speculative_num_draft_tokens",
          why="a JSON object: method, model, revision, num_speculative_tokens (N means "
          "`--speculative-num-steps N --speculative-num-draft-tokens N+1`); other keys are "
          "refused", read=speculative_config),
    Alias("--speculative-attention-mode --speculative-draft-attention-backend", _S, IGNORED,
          why=_KERNEL),
    Alias("--speculative-draft-model-quantization", _S, ONLY, allowed=("unquant", "none"),
          why="a draft is computed in the target's numbers"),
    Alias("--speculative-adaptive", _S, SETS, "policy", values={"true": "adaptive"},
          takes=NOTHING),
    Alias("--speculative-adaptive-config", _S, REFUSED,
          why="the policy measures what steps cost and what is accepted; it has no table"),
    Alias("--speculative-use-rejection-sampling --speculative-use-block-verification", _S, REFUSED,
          why="acceptance is exact by a rule of its own", takes=NOTHING),
    Alias(
          "--speculative-ngram-min-match-window-size --speculative-ngram-max-match-window-size "
          "--speculative-ngram-min-bfs-breadth --speculative-ngram-max-bfs-breadth "
          "--speculative-ngram-match-type --speculative-ngram-branch-length "
          "--speculative-ngram-max-trie-depth "
          "--speculative-ngram-external-corpus-path", _S, REFUSED, why=_LOOKUP),
    Alias("--enable-multi-layer-eagle", _S, ONLY,
          why="where a checkpoint has a prediction layer per depth, each drafts its depth",
          takes=NOTHING),
    Alias("--draft --draft-max --draft-n --spec-draft-n-max", _L, SETS,
          "speculative_num_steps speculative_num_draft_tokens",
          why="N means `--speculative-num-steps N --speculative-num-draft-tokens N+1`",
          read=chain_length),
    Alias("--draft-min --draft-n-min --draft-p-min --spec-draft-n-min --spec-draft-p-min", _L,
          REFUSED, why="--policy adaptive drafts as many tokens as pay, down to none"),
    Alias("--model-draft -md --spec-draft-model", _L, SETS,
          "speculative_algorithm speculative_draft_model_path",
          why="`--speculative-algorithm STANDALONE --speculative-draft-model-path`",
          read=draft_model),
    Alias("-ctkd -ctvd -ngld --gpu-layers-draft --ctx-size-draft -cd", _L, REFUSED,
          why="a draft is computed where and how the target is"),
    # The model and how it runs.
    Alias("--model-path", _S, SETS, "model"),
    Alias("-m -hf --hf-repo", _L, SETS, "model"),
    Alias("--context-length", _S, SETS, "context", why=_AS_LEFT_OUT, values=_LEFT_OUT,
          others=True),
    Alias("--max-model-len", _V, SETS, "context", why=_AS_LEFT_OUT, values=_LEFT_OUT, others=True),
    Alias("--ctx-size -c", _L, SETS, "context", why=_AS_LEFT_OUT, values=_LEFT_OUT, others=True),
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
    Alias("--batch-size -b", _L, IGNORED, why=_ONE_STEP),
    Alias("--enable-mixed-chunk", _S, ONLY, why=_ONE_STEP, takes=NOTHING),
    Alias("--enable-chunked-prefill", _V, ONLY, why=_ONE_STEP, takes=NOTHING),
    Alias("--block-size", _V, SETS, "page_size"),
    Alias("-t", _L, SETS, "threads"),
    Alias("--threads-batch -tb", _L, REFUSED, why="--threads is for prompts and answers alike"),
    Alias("--kv-cache-dtype", _SV, SETS, "kv_dtype", values=_DTYPES),
    Alias("--cache-type-k --cache-type-v -ctk -ctv", _L, SETS, "kv_dtype", values={"f16": "same"},
          why="--kv-dtype float8 halves the cache, on torch"),
    Alias("--quantization -q", _SV, SETS, "dtype", values=_WEIGHTS,
          why="leave it out for files that are quantised: they say so themselves"),
    Alias("--load-format", _SV, ONLY, allowed=("auto", "safetensors", "gguf"),
          why="weights are safetensors, GGUF, or tensors of pytorch_model.bin"),
    Alias("--gpu-layers --n-gpu-layers -ngl", _L, SETS, "device",
          why="0: `--device cpu`; all: `cuda`", read=gpu_layers),
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
    Alias("--generation-config", _V, SETS, "sampling_defaults", why="auto is model, vllm is none"),
    Alias("--chat-template-file", _L, SETS, "chat_template"),
    Alias("--jinja", _L, ONLY, why="templates are always Jinja", takes=NOTHING),
    Alias("--flash-attn -fa", _L, IGNORED, why=_KERNEL, takes=MAYBE),
    Alias("--mlock --no-mmap --mmap --no-warmup --warmup", _L, IGNORED, takes=NOTHING,
          why="weights are read once, and what has to be compiled is, before the first request"),
    Alias("--numa --threads-http --api-server-count --distributed-executor-backend", (LLAMA, VLLM),
          IGNORED, why="processes and threads are arranged by this server"),
    Alias("--slot-save-path", _L, SETS, "kv_store"),
    Alias("--cache-reuse", _L, IGNORED, why=_PREFIX),
    Alias("--swap-space", _V, IGNORED, why="a sequence that loses its pages is computed again"),
    Alias("--cpu-offload-gb", _V, ONLY, allowed=("0",), why="a model is not parted between a GPU "
          "and its host; choose a smaller one, or --dtype float8"),
    Alias("--num-scheduler-steps", _V, ONLY, allowed=("1",), why="steps are planned one by one"),
    Alias("--task --runner", _V, ONLY, allowed=("auto", "generate"), why=_NO_EMBEDDINGS),
    Alias("--embedding --embeddings --reranking --rerank --is-embedding", (LLAMA, SGLANG),
          REFUSED, why=_NO_EMBEDDINGS, takes=NOTHING),
    Alias("--pooling", _L, REFUSED, why=_NO_EMBEDDINGS),
    Alias("--limit-mm-per-prompt --mm-processor-kwargs", _V, IGNORED, why=_TEXT),
    Alias("--mmproj", _L, REFUSED, why=_TEXT),
    Alias("--enable-multimodal", _S, REFUSED, why=_TEXT, takes=NOTHING),
    Alias("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --override-kv "
          "--hf-overrides --json-model-override-args", (LLAMA, VLLM, SGLANG), REFUSED,
          why="a model is what its file says; change the file"),
    Alias("--split-mode -sm --tensor-split -ts --main-gpu -mg", _L, REFUSED, why=_ONE_DEVICE),
    Alias("--no-context-shift", _L, ONLY, why="a context never shifts", takes=NOTHING),
    Alias("--context-shift", _L, REFUSED, takes=NOTHING,
          why="a context never shifts; a prompt beyond it is refused, so that clients shorten it"),
    Alias("--offline", _L, REFUSED, why="set HF_HUB_OFFLINE=1 in the environment", takes=NOTHING),
    Alias("--spec-type", _L, REFUSED, why="--speculative-algorithm names what drafts"),
    Alias("--attention-backend --sampling-backend --decode-attention-backend "
          "--mm-attention-backend", _SV, IGNORED, why=_KERNEL),
    Alias("--moe-runner-backend --fp8-gemm-backend", _S, IGNORED, why=_KERNEL),
    Alias(
          "--disable-shared-experts-fusion --disable-custom-all-reduce --requests-all-greedy "
          "--disable-cuda-graph-padding --disable-precompile --skip-server-warmup", _S, IGNORED,
          why="this decides how fast others are; texts are the same", takes=NOTHING),
    Alias("--schedule-conservativeness", _S, IGNORED,
          why="a request is let in when its prompt has room, and goes back to the queue when "
          "pages run out; texts stay the same"),
    Alias("--precompile-token-paddings --precompile-bs-paddings", _S, IGNORED,
          why="sizes of steps are chosen from --max-sequences and --chunked-prefill-size",
          takes=MANY),
    Alias("--cuda-graph-bs", _S, IGNORED, why=_ALL_BATCHES, takes=MANY),
    Alias("--cuda-graph-max-bs --torch-compile-max-bs", _S, IGNORED, why=_ALL_BATCHES),
    Alias("--mamba-scheduler-strategy", _S, IGNORED,
          why="recurrent states are kept for each sequence and at ends of pages"),
    Alias("--tp", _S, SETS, "tp_size"),
    Alias("-tp", _V, SETS, "tp_size"),
    Alias("--tensor-parallel-size", _SV, SETS, "tp_size"),
    Alias("--ep --expert-parallel-size", _S, SETS, "ep_size"),
    Alias("--enable-expert-parallel", _V, SETS, "ep_size", values={"true": 0}, takes=NOTHING),
    Alias("--pp-size --dp-size --nnodes", _S, ONLY, allowed=("1",), why=_ONE_DEVICE),
    Alias("--node-rank", _S, ONLY, allowed=("0",), why=_ONE_DEVICE),
    Alias("--dist-init-addr", _S, IGNORED, why=_ONE_DEVICE),
    Alias("-pp -dp --pipeline-parallel-size --data-parallel-size", _V, ONLY, allowed=("1",),
          why=_ONE_DEVICE),
    Alias("--disable-radix-cache", _S, IGNORED, why=_PREFIX, takes=NOTHING),
    Alias("--no-enable-prefix-caching", _V, IGNORED, why=_PREFIX, takes=NOTHING),
    Alias("--enable-prefix-caching", _V, ONLY, why=_PREFIX, takes=NOTHING),
    Alias("--trust-remote-code", _SV, IGNORED, why=_NO_CODE, takes=NOTHING),
    Alias("--tokenizer-path", _S, REFUSED, why=_TOKENIZER),
    Alias("--tokenizer", _V, REFUSED, why=_TOKENIZER),
    Alias("--tokenizer-mode", _SV, ONLY, allowed=("auto",), why=_TOKENIZER),
    Alias("--schedule-policy", _S, ONLY, allowed=("fcfs", "lpm"),
          why="requests run as they come, and shared prefixes are reused"),
    Alias("--download-dir", _SV, IGNORED,
          why="models are kept where huggingface_hub keeps them; HF_HOME names another place"),
    Alias("--random-seed", _S, IGNORED, why="a request brings its own seed, or gets a fresh one"),
    Alias("--enable-lora", _SV, REFUSED, why=_LORA, takes=NOTHING),
    Alias("--lora-paths --lora-modules", _SV, REFUSED, why=_LORA, takes=MANY),
    Alias("--max-loras --max-lora-rank", _V, REFUSED, why=_LORA),
    Alias("--lora", _L, REFUSED, why=_LORA),
    Alias("--compilation-config", _V, REFUSED,
          why="use --enable-torch-compile or --disable-cuda-graph"),
    # The server.
    Alias("--served-model-name", _SV, SETS, "served_name", takes=MANY),
    Alias("--alias -a", _L, SETS, "served_name"),
    Alias("--tool-call-parser", _SV, SETS, "tool_parser", values=_TOOLS,
          why="--tool-parser auto looks at the model's template"),
    Alias("--enable-auto-tool-choice", _V, ONLY, why="tool calls are always parsed",
          takes=NOTHING),
    Alias("--reasoning-parser", _SV, SETS, "reasoning_end", values=_REASONING,
          why="--reasoning-end names the text that ends the reasoning"),
    Alias("--reasoning-format", _L, SETS, "reasoning_end",
          values={"auto": "auto", "deepseek": "auto", "none": "off"}),
    Alias("--reasoning-budget", _L, SETS, "thinking_budget"),
    Alias("--reasoning-budget-message", _L, SETS, "thinking_budget_message"),
    Alias("--enable-metrics", _S, SETS, "sglang_metrics", values={"true": True}, takes=NOTHING),
    Alias("--metrics", _L, ONLY, why="/metrics is always there", takes=NOTHING),
    Alias("--uvicorn-log-level --log-level-http", _SV, SETS, "log_level"),
    Alias("--ssl-key-file", _L, SETS, "ssl_keyfile"),
    Alias("--ssl-cert-file", _L, SETS, "ssl_certfile"),
    Alias("--cors-origins", _L, SETS, "allowed_origins"),
    Alias("--timeout -to", _L, SETS, "request_seconds"),
    Alias("--cont-batching -cb", _L, ONLY, why="requests always share steps", takes=NOTHING),
    Alias("--slots --props", _L, ONLY, why="/slots and /props are always there", takes=NOTHING),
    Alias("--no-webui", _L, SETS, "ui", values={"true": False}, takes=NOTHING),
    Alias("--webui", _L, SETS, "ui", values={"true": True}, takes=NOTHING),
    Alias("--verbose -v", _L, SETS, "log_level", values={"true": "debug"}, takes=NOTHING),
    Alias("--log-disable", _L, SETS, "log_level", values={"true": "critical"}, takes=NOTHING),
    Alias("--watchdog-timeout", _S, SETS, "watchdog_seconds"),
    Alias("--enable-cache-report", _S, ONLY, why="cached tokens are always told", takes=NOTHING),
    Alias("--enable-prompt-tokens-details", _V, ONLY, why="cached tokens are always told",
          takes=NOTHING),
    Alias("--disable-log-stats", _V, ONLY, takes=NOTHING,
          why="numbers are at /metrics; --decode-log-interval writes lines"),
    Alias("--api-prefix", _L, REFUSED, why="let the proxy take the prefix off"),
    Alias("--root-path", _V, REFUSED, why="let the proxy take the prefix off"),
    Alias("--stream-interval", _SV, REFUSED, why="news is sent as it comes"),
    Alias("--enable-log-requests --log-requests", _SV, REFUSED,
          why="prompts and answers are never logged; each request has its line of numbers",
          takes=NOTHING),
    Alias("--disable-log-requests --no-enable-log-requests", _V, ONLY,
          why="prompts and answers are never logged", takes=NOTHING),
    # Asking.
    Alias("--predict --n-predict -n", _L, SETS, "max_tokens"),
    Alias("--max-new-tokens", _S, SETS, "max_tokens"),
    Alias("--temp", _L, SETS, "temperature"),
    Alias("-s", _L, SETS, "seed"),
    Alias("--repeat-penalty", _L, SETS, "repetition_penalty"),
)  # fmt: skip
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
    **dict.fromkeys(("enable_torch_compile",), (SGLANG,)),
    **dict.fromkeys(("chunked_prefill_size",), (SGLANG,)),
    **dict.fromkeys(("prefill_attention_backend",), (SGLANG,)),
    **dict.fromkeys(("sampling_defaults",), (SGLANG,)),
    **dict.fromkeys(("log_level", "decode_log_interval"), (SGLANG,)),
    **dict.fromkeys(("chat_template",), (SGLANG, VLLM, LLAMA)),
    **dict.fromkeys(("allowed_origins", "max_logprobs"), (VLLM,)),
    **dict.fromkeys(("threads", "api_key_file", "top_k", "top_p", "min_p", "seed"), (LLAMA,)),
}
"""Fields whose own names are other servers' names for the same."""

OPTIONS = tuple(option for alias in ALIASES for option in alias.options)


def elsewhere(field: str) -> list[str]:
    """Return the options of other servers that set this field of ours, each as "--name (server,
    server)"; none if only its own name does.
    """
    return [
        f"{flag} ({', '.join(alias.sources)})"
        for alias in ALIASES
        for flag in alias.flags.split()
        if alias.fields == field and flag.startswith("--")
    ]
