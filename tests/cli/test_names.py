"""Names of options: ours, everybody else's, in flags, environment and files."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from functools import cache

import pytest

from forerun.build import tuned
from forerun.build.engine import load
from forerun.build.tuned import Setting
from forerun.cli.command_line import build_parser
from forerun.cli.layers import settle
from forerun.cli.main import main
from forerun.errors import ConfigError
from forerun.options import algorithms
from forerun.options.algorithms import ALGORITHMS, Algorithm, capacity, check_shape
from forerun.options.alias import FIELDS, Verdict
from forerun.options.aliases import ALIASES, OPTIONS, SAME_NAMES
from forerun.options.config import EngineConfig, SamplingConfig, ServeSettings
from forerun.options.flags import NOTHING, configured, own_option
from tests.shape.tree import ROOT
from tests.worlds.servers import started

whole_parser = cache(build_parser)


def settled(command, *line, **environment):
    arguments = whole_parser().parse_args([command, *line])
    settle(arguments, environment)
    return arguments


def engine(*line, **environment):
    return configured(EngineConfig, settled("serve", *line, **environment))


def server(*line, **environment):
    return configured(ServeSettings, settled("serve", *line, **environment))


def test_a_name_means_one_thing():
    flags = [option.flag for option in OPTIONS]
    own = {own_option(item).flag for item in FIELDS.values()}
    # Options of run's answer; in a server, which has none of these, defaults of requests.
    twice = {flag for flag in flags if flags.count(flag) > 1} | own & set(flags)
    ask = {item.name for item in fields(SamplingConfig)}
    for flag in twice - own:
        first, second = (option for option in OPTIONS if option.flag == flag)
        assert set(first.fields) <= ask and second.fields in (("sampling_override",), ())
    assert {flag[2:].replace("-", "_") for flag in twice & own} <= ask
    kinds = (EngineConfig, ServeSettings, SamplingConfig)
    assert len(FIELDS) == sum(len(fields(kind)) for kind in kinds)
    for alias in ALIASES:
        assert set(alias.fields.split()) <= set(FIELDS) and alias.meaning and alias.sources
        assert (alias.verdict is Verdict.SETS) or not (alias.fields or alias.values or alias.read)
    assert SAME_NAMES.keys() <= FIELDS.keys()


@pytest.mark.parametrize(
    "option",
    [o for alias in ALIASES if alias.verdict is Verdict.REFUSED for o in alias.options],
    ids=lambda option: option.flag,
)
def test_what_is_refused_says_so_on_the_command_line(option, capsys):
    value = [] if option.takes == NOTHING else ["x"]
    assert main(["serve", option.flag, *value]) == 2
    assert f"{option.flag} cannot be honoured: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--model-path a/b --context-length 4096", {"model": "a/b", "context": 4096}),
        ("--max-model-len auto --max-num-seqs 8", {"context": None, "max_sequences": 8}),
        ("-m a/b -c 0 -np 2 -t 3", {"model": "a/b", "max_sequences": 2, "threads": 3}),
        ("a/b --max-running-requests 5", {"model": "a/b", "max_sequences": 5}),
        ("--gpu-memory-utilization 0.5", {"mem_fraction_static": 0.5}),
        ("--mem-fraction-static 0.5", {"mem_fraction_static": 0.5}),
        ("--chunked-prefill-size 256 --max-prefill-tokens 256", {"chunked_prefill_size": 256}),
        ("--dtype half", {"dtype": "float16"}),
        ("--quantization fp8 --kv-cache-dtype fp8_e4m3",
         {"dtype": "float8", "kv_dtype": "float8"}),
        ("--quantization q8_0", {"dtype": "q8_0"}),
        ("-ctk q8_0 -ctv q8_0", {"kv_dtype": "q8_0"}),
        ("-ngl 99 -ngld 99 -cd 4096 --draft-min 1 --draft-p-min 0.75 -tb 2", {}),
        ("--n-gpu-layers all", {}),
        ("-ngl 0", {"device": "cpu"}),
        ("-ngl -1 --mlock --no-mmap -b 512 -fa 0 --numa distribute --no-warmup", {}),
        ("--swa-full -kvu --cache-ram 4096 --cache-reuse 256", {}),
        ('--chat-template-kwargs {"enable_thinking":false}',
         {"chat_template_kwargs": '{"enable_thinking":false}'}),
        ("--temp 0.6 --top-k 20", {"sampling_override": ("temperature=0.6", "top_k=20")}),
        ('--override-generation-config {"top_p":0.9}', {"sampling_override": ("top_p=0.9",)}),
        ('--preferred-sampling-params {"min_p":0.1}', {"sampling_override": ("min_p=0.1",)}),
        ('--default-chat-template-kwargs {"a":1}', {"chat_template_kwargs": '{"a":1}'}),
        ("--reasoning off",
         {"chat_template_kwargs": '{"enable_thinking": false, "thinking": false}'}),
        ("-rea auto", {"chat_template_kwargs": "{}"}),
        ("-c 8k", {"context": 8000}),
        ("--max-model-len 8K --swap-space 4 --disable-log-stats --runner generate",
         {"context": 8192}),
        ("--speculative-config={\"method\":\"ngram\",\"prompt_lookup_max\":4}",
         {"speculative_algorithm": "NGRAM"}),
        ("--base-gpu-id 1", {"device": "cuda:1"}),
        ("--enforce-eager", {"disable_cuda_graph": True}),
        ("--disable-overlap-schedule", {"overlap": False}),
        ("--guided-decoding-backend guidance --grammar-backend xgrammar", {}),
        ("--dp-size 1 --enable-prefix-caching -fa on --load-format auto", {}),
        ("--tp 2 --executor jax", {"tp_size": 2, "executor": "jax"}),
        ("--tensor-parallel-size 4 --device tpu", {"tp_size": 4, "device": "tpu"}),
        ("--tp 4 --ep-size 2", {"tp_size": 4, "ep_size": 2}),
        ("--tp 4 --ep 4", {"tp_size": 4, "ep_size": 4}),
        ("-tp 2 --enable-expert-parallel", {"tp_size": 2, "ep_size": 0}),
        ("-fa", {}),
        ("--speculative-algorithm eagle3 --speculative-draft-model-path d "
         "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16",
         {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "d",
          "speculative_num_steps": 3, "speculative_eagle_topk": 4,
          "speculative_num_draft_tokens": 16}),
        ("--speculative-algorithm Eagle --speculative-num-steps 5 --speculative-eagle-topk 8 "
         "--speculative-num-draft-tokens 64 --mem-fraction 0.6 --cuda-graph-max-bs 2",
         {"speculative_algorithm": "EAGLE", "speculative_num_steps": 5,
          "speculative_eagle_topk": 8, "speculative_num_draft_tokens": 64,
          "mem_fraction_static": 0.6}),
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 16",
         {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 16}),
        ("--speculative-accept-threshold-single 0.4 --speculative-algorithm none",
         {"speculative_algorithm": "OFF", "speculative_accept_threshold_single": 0.4}),
        ("--model-draft small.gguf --draft-max 3", {
          "speculative_draft_model_path": "small.gguf", "speculative_num_steps": 3,
          "speculative_num_draft_tokens": 4}),
        ("-hfd a/b --spec-type ngram-mod,draft-mtp", {
          "speculative_draft_model_path": "a/b", "speculative_algorithm": "NEXTN+NGRAM"}),
        ("--n_ctx 512 --max_num_seqs 2 --threads -1", {"context": 512, "max_sequences": 2}),
        ("-hf a/b:Q8_0 --hf-file BF16/c-BF16.gguf", {"model": "a/b:c-BF16.gguf"}),
        ("-np -1 -t -1 --prio 3 -ot exps=CPU -fit on -dev none -O3 --no-cache-prompt -mg 0",
         {"device": "cpu"}),
        ("--seed 3407 -n -1 -ngl 35", {"sampling_override": ("seed=3407",)}),
        ("--device none", {"device": "cpu"}),
        ("--device ROCm1,ROCm2", {"device": "cuda:1"}),
        ("--device cuda", {"device": "cuda"}),
        ("-n 300 -dev CUDA1", {"sampling_override": ("max_tokens=300",), "device": "cuda:1"}),
        ('--override-generation-config {"max_new_tokens":9}',
         {"sampling_override": ("max_tokens=9",)}),
        ("--reasoning-effort high", {"chat_template_kwargs": '{"reasoning_effort": "high"}'}),
        ("--quantization compressed-tensors", {}),
        ("--draft-max 3", {"speculative_num_steps": 3, "speculative_num_draft_tokens": 4}),
        ("--draft 16", {"speculative_num_steps": 16, "speculative_num_draft_tokens": 17}),
        ("--speculative-algorithm eagle3+ngram --draft-on-error stop",
         {"speculative_algorithm": "EAGLE+NGRAM", "draft_on_error": "stop"}),
    ],
)  # fmt: skip
def test_others_names_set_our_fields(line, values):
    assert engine(*line.split()) == EngineConfig(**values)


def test_llama_cpps_switches_of_the_server():
    line = "--no-webui -v --slots --props --metrics --api-key a,b -a x,y"
    config = server(*line.split())
    assert (config.ui, config.log_level) == (False, "debug")
    assert (config.api_keys, config.served_name) == (("a", "b"), ("x", "y"))
    assert server("--log-disable").log_level == "critical"


def test_llama_cpps_environment(caplog):
    variables = {"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_ARG_N_PARALLEL": "3", "LLAMA_ARG_PORT": "9",
            "LLAMA_ARG_ENDPOINT_METRICS": "1", "LLAMA_ARG_WHATEVER": "2"}  # fmt: skip
    assert engine(**variables) == EngineConfig(context=512, max_sequences=3)
    assert server(**variables).port == 9 and server("--port", "7", **variables).port == 7
    assert server(**variables, FORERUN_PORT="8").port == 8
    assert "LLAMA_ARG_WHATEVER changes nothing here" in caplog.text
    for name in ("LLAMA_API_KEY", "VLLM_API_KEY"):  # Unread, the server would be open.
        assert server(**{name: "secret"}).api_keys == ("secret",)
        assert server("--api-key", "own", **{name: "secret"}).api_keys == ("own",)
        assert server(**{name: ""}).api_keys == ()
    assert settled("run", "hi", **variables).values["context"] == EngineConfig().context
    repository = {"LLAMA_ARG_HF_REPO": "a/b", "LLAMA_ARG_HF_FILE": "c.gguf"}
    assert engine(**repository).model == "a/b:c.gguf"
    assert server(LLAMA_ARG_THINK="none", LLAMA_ARG_THINK_BUDGET="7").thinking_budget == 7
    folder = settled("serve", LLAMA_ARG_MODELS_DIR="/models")
    assert folder.models_dir == "/models" and folder.values["model"] == EngineConfig().model


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lora a", "use --lora-modules NAME=FOLDER"),
        ("m --lora-modules a=b a=c", "names an adapter twice: a, a"),
        ("m --lora-modules =b", "takes NAME=FOLDER, not '=b'"),
        ("--offline", "set HF_HUB_OFFLINE=1"),
        ("-ctk q4_0", "may be f16, q8_0, .*--kv-dtype float8 halves the cache"),
        ("--reranking", "run another server beside it"),
        ("--rope-scaling yarn", "a model is what its file says"),
        ("--quantization bitsandbytes", "leave it out for files that are quantised"),
    ],
)
def test_what_to_say_instead(line, message):
    with pytest.raises(ConfigError, match=message):
        engine(*line.split())


@pytest.mark.parametrize(
    "line",
    [
        "--enable-lora --lora-modules a=x b=y --max-loras 2",
        "--lora-paths a=x b=y",
        """--lora-modules {"name":"a","path":"x"} {"name":"b","path":"y","base_model_name":"m"}""",
    ],
)
def test_adapters_are_named_as_in_other_servers(line):
    assert engine("model", *line.split()).adapters == (("a", "x"), ("b", "y"))


SEEDS = [
    "--model-path Qwen/Qwen-7B-Chat --trust-remote-code --dist-init-addr=0.0.0.0:10011 --nnodes=1 "
    "--tp-size=4 --device=tpu --random-seed=3 --node-rank=0 --mem-fraction-static=0.8 "
    "--max-prefill-tokens=8192 --download-dir=/tmp --dtype=bfloat16 --skip-server-warmup "
    "--precompile-token-paddings 64 128 --precompile-bs-paddings 1 8 --requests-all-greedy",
    "--model-path zai-org/GLM-4.5-Air-FP8 --tool-call-parser glm45 --reasoning-parser glm45 "
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --mem-fraction-static 0.7 --disable-shared-experts-fusion "
    "--served-model-name glm-4.5-air-fp8 glm --host 0.0.0.0 --port 8000 "
    "--schedule-conservativeness 0.5 --cuda-graph-bs 1 2 4 --disable-radix-cache "
    "--attention-backend fa3",
]
"""As people have them for SGLang and its JAX kind; more run in test_seed_lines.py."""


@pytest.mark.parametrize("line", SEEDS)
def test_command_lines_of_others_are_taken(line, caplog):
    config = engine(*line.split())
    words = line.replace("=", " ").split()
    assert config.model == words[1] and server(*line.split())
    if "--trust-remote-code" in words:
        assert "--trust-remote-code changes nothing here: no code" in caplog.text
    if "fa3" in words:
        assert "--attention-backend changes nothing here: the device decides" in caplog.text
    if "glm" in words:
        assert server(*line.split()).served_name == ("glm-4.5-air-fp8", "glm")


def test_names_of_a_model_do_not_swallow_it():
    with pytest.raises(ConfigError, match="but no model; put the model first"):
        server("--served-model-name", "name", "model.gguf")
    assert server("m", "--served-model-name", "a", "b").served_name == ("a", "b")
    assert server("m", "--alias", "a,b").served_name == ("a", "b")


def test_all_problems_of_a_line_are_reported_at_once(capsys):
    line = "serve --nonsense --port x --swap-spaces 3 --lora a --another"
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    for part in (
        "no option --nonsense",
        "--port takes",
        "no option --swap-spaces",
        "--lora cannot be honoured",
        "no option --another",
    ):
        assert part in said


def test_names_of_the_server():
    line = "--served-model-name m --tool-call-parser qwen25 --reasoning-parser qwen3 --log-level"
    line += " WARNING --enable-metrics --timeout 5 --ssl-key-file k --ssl-cert-file c"
    assert server(*line.split(), "--allowed-origins", '["http://a", "http://b"]') == ServeSettings(
        served_name=("m",), tool_parser="hermes", reasoning_end="</think>", log_level="warning",
        request_seconds=5.0, ssl_keyfile="k", ssl_certfile="c", sglang_metrics=True,
        allowed_origins=("http://a", "http://b"),
    )  # fmt: skip
    line = ["Hi", "--temp", "0.5", "-n", "7", "--repeat-penalty", "1.1", "-s", "3"]
    assert configured(SamplingConfig, settled("run", *line)) == SamplingConfig(
        temperature=0.5, max_tokens=7, repetition_penalty=1.1, seed=3
    )


def test_vllms_speculative_config():
    said = '{"method": "eagle3", "model": "d", "num_speculative_tokens": 3, "revision": "r"}'
    expected = EngineConfig(
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path="d",
        speculative_draft_model_revision="r",
        speculative_num_steps=3,
        speculative_num_draft_tokens=4,
    )
    assert engine("--speculative-config", said) == expected
    assert engine(FORERUN_SPECULATIVE_CONFIG=said) == expected
    assert engine("--speculative-config", '{"method": "mtp"}').speculative_algorithm == "NEXTN"
    same = ["--speculative-config", '{"draft_tensor_parallel_size": 1, "method": "ngram"}']
    assert engine(*same) == EngineConfig(speculative_algorithm="NGRAM")
    for said in ('{"method": "deepseek_mtp"}', '{"method": "qwen3_next_mtp", "quantization": "x"}'):
        assert engine("--speculative-config", said) == EngineConfig(speculative_algorithm="NEXTN")
    assert engine("--speculative-config", '{"model": "[ngram]"}').speculative_algorithm == "NGRAM"
    dotted = ["--speculative_config.method", "eagle3", "--speculative_config.model=d",
              "--speculative-config.num_speculative_tokens", "3"]  # fmt: skip
    assert engine(*dotted, "--speculative_config.revision", "r") == expected
    assert engine("--spec-method", "dspark", "--spec-model", "d", "--spec-tokens", "7") == (
        EngineConfig(
            speculative_algorithm="DFLASH",
            speculative_draft_model_path="d",
            speculative_num_steps=7,
            speculative_num_draft_tokens=8,
        )
    )
    for wrong, problem in (
        ("3", "takes a JSON object"),
        ("{", "takes a JSON object"),
        ('{"method": "medusa"}', "methods known here are ngram"),
        ('{"parallel_drafting": true}', "parallel_drafting cannot be honoured"),
        ('{"speed": 4}', "speed is no key that is known"),
    ):
        with pytest.raises(ConfigError, match=problem):
            engine("--speculative-config", wrong)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--dp-size 2", "--dp-size 2 cannot be honoured: one machine's devices share"),
        ("-ngl some", "-ngl takes a whole number, auto or all, not 'some'"),
        ("--draft folder", "--draft takes a whole number, not 'folder'"),
        ("--speculation off", "There is no option --speculation of forerun serve"),
        ("--speculative-accept-threshold-acc 1.5", "must be between 0.0 and 1.0"),
        ("--speculative-algorithm naive_eagle --speculative-num-steps 3", "NAIVE drafts at most 1"),
        ("--speculative-algorithm naive --speculative-num-draft-tokens 3", "at most 1 + 1 = 2"),
        ("--speculative-algorithm medusa", "must be one of: AUTO, EAGLE"),
        ("--speculative-algorithm NGRAM --speculative-eagle-topk 4", "branches where the text"),
        ("--speculative-draft-model-revision r", "speculative-draft-model-path names no draft"),
        ("--enable-torch-compile --executor cpu", "needs the torch executor"),
        ("--max-model-len 5000 --context 4000", "--max-model-len and --context both set context"),
        ("a/b --model c/d", "the first argument and --model both set model, to a/b and c/d"),
        ("-n x", "max_tokens must be a whole number from 1"),
        ("--spec-type draft-mtp,draft-eagle3", "takes one of none, draft-simple"),
        ("--hf-file x.gguf", "it goes with --hf-repo"),
        ("-hft secret", "-hft cannot be honoured: set HF_TOKEN in the environment"),
        ("--dry-multiplier 0.5", "this sampler is not here; leave the option out"),
        ("--speculative_config.a 1 --speculative_config.a.b 1", "is within a, which has a value"),
        ("--port x", "--port takes a whole number, not 'x'"),
        ("--context infk", "--context takes a whole number, not 'infk'"),
        ("--api-key a --ssl-keyfile k", "ssl-keyfile and ssl-certfile go together"),
    ],
)
def test_what_cannot_be_is_one_sentence(line, problem, capsys):
    assert main(["serve", *line.split()]) == 2
    err = capsys.readouterr().err
    assert problem in err and len(err.splitlines()) == 1


def test_no_name_is_the_beginning_of_another(capsys):
    """-u names nothing: it is not swallowed by -ub. -cnv is a name, not the number nv of -c."""
    for flag in ("-u", "-cxy", "-mfile"):
        assert main(["run", "toy", "Hi", flag, "64"]) == 2
        assert f"There is no option {flag} of forerun run" in capsys.readouterr().err
    assert main(["run", "toy", "Hi", "-f", "64"]) == 2
    assert "-f cannot be honoured: forerun run - reads" in capsys.readouterr().err
    assert main(["run", "toy", "-cnv", "-st", "-p", "Hi", "-n", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 3
    assert main(["run", "toy", "Hi", "-n4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 4


def test_a_tree_that_cannot_be_is_explained_with_numbers():
    assert [capacity(*shape) for shape in ((3, 1), (1, 4), (3, 4), (5, 8), (0, 3))] == [
        4, 5, 37, 265, 1,
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"16, but 3 steps with top-k 1 make at most 1 \+ 3 = 4"):
        engine(
            *["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"],
            *["--speculative-num-draft-tokens", "16"],
        )
    with pytest.raises(ConfigError, match=r"64, but 3 steps .* at most 1 \+ 3 \+ 2 x 3 x 3 = 22"):
        EngineConfig(
            speculative_algorithm="EAGLE3",
            speculative_num_steps=3,
            speculative_eagle_topk=3,
            speculative_num_draft_tokens=64,
        )
    one = Algorithm("NAIVE", "", model=True, max_topk=1)
    with pytest.raises(ConfigError, match="speculative-eagle-topk is 2, but NAIVE takes at most 1"):
        check_shape(one, 1, 2, 3)


def test_what_is_not_said_of_a_tree_goes_with_what_is():
    def shape(*sizes):
        draft_shape = algorithms.draft_shape(*sizes)
        return draft_shape.depth, draft_shape.width, draft_shape.nodes + 1

    assert shape(None, None, None) == (8, 1, 9)
    assert not EngineConfig(speculative_algorithm="off", speculative_token_map="m").speculates
    naive = EngineConfig(speculative_algorithm="naive_eagle").draft_shape
    assert naive == (1, 1, 1)
    assert shape(3, None, None) == (3, 1, 4)
    assert shape(None, None, 6) == (5, 1, 6)
    assert shape(3, 4, None) == (3, 4, 13)
    assert shape(None, 8, None) == (8, 8, 64)
    assert shape(64, 1, None) == (64, 1, 65)
    assert shape(0, None, None) == (0, 1, 1)
    for method in ALGORITHMS:
        check_shape(method, None, None, None)


def test_flag_before_environment_before_file_before_profile_before_default(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "server.yaml"
    file.write_text(
        "model-path: toy\nkv_tokens: 4096\nmax-num-seqs: 3\npage-size: 8\nmax-waiting: 7\n"
        "enforce-eager: false\napi-key: [a, b]\n"
    )
    line = ["--config", str(file), "--max-sequences", "5"]
    variables = {"FORERUN_MAX_RUNNING_REQUESTS": "4", "FORERUN_PAGE_SIZE": "4", "OTHER": "x"}
    config = engine(*line, **variables)
    assert config == EngineConfig(
        model="toy", kv_tokens=4096, max_sequences=5, page_size=4, max_waiting=7
    )
    assert engine(FORERUN_CONFIG=str(file), **variables).max_sequences == 4
    assert server(*line).api_keys == ("a", "b")
    assert server(*line, FORERUN_API_KEY="c").api_keys == ("c",)
    assert server(*line, "--api-key", "d", FORERUN_API_KEY="c").api_keys == ("d",)
    resolved = load(config)
    resolved.close()
    assert resolved.info["profile"] is None and resolved.config.policy == "fixed"
    tuned.save(resolved.config, Setting("NGRAM", 4, 3, "adaptive"), {})
    with_profile, with_flag = load(config), load(replace(config, speculative_num_steps=2))
    for loaded, values in ((with_profile, (3, "adaptive")), (with_flag, (2, "fixed"))):
        loaded.close()
        assert (loaded.config.speculative_num_steps, loaded.config.policy) == values


_TWICE = [f", &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
"""Lists of which each holds the one before it twice."""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("porrt: 1", "did you mean --port"),
        ("max-tokens: 1", "There is no option --max-tokens of forerun serve; another command"),
        ("- 1", "must hold lines such as"),
        ("a: [", "is not YAML"),
        ("port: x", "port in .* takes a whole number"),
        ("dp-size: 2", "dp-size in .* 2 cannot be honoured"),
        ("port: [1]", "port in .*c.yaml takes one value, not a list"),
        ("context: []", "context in .* takes one value, not a list"),
        ("model: [a, b]", "model in .* takes one value, not a list"),
        ("model: {a: b}", "model in .* takes one value, not a mapping"),
        ("api-key: {a: b}", "api-key in .* takes one value, not a mapping"),
        ("api-key: [a, {b: c}]", "api-key in .* takes one value, not a mapping"),
        ("api-key: [a, [b]]", "api-key in .* takes one value, not a list"),
        ("port: 1\nhost: a\nport: 2", "port appears twice, in lines 1 and 3"),
        ("max_sequences: 1\nmax-sequences: 2", "max-sequences appears twice"),
        ("dtype: off", "dtype is 'off'"),
        ("port: 12:30:00", "port in .* takes a whole number, not '12:30:00'"),
        ("[a]: 1", "line 1: a name is one word"),
        ("host: a\n---\nhost: b", "is not YAML"),
        ("api-key: [&a0 [x, x]" + "".join(_TWICE) + "]", "takes one value, not a list"),
        ("port: " + "[" * 2500, "is nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, text, problem):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        engine("--config", str(tmp_path / "c.yaml"))


def test_a_value_of_a_file_is_as_it_was_written(tmp_path):
    """YAML alone would make 7, 1.1, false and a date of these."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: &name toy\napi-key: [007, 1.10, 'null', 2026-01-01, ~]\nreasoning-end: off\n"
        "port: 08000\nui: no\nspeculative-config: {num_speculative_tokens: 3}\nhost:\n"
        "served-name: *name\nspeculative-algorithm: OFF\nkv_tokens: 4K\n"
    )
    config = server("--config", str(file))
    assert config.api_keys == ("007", "1.10", "null", "2026-01-01")
    assert (config.reasoning_end, config.port, config.ui) == ("off", 8000, False)
    assert (config.host, config.served_name) == ("127.0.0.1", ("toy",))
    ours = engine("--config", str(file))
    assert (ours.speculative_algorithm, ours.speculative_num_steps) == ("OFF", 3)
    assert ours.kv_tokens == 4096
    file.write_text("<<: {port: 9}\nport: 8\n")
    assert server("--config", str(file)).port == 8


