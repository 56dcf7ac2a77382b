"""GGUF files that llama.cpp's own converter makes of small checkpoints of transformers."""

import json
import subprocess
import sys

import numpy as np
import pytest

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.drafts.assistant import open_assistant
from forerun.drafts.block_config import expected_block_tensors
from forerun.drafts.block_folder import open_block
from forerun.drafts.gguf_block import open_block_file
from forerun.drafts.gguf_prediction import open_in_gguf
from forerun.drafts.prediction_layers import open_prediction_layers
from forerun.networks.arch import FAMILIES
from forerun.networks.rope import Rope
from tests.drafters import assistants
from tests.drafters.prediction import random_layer, with_layers
from tests.models import tiny
from tests.parity.blocks import PAIRED, VARIANTS, random_block
from tests.shape.tree import ROOT
from tests.worlds.checkpoints import logits_are_those_of
from tests.worlds.llama_cpp import source

SIGMOID, LAYERS = {"scoring_func": "sigmoid"}, {"num_hidden_layers": 4}
GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 16}
CHANGES = {
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA
    | {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    "smollm3": LAYERS | {"no_rope_layer_interval": 4},
    "exaone4": LAYERS | {"sliding_window_pattern": 4},
    "phi3": {"sliding_window": 20, "pad_token_id": 0},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
}
"""Numbers that llama.cpp takes for granted, of published models."""
AS_PUBLISHED = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), SIGMOID),
    "minimax_m2": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["attention"] * 2},
}
"""Keys of config.json that transformers does not write."""
PREDICTING = ("glm4_moe", "qwen3_5_text")
DRAFTERS = ("both ways", "causal", "DSpark", "DFlash2")
NAMES = (*FAMILIES, *(f"{family} predicts" for family in PREDICTING))


def model(name):
    family = name.split()[0]
    return tiny.model(family, **CHANGES.get(family, {}))


def save(name, folder):
    """A model in a folder as the converter wants it."""
    hf, family = model(name), name.split()[0]
    said = AS_PUBLISHED.get(family, {})
    if name == "qwen3_5_text":
        hf.config.rope_parameters["mrope_section"] = [1, 1, 0]
    if "predicts" in name:
        last = hf.model.layers[-1]
        made = type(last)(hf.config, len(hf.model.layers) - 1)
        made.load_state_dict(last.state_dict())
        layer = (made, *random_layer(tiny.model("llama"), 5)[1:])
        with_layers(hf, [layer], folder, "qwen3-next" if family in tiny.DELTAS else "deepseek")
        said = said | {"mtp_num_hidden_layers": 1}
    else:
        tiny.save_folder(hf, folder)
    as_converters_want(folder, said)


def as_converters_want(folder, said):
    config = json.loads((folder / "config.json").read_text()) | said
    (folder / "config.json").write_text(json.dumps(config))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    (folder / "tokenizer.json").write_text(tiny.tokenizer().to_str())


def drafter(name, root):
    """A block drafter in a folder, beside a target whose positions are divided in three."""
    target = FolderCheckpoint(root / "qwen3_5_text").architecture
    changes = {"rope": Rope(1e4), **(VARIANTS | PAIRED)[name]}
    draft = random_block(target, root / name, **changes)
    as_converters_want(root / name, {"use_sliding_window": bool(draft.head.windows)})
    return draft


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root, jobs = tmp_path_factory.mktemp("converted"), []
    for name in NAMES:
        save(name, root / name)
        plain = name in tiny.DELTAS
        jobs.append((str(root / name), str(root / f"{name}.gguf"), ["--no-mtp"] * plain))
    beside = ["--target-model-dir", str(root / "qwen3_5_text")]
    for name in DRAFTERS:
        drafter(name, root)
        jobs.append((str(root / name), str(root / f"{name}.gguf"), beside))
    made = assistants.beside(model("gemma4_text"))
    made.save_pretrained(root / "assistant")
    as_converters_want(root / "assistant", {})
    jobs.append((str(root / "assistant"), str(root / "assistant.gguf"), []))
    jobs.sort(key=lambda job: "--no-mtp" in job[2])  # It stays set for those behind it.
    command = [sys.executable, "-m", "tests.models.converting", str(source())]
    subprocess.run(command, input=json.dumps(jobs), text=True, check=True, cwd=ROOT)
    return root


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_what_the_converter_writes_is_what_transformers_has(converted, name):
    hf, checkpoint = model(name), GgufCheckpoint(converted / f"{name}.gguf")
    logits_are_those_of(hf, checkpoint)
    if "predicts" in name:
        layers, folder = open_in_gguf(checkpoint), FolderCheckpoint(converted / name)
        expected = open_prediction_layers(folder, folder.prediction_files, 1)
        assert set(layers.names()) == set(expected.names())
        offset = folder.architecture.norm_offset - checkpoint.architecture.norm_offset
        for part in layers.names():
            more = offset if "norm" in part else 0
            np.testing.assert_allclose(layers.tensor(part), expected.tensor(part) + more, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DRAFTERS)
def test_block_drafters_are_those_of_their_folders(converted, name):
    target = FolderCheckpoint(converted / "qwen3_5_text").architecture
    from_file, folder = (
        open_block_file(converted / f"{name}.gguf", target),
        open_block(converted / name, target),
    )
    assert from_file.head == folder.head
    for tensor in expected_block_tensors(from_file.head):
        np.testing.assert_array_equal(from_file.tensor(tensor), folder.tensor(tensor))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_assistant_is_that_of_its_folder(converted):
    target = FolderCheckpoint(converted / "gemma4_text").architecture
    opened = open_assistant(converted / "assistant.gguf", target)
    folder = open_assistant(converted / "assistant", target)
    assert set(opened.names()) == set(folder.names())
    for name in folder.names():
        np.testing.assert_allclose(opened.tensor(name), folder.tensor(name), atol=1e-6)
