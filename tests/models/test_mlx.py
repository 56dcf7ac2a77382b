"""Folders made for MLX, as mlx-lm 0.32.2 writes them, against folders of the same numbers."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.build.sizing import described
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.executors.cpu import CpuExecutor, available
from forerun.executors.torch import TorchExecutor
from forerun.options.config import EngineConfig
from tests.cpu.reference import forward
from tests.cpu.test_logits import SAME, distance, logits_of
from tests.models import packers, tiny
from tests.parity.driver import limits

EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
EIGHT = {"group_size": 64, "bits": 8}
ADDED = re.compile(r".*(layernorm|[qk]_norm|model\.norm)\.weight")
FAMILIES = ["qwen3", "gemma3_text", "phi3", "qwen3_moe", "mixtral", "qwen3_next", "lfm2"]
FAMILIES += ["lfm2_moe", "granitemoehybrid"]


def renamed(module, rows, family):
    """mlx-lm's modules for one of the files, and their rows."""
    room, _, last = module.rpartition(".")
    shared = room.replace("shared_mlp", "mlp")
    match last:
        case "input_linear":
            half = rows // 2
            return [(f"{shared}.gate_proj", slice(half)), (f"{shared}.up_proj", slice(half, rows))]
        case "output_linear":
            return [(f"{shared}.down_proj", slice(rows))]
        case "w1" | "w2" | "w3" if family == "lfm2_moe":
            return [(f"{room}.{PARTS[last]}", slice(rows))]
    return [(module, slice(rows))]


def written(path, family, wrapper=""):
    """A folder for MLX, and one with the numbers that it stands for."""
    hf = tiny.model(family)
    plain = tiny.save_folder(hf, path / "plain")
    folder = tiny.save_folder(hf, path / "mlx")
    meant, tensors, stacks = {}, {}, {}
    settings = {"group_size": 32, "bits": 4, "mode": "affine"}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module, stored = name.removesuffix(".weight"), name
        if match := EXPERT.fullmatch(name):
            stored = f"{match[1]}.switch_mlp.{PARTS.get(match[3], match[3])}"
        if tensor.ndim != 2 or tensor.shape[1] % 32:
            meant[name] = tensor
            moved = tensor.movedim(2, 1).contiguous() if tensor.ndim == 3 else tensor
            added = family == "qwen3_next" and ADDED.fullmatch(name)
            tensors[name] = moved + 1.0 if added else moved
            continue
        eight = name.endswith("mlp.gate.weight")
        if eight:
            settings[wrapper + module] = EIGHT
        parts, wide = packers.mlx(tensor.numpy(), *((8, 64) if eight else (4, 32)))
        meant[name] = torch.from_numpy(wide)
        if match:
            stacks.setdefault(stored, []).append((int(match[2]), parts))
            continue
        for own, rows in renamed(module, len(wide), family):
            tensors |= {f"{own}.{part}": torch.from_numpy(v[rows]) for part, v in parts.items()}
    for module, parts in stacks.items():
        whole = [each for _, each in sorted(parts, key=lambda one: one[0])]
        for part in whole[0]:
            tensors[f"{module}.{part}"] = torch.from_numpy(np.stack([one[part] for one in whole]))
    save_file(meant, plain / "model.safetensors")
    save_file(
        {wrapper + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    if wrapper:
        config = {"model_type": "gemma3", "text_config": config, "vision_config": {}}
        config["architectures"] = ["Gemma3ForConditionalGeneration"]
    config |= {"quantization": settings, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return FolderCheckpoint(folder), FolderCheckpoint(plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_and_logits_are_those_of_the_widened_folder(family, tmp_path, random):
    made, plain = written(tmp_path, family)
    assert made.names() == plain.names()
    added = family == "qwen3_next"
    for name in plain.names():
        expected = plain.tensor(name) + np.float32(added and bool(ADDED.fullmatch(name)))
        np.testing.assert_array_equal(made.tensor(name), expected, name)
    tokens = random.integers(0, tiny.VOCAB, 40)
    room = limits(tiny.VOCAB, context=made.architecture.context)
    ours, theirs = (logits_of(TorchExecutor(each, room), tokens) for each in (made, plain))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.skipif(available() is not None, reason="needs the compiled core")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_core_keeps_the_numbers(family, tmp_path, random):
    made, _ = written(tmp_path, family)
    tokens = random.integers(0, tiny.VOCAB, 40)
    core = CpuExecutor(made, limits(tiny.VOCAB, context=made.architecture.context), 2)
    assert "weights 4-bit integers with offsets as in the file" in core.describe()["dtype"]
    assert distance(logits_of(core, tokens), forward(made, tokens)) < SAME
    core.shutdown()


@pytest.mark.skipif(available() is not None, reason="needs the compiled core")
def test_what_mlx_moves_is_the_same_on_the_core(tmp_path, random):
    """Convolutions and norms of the same numbers under their usual names: the same bits."""
    made, _ = written(tmp_path, "qwen3_next")
    usual = shutil.copytree(made.path, tmp_path / "usual")
    plain, tensors = load_file(tmp_path / "plain" / "model.safetensors"), {}
    for name, tensor in load_file(usual / "model.safetensors").items():
        if ".switch_mlp." in name:
            tensors |= {
                name.replace("switch_mlp", f"experts.{expert}"): one.clone()
                for expert, one in enumerate(tensor)
            }
        else:
            packed = tensor.dtype == torch.uint32
            tensors[name] = tensor if packed else plain.get(name, tensor)
    save_file(tensors, usual / "model.safetensors")
    tokens, logits = random.integers(0, tiny.VOCAB, 40), []
    for source in (made, FolderCheckpoint(usual)):
        core = CpuExecutor(source, limits(tiny.VOCAB, context=source.architecture.context), 2)
        logits.append(logits_of(core, tokens))
        core.shutdown()
    np.testing.assert_array_equal(*logits)


def test_a_multimodal_folder(tmp_path):
    """Modules have another name in its settings, too."""
    made, plain = written(tmp_path, "gemma3_text", "language_model.")
    for name in plain.names():
        np.testing.assert_array_equal(made.tensor(name), plain.tensor(name))


def test_it_can_be_planned_without_its_weights(tmp_path):
    made, _ = written(tmp_path, "qwen3")
    (made.path / "model.safetensors").unlink()
    model = described(EngineConfig(model=str(made.path)))
    assert model.checkpoint.grouped("model.layers.0.mlp.up_proj.weight").kind == "int4"
