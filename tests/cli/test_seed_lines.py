"""Command lines of SGLang's documents, typed as they stand there, in a folder where what they name
are small stand-ins: each loads, drafts what it says, and writes what the target alone writes.
"""

import json
import shlex
import shutil
from dataclasses import asdict
from functools import partial

import huggingface_hub
import pytest
import torch

from forerun.cli.command_line import parsed
from forerun.cli.serve import prepared
from forerun.client.llm import LLM
from forerun.errors import ConfigError, ForerunError, ModelError
from forerun.executors import cpu
from tests.drafters.kinds import Kinds
from tests.drafters.prediction import random_layer, with_layers
from tests.e2e.drafts import make
from tests.models import packers, tiny

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))

STANDS_FOR = {
    "meta-llama/Llama-2-7b-chat-hf": "target",
    "meta-llama/Meta-Llama-3-8B-Instruct": "target",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "target",
    "XiaomiMiMo/MiMo-7B-RL": "mimo",
    "zai-org/GLM-4.5-Air": "glm4_moe",
    "zai-org/GLM-4.5-Air-FP8": "glm4_moe in float8",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek_v3 in float8",
    "lmsys/sglang-EAGLE-llama2-chat-7B": "eagle1",
    "lmsys/sglang-EAGLE-LLaMA3-Instruct-8B": "eagle1",
    "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B": "eagle3",
    "thunlp/LLaMA3-Instruct-8B-FR-Spec/map.json": "map/map.json",
    "meta-llama/Llama-3.2-1B-Instruct": "small",
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": "block",
}
"""A name in a line: what lies there of what `make` makes."""

LINES = {
    "EAGLE-2": ("EAGLE", """--model meta-llama/Llama-2-7b-chat-hf --speculative-algorithm EAGLE
        --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B
        --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16
        --cuda-graph-max-bs 8 --log-level warning"""),
    "FR-Spec": ("EAGLE", """--model meta-llama/Meta-Llama-3-8B-Instruct
        --speculative-algorithm EAGLE
        --speculative-draft-model-path lmsys/sglang-EAGLE-LLaMA3-Instruct-8B
        --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 64
        --speculative-token-map thunlp/LLaMA3-Instruct-8B-FR-Spec/map.json
        --mem-fraction 0.7 --cuda-graph-max-bs 2 --dtype float16 --log-level warning"""),
    "EAGLE-3": ("EAGLE3", """--model meta-llama/Meta-Llama-3.1-8B-Instruct
        --speculative-algorithm EAGLE3
        --speculative-draft-model-path jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B
        --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 32
        --mem-fraction 0.6 --cuda-graph-max-bs 2 --dtype float16 --log-level warning"""),
    "torch.compile": ("EAGLE", """--model meta-llama/Llama-2-7b-chat-hf
        --speculative-algorithm EAGLE
        --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B
        --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 64
        --mem-fraction 0.6 --enable-torch-compile --torch-compile-max-bs 2 --log-level warning"""),
    "MTP": ("NEXTN", """--model XiaomiMiMo/MiMo-7B-RL --host 0.0.0.0 --trust-remote-code
        --speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1
        --speculative-num-draft-tokens 2 --mem-fraction 0.5 --log-level warning"""),
    "GLM-4.5": ("NEXTN", """--model-path zai-org/GLM-4.5-Air --tool-call-parser glm45
        --reasoning-parser glm45 --speculative-algorithm EAGLE --speculative-num-steps 3
        --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --mem-fraction-static 0.7
        --disable-shared-experts-fusion --served-model-name glm-4.5-air --host 0.0.0.0
        --port 8000"""),
    "GLM-4.5, float8": ("NEXTN", """--model-path zai-org/GLM-4.5-Air-FP8 --tp-size 1 --ep-size 1
        --tool-call-parser glm45 --reasoning-parser glm45 --speculative-algorithm EAGLE
        --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
        --mem-fraction-static 0.7 --disable-shared-experts-fusion
        --served-model-name glm-4.5-air --host 0.0.0.0 --port 8000"""),
    "DeepSeek": ("NEXTN", """--model-path deepseek-ai/DeepSeek-V3-0324 --trust-remote-code --tp 1
        --speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1
        --speculative-num-draft-tokens 2"""),
    "DeepSeek, tree": ("NEXTN", """--model-path deepseek-ai/DeepSeek-V3-0324 --trust-remote-code
        --speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 4
        --speculative-num-draft-tokens 4"""),
    "STANDALONE": ("STANDALONE", """--model meta-llama/Meta-Llama-3.1-8B-Instruct
        --speculative-algorithm STANDALONE
        --speculative-draft-model-path meta-llama/Llama-3.2-1B-Instruct
        --speculative-num-steps 4 --speculative-eagle-topk 2 --speculative-num-draft-tokens 7
        --mem-fraction-static 0.7 --cuda-graph-max-bs 8 --log-level warning"""),
    "NGRAM": ("NGRAM", """--model meta-llama/Meta-Llama-3.1-8B-Instruct
        --speculative-algorithm NGRAM --speculative-num-draft-tokens 16
        --mem-fraction-static 0.7 --cuda-graph-max-bs 8 --log-level warning"""),
    "NAIVE": ("NAIVE", """--model meta-llama/Meta-Llama-3.1-8B-Instruct
        --speculative-algorithm NAIVE
        --speculative-draft-model-path jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B
        --speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"""),
    "DFLASH": ("DFLASH", """--model meta-llama/Meta-Llama-3.1-8B-Instruct
        --speculative-algorithm DFLASH
        --speculative-draft-model-path z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat
        --speculative-num-steps 4 --speculative-num-draft-tokens 5"""),
}  # fmt: skip
"""What drafts, and what follows `python -m forerun.launch_server`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("lines")
    made = make(root / "made")
    for family, block in (("glm4_moe", (1, 0)), ("deepseek_v3", (32, 32))):
        model = Kinds(made)[f"NEXTN of, {family}"].model
        shutil.copytree(model, made / f"{family} in float8")
        packers.quantise(made / f"{family} in float8", FLOAT8[family], partial(stored, *block))
    of_mimo(made / "mimo")
    for name, what in STANDS_FOR.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(made / what)
    return root


CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FLOAT8 = {
    "glm4_moe": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNELS}},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*eh_proj", "re:.*shared_head.head"],
    },
    "deepseek_v3": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "modules_to_not_convert": ["eh_proj", "kv_b_proj"],
    },
}
"""As GLM-4.5-FP8 and DeepSeek-V3 say it of themselves, but for block sizes."""


def stored(rows, columns, weight):
    """DeepSeek's scales have a name of their own."""
    name = "weight_scale_inv" if columns else "weight_scale"
    return packers.float8(weight, rows, columns, name)


