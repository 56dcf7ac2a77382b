"""Differential fuzzing on every executor, with every drafter.

What `forerun prove --fuzz` does, on tiny random models: any requests, arrivals, aborts and tiny
caches, each answer against the same request alone without speculation. See forerun/measure/fuzz.py.
"""

import importlib.util
from contextlib import closing

import numpy as np
import pytest
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.drafts.eagle_config import head_for
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.measure.fuzz import Fuzzer
from forerun.measure.workload import read_prompts
from forerun.options.config import EngineConfig
from tests.models import tiny
from tests.parity.tape import on_tape
from tests.train.exports import export_like
from tests.worlds.draft_models import METHODS, make
from tests.worlds.real_server import NIGHTLY

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]
CASES = 300 if NIGHTLY else 10
TORCH = {"executor": "torch", "dtype": "float32", "device": "cpu"}
CAPTURED = TORCH | {"max_sequences": 4}
"""Few sizes to capture: a tape keeps all that a pool shares between graphs."""

MODELS = {
    name: METHODS[name]
    for name in (
        "NEXTN",
        "NEXTN, by depth",
        "STANDALONE",
        "STANDALONE, other vocabulary",
        "DFLASH",
        "DFLASH, causal",
    )
}
"""Draft models other than heads."""
EAGER = TORCH | {"disable_cuda_graph": True}
ALWAYS = "torch, STANDALONE, other vocabulary", "torch, captured, DFLASH"
"""What `make chaos` runs of those on torch; `make chaos-nightly` runs all."""

CONFIGS = {
    "cpu": {"executor": "cpu"},
    "cpu, draft head": {"executor": "cpu", "speculative_algorithm": "EAGLE3"},
    "torch": EAGER,
    "torch, draft head": EAGER | {"speculative_algorithm": "EAGLE3"},
    "torch, captured": CAPTURED,
    "torch, captured, draft head": CAPTURED | {"speculative_algorithm": "EAGLE3"},
    "jax": {"executor": "jax", "dtype": "float32", "device": "cpu"},
    "cpu, n-grams and draft head": {"executor": "cpu", "speculative_algorithm": "EAGLE+NGRAM"},
    "cpu, one token of a head": {"executor": "cpu", "speculative_algorithm": "NAIVE"},
    "toy": {"model": "toy"},
}
EXECUTORS = {"cpu": {"executor": "cpu"}, "torch": EAGER, "torch, captured": CAPTURED}
CONFIGS |= {
    f"{where}, {what}": EXECUTORS[where] | MODELS[what]
    for where in EXECUTORS
    for what in MODELS
    if NIGHTLY or where == "cpu" or f"{where}, {what}" in ALWAYS
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    hf = tiny.model("llama", max_position_embeddings=512, num_hidden_layers=6)
    return tiny.save_folder(hf, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def head(model, tmp_path_factory):
    """A draft head of random weights: mostly wrong, which is the harder case for losslessness."""
    arch = FolderCheckpoint(model).architecture
    torch.manual_seed(3)
    made = EagleHead(head_for(arch, arch.vocab))
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.2)
    folder = tmp_path_factory.mktemp("head")
    export_like(made, np.arange(arch.vocab, dtype=np.int32), folder, full=True)
    return folder


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    return make(tmp_path_factory.mktemp("drafts"))


@pytest.mark.parametrize("name", CONFIGS)
def test_no_answer_depends_on_speculation(name, model, head, drafts, monkeypatch):
    changes = {"model": str(model), "draft_on_error": "stop"} | CONFIGS[name]
    if changes.get("speculative_algorithm") in ("NEXTN", "STANDALONE", "DFLASH"):
        draft = changes.pop("draft", None)
        changes["model"] = str(drafts / CONFIGS[name].get("model", "target"))
        changes["speculative_draft_model_path"] = str(drafts / draft) if draft else None
    if name == "jax" and importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    elif "head" in name:
        changes["speculative_draft_model_path"] = str(head)
    if "captured" in name:
        on_tape(monkeypatch)
    with closing(Fuzzer(EngineConfig(**changes), tuple(read_prompts()), seed=len(name))) as fuzzer:
        report = fuzzer.run(lambda so_far: so_far.cases >= CASES)
        replayed = getattr(fuzzer._target[1].executor, "rounds", None) is not None
    assert replayed == ("captured" in name)
    assert report.failure is None, report.failure
    assert report.cases == CASES and report.draft_tokens > 0
    assert report.accepted > 0 or "head" in name