def test_files_and_variables_that_are_wrong(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        engine("--config", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"FORERUN_PRT .* did you mean FORERUN_PORT\?"):
        engine(FORERUN_PRT="1")
    with pytest.raises(ConfigError, match="FORERUN_PORT takes a whole number"):
        server(FORERUN_PORT="x")
    assert configured(EngineConfig, settled("run", "Hi", FORERUN_PORT="1")) == EngineConfig(
        max_sequences=2
    )


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (["--max-modl-len", "1"], "did you mean --max-model-len, the same as --context"),
        (["--contxt", "1"], "--context-length (SGLang), --max-model-len (vLLM)"),
        (["--kv-tokens", "8Q"], "not '8Q'; units are k, K, m, M, g, G, KB, MB, GB, TB, KiB, "),
        (["--speculative-algoritm", "x"], "did you mean --speculative-algorithm"),
        (["--zzzzz"], "There is no option --zzzzz of forerun serve."),
    ],
)
def test_an_unknown_name_gets_a_hint(line, hint, capsys):
    assert main(["serve", *line]) == 2
    assert hint in capsys.readouterr().err


def test_a_commands_own_flags_are_hinted_at_too(capsys):
    for command, wrong, meant in (
        ("eval", "--promts", "--prompts"),
        ("bench --launch", "--concurency", "--concurrency"),
        ("prove", "--quik", "--quick"),
        ("run", "--json-schema", "--json-schema-file"),
    ):
        assert main([*command.split(), wrong, "x"]) == 2
        assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.slow