def of_mimo(folder):
    """MiMo-7B's layers are Qwen2's, with biases; its layer lies under names of its own."""
    hf = tiny.model("qwen2")
    biases = {
        f"model.mtp_layers.0.self_attn.{part}_proj.bias": torch.zeros(size)
        for part, size in {"q": 64, "k": 32, "v": 32}.items()
    }
    layer = random_layer(tiny.model("llama"), 5)
    with_layers(hf, [layer], folder, "mimo", biases)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}
    (folder / "config.json").write_text(json.dumps(config))


def answered(line, **changes):
    """What follows "the quick" under a server's command line, what drafts, its settings, and what
    the draft model may propose.
    """
    config, settings = prepared(parsed(["serve", *shlex.split(line)]))
    options = {**asdict(config), "threads": 1, "draft_on_error": "stop", **changes}
    with LLM(**options) as llm:
        (answer,) = llm.generate("the quick", max_tokens=16, ignore_eos=True)
        model = llm.loaded.target.draft_model
        ids = None if model is None else model.traits.target_ids.tolist()
        return answer.tokens, llm.loaded.config, settings, ids


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if "compile" in n or n == "FR-Spec" else n
        for n in LINES
    ],
)
def test_line(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    method, line = LINES[name]
    tokens, config, settings, _ = answered(line)
    shape = line.split()
    assert config.speculative_algorithm == method
    for option, value in (
        ("--speculative-num-steps", config.speculative_num_steps),
        ("--speculative-eagle-topk", config.speculative_eagle_topk),
        ("--speculative-num-draft-tokens", config.speculative_num_draft_tokens),
    ):
        assert option not in shape or value == int(shape[shape.index(option) + 1])
    assert tokens == answered(line, speculative_algorithm="OFF")[0] and len(tokens) == 16
    named = ("glm-4.5-air",) if "GLM" in name else ()
    assert settings.served_name == named


def test_a_map_of_a_hub_is_fetched(folder, monkeypatch):
    """FR-Spec's line where no such folder lies: the map is a file of a repository."""
    monkeypatch.chdir(folder)
    repository, fetched = "thunlp/another-FR-Spec", []

    def snapshot(name, *, allow_patterns, **_):
        fetched.append((name, allow_patterns))
        return str(folder / "made" / "map")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    line = LINES["EAGLE-2"][1] + " --speculative-token-map "
    here, there, alone = (answered(line + at) for at in (
        *("thunlp/LLaMA3-Instruct-8B-FR-Spec/map.json", f"{repository}/map.json"), "none",
    ))  # fmt: skip
    assert fetched == [(repository, ["map.json"])]
    assert here[3] == there[3] != alone[3]
    with pytest.raises(ModelError, match="there is no token map"):
        answered(line + f"{repository}/x.json")


def test_no_draft_is_named(folder, monkeypatch):
    """EAGLE3 wants a head; what there is instead is said."""
    monkeypatch.chdir(folder)
    line = "--model XiaomiMiMo/MiMo-7B-RL --trust-remote-code --speculative-algorithm EAGLE3"
    with pytest.raises(ConfigError, match="or use NEXTN: the model has prediction layers"):
        answered(line)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ep-size 8", "ep-size is 8, but tp-size is 1"),
        ("--tp-size 8 --ep-size 8", "can be shared by 1 or 2 or 4"),
        ("--tp-size 4 --ep-size 3", "ep-size is 3, which does not divide"),
    ],
)
def test_experts_over_devices_that_are_not_there_are_refused_in_words(
    folder, monkeypatch, flags, message
):
    """GLM-4.5's line with its flags for eight GPUs."""
    monkeypatch.chdir(folder)
    line = LINES["GLM-4.5, float8"][1].replace("--tp-size 1 --ep-size 1", flags)
    with pytest.raises(ForerunError, match=message):
        answered(line)


@pytest.mark.slow
def test_experts_over_two_processes_write_the_same(folder, monkeypatch):
    """GLM-4.5's line, honoured: ranks on this machine's processor, in float32."""
    monkeypatch.chdir(folder)
    line = LINES["GLM-4.5, float8"][1]
    how = {"executor": "torch", "dtype": "float32"}
    one = answered(line, **how)[0]
    tokens, config, *_ = answered(line.replace("-size 1", "-size 2"), **how)
    assert (config.tp_size, config.ep_size) == (2, 2) and tokens == one
