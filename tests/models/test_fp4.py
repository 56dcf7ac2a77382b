"""gpt-oss's folders, whose experts are in MXFP4, against transformers' own unpacking."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import ModelError
from forerun.executors.cpu import CpuExecutor, available
from forerun.executors.torch import TorchExecutor
from tests.cpu.reference import forward
from tests.cpu.test_logits import SAME, distance, logits_of
from tests.models import tiny
from tests.parity.driver import limits

EXPERTS = ("gate_up_proj", "down_proj")
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def saved(path, change=lambda tensors: None):
    """A folder with random experts in MXFP4, and the transformers model that has their numbers."""
    hf = tiny.model("gpt_oss", max_position_embeddings=512)
    folder = tiny.save_folder(hf, path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    state, random = hf.state_dict(), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(EXPERTS)]:
        count, inputs, outputs = tensors.pop(name).shape
        shape = count, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(120, 124, shape, dtype=torch.uint8, generator=random)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert meant.shape == state[name].shape
        state[name] = meant
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    hf.load_state_dict(state)
    return folder, hf


def test_experts_are_the_numbers_of_transformers(tmp_path):
    folder, hf = saved(tmp_path)
    checkpoint = FolderCheckpoint(folder)
    weights = tiny.weights(hf)
    assert set(checkpoint.names()) == set(weights)
    for name, weight in weights.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), weight)
        if ".experts." in name and name.endswith(".weight"):
            assert checkpoint.grouped(name).kind == "mxfp4"


def test_logits(tmp_path, random):
    """On torch those of transformers; on the core, in 4 bits, those of the reference."""
    folder, hf = saved(tmp_path)
    checkpoint, tokens = FolderCheckpoint(folder), random.integers(0, tiny.VOCAB, 60)
    with torch.no_grad():
        expected = hf(torch.from_numpy(tokens).long()[None]).logits[0].numpy()
    room = limits(tiny.VOCAB)
    assert np.abs(logits_of(TorchExecutor(checkpoint, room), tokens) - expected).max() < 1e-4
    if available() is None:
        core = CpuExecutor(checkpoint, room, 2)
        assert "MXFP4" in core.describe()["dtype"]
        assert distance(logits_of(core, tokens), forward(checkpoint, tokens)) < SAME
        core.shutdown()


NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(f"{NAME}_scales"), "down_proj has blocks; it needs blocks, scales"),
        (lambda t: t.pop(f"{NAME}_blocks"), "down_proj has scales; it needs blocks, scales"),
        (
            lambda t: t.update({f"{NAME}_scales": t[f"{NAME}_scales"][:, 1:].contiguous()}),
            r"down_proj_scales is \[5, 63, 3\], not \[5, 64, 3\]",
        ),
        (
            lambda t: t.update({f"{NAME}_blocks": t[f"{NAME}_blocks"][..., 1:].contiguous()}),
            r"down_proj_blocks is .* 16\]",
        ),
        (
            lambda t: t.update({f"{NAME}_scales": t[f"{NAME}_scales"].to(torch.int8)}),
            "down_proj_scales is stored as I8, not U8",
        ),
        (
            lambda t: [t.pop(n) for n in list(t) if n.endswith(("_blocks", "_scales"))],
            "remove quantization_config",
        ),
        (
            lambda t: [t.pop(f"{NAME}{end}") for end in ("_blocks", "_scales")],
            "missing model.layers.1.mlp.experts.down_proj",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, named):
    folder, _ = saved(tmp_path, change)
    with pytest.raises(ModelError, match=named):
        FolderCheckpoint(folder)


def test_a_scale_that_is_no_number_is_named(tmp_path):
    folder, _ = saved(tmp_path, lambda tensors: tensors[f"{NAME}_scales"][3, 5].fill_(255))
    checkpoint = FolderCheckpoint(folder)
    assert np.isfinite(checkpoint.tensor("model.layers.1.mlp.experts.2.down_proj.weight")).all()
    with pytest.raises(ModelError, match=r"down_proj_scales has a scale of 255"):
        checkpoint.tensor("model.layers.1.mlp.experts.3.down_proj.weight")
