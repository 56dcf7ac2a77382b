"""Command lines of SGLang's documents, typed as they stand there, in a folder where what they name
are small stand-ins: each loads, drafts what it says, and writes what the target alone writes.
"""

import shlex
from dataclasses import asdict

import pytest

from forerun.cli.command_line import parsed
from forerun.cli.serve import prepared
from forerun.client.llm import LLM
from forerun.errors import ConfigError
from forerun.executors import cpu
from tests.e2e.drafts import make

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))

STANDS_FOR = {
    "meta-llama/Llama-2-7b-chat-hf": "target",
    "meta-llama/Meta-Llama-3-8B-Instruct": "target",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "target",
    "XiaomiMiMo/MiMo-7B-RL": "layered",
    "zai-org/GLM-4.5-Air": "layered",
    "lmsys/sglang-EAGLE-llama2-chat-7B": "eagle1",
    "lmsys/sglang-EAGLE-LLaMA3-Instruct-8B": "eagle1",
    "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B": "eagle3",
    "thunlp/LLaMA3-Instruct-8B-FR-Spec/map.json": "map/map.json",
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
}  # fmt: skip
"""What drafts, and what follows `python -m forerun.launch_server`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("lines")
    made = make(root / "made")
    for name, what in STANDS_FOR.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(made / what)
    return root


def answered(line, **changes):
    """What follows "the quick" under a server's command line, what drafts, and its settings."""
    config, settings = prepared(parsed(["serve", *shlex.split(line)]))
    options = {**asdict(config), "threads": 1, "draft_on_error": "stop", **changes}
    with LLM(**options) as llm:
        (answer,) = llm.generate("the quick", max_tokens=16, ignore_eos=True)
        return answer.tokens, llm.loaded.config, settings


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if "compile" in n else n for n in LINES]
)
def test_line(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    method, line = LINES[name]
    tokens, config, settings = answered(line)
    shape = line.split()
    assert config.speculative_algorithm == method
    for option, value in (
        ("--speculative-num-steps", config.speculative_num_steps),
        ("--speculative-eagle-topk", config.speculative_eagle_topk),
        ("--speculative-num-draft-tokens", config.speculative_num_draft_tokens),
    ):
        assert value == int(shape[shape.index(option) + 1])
    assert tokens == answered(line, speculative_algorithm="OFF")[0] and len(tokens) == 16
    named = ("glm-4.5-air",) if name == "GLM-4.5" else ()
    assert settings.served_name == named


def test_no_draft_is_named(folder, monkeypatch):
    """EAGLE3 wants a head; what there is instead is said."""
    monkeypatch.chdir(folder)
    line = "--model XiaomiMiMo/MiMo-7B-RL --trust-remote-code --speculative-algorithm EAGLE3"
    with pytest.raises(ConfigError, match="or say NEXTN: the model has prediction layers"):
        answered(line)