def test_sglangs_entry_starts_a_server(tmp_path):
    line = "--model-path toy --max-total-tokens 4096 --served-model-name mine"
    line += " --speculative-algorithm NGRAM --speculative-num-draft-tokens 5 --enable-metrics"
    entry = [sys.executable, "-m", "forerun.launch_server", *line.split()]
    with started(entry, tmp_path / "log") as served:
        assert served.http.get("/v1/models").json()["data"][0]["id"] == "mine"
        config = served.http.get("/server_info").json()["config"]
    assert (config["speculative_num_draft_tokens"], config["speculative_num_steps"]) == (5, 4)


@pytest.mark.parametrize("table", ["migrating", "metrics"])
def test_tables_for_people_are_fresh(table):
    script = [sys.executable, f"docs/site/{table}.py", "--check"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # Of this tree, wherever forerun is installed.
    assert subprocess.run(script, cwd=ROOT, env=env, check=False).returncode == 0, (
        f"run: python docs/site/{table}.py"
    )


def test_another_library_for_grammars_is_a_sentence_and_no_error(caplog):
    assert engine("--grammar-backend", "xgrammar") == EngineConfig()
    assert "--grammar-backend xgrammar: llguidance matches all grammars here." in caplog.text
    with pytest.raises(ConfigError, match="--grammar-backend none cannot be honoured: llguidance"):
        engine("--grammar-backend", "none")


def test_all_values_out_of_bounds_are_reported_at_once(capsys):
    line = ["serve", "toy", "--port", "99999", "--max-sequences", "0", "--threads", "-4"]
    assert main(line) == 2
    printed = capsys.readouterr().err.splitlines()
    assert sorted(one.split()[1] for one in printed) == ["max-sequences", "port", "threads"]


def test_a_value_out_of_bounds_is_named_by_where_it_was_written(tmp_path, capsys, monkeypatch):
    assert main(["serve", "toy", "--gpu-memory-utilization", "5", "--max-num-seqs", "0"]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert sorted(one.split(" is ")[0] for one in printed) == [
        "forerun: --gpu-memory-utilization: mem-fraction-static",
        "forerun: --max-num-seqs: max-sequences",
    ]
    monkeypatch.setenv("FORERUN_PORT", "99999")
    assert main(["serve", "toy"]) == 2
    assert "FORERUN_PORT: port is 99999, but" in capsys.readouterr().err


def test_a_wrong_sampling_default_names_the_option_that_was_written(capsys):
    assert main(["serve", "toy", "--temp", "9", "--top-k", "5"]) == 2
    assert "--temp: sampling-override has 'temperature=9'" in capsys.readouterr().err
    nothing = engine("--override-generation-config", '{"temperature": null}')
    assert nothing == EngineConfig()
