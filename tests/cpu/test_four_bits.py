"""Folders of GPTQ, AWQ and pack-quantized matrices on the compiled core: the file's own numbers."""

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.executors.cpu.few_bits import TILE
from forerun.options.config import EngineConfig
from tests.covering import every, some_of, values
from tests.cpu.reference import forward
from tests.cpu.test_logits import SAME, distance, logits_of
from tests.models import packers, tiny
from tests.models.test_quantised import AWQ, GPTQ, GROUP, Q, compressed, shuffled
from tests.models.test_quantised import FORMATS as FORMATS_OF_FOLDERS

WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 32}
FORMATS = {
    "awq": lambda group: (AWQ | {"group_size": group}, lambda w: packers.awq(w, group)),
    "gptq": lambda group: (GPTQ | {"group_size": group}, lambda w: packers.gptq(w, group=group)),
    "packed": lambda group: (
        compressed("pack-quantized", **GROUP | {"group_size": group}),
        lambda w: packers.packed(w, group=group),
    ),
}


def saved(path, name, group, family="llama", **changes):
    settings, pack = FORMATS[name](group)
    folder = tiny.save_folder(tiny.model(family, **WIDE | changes), path / "tiny")
    packers.quantise(folder, settings, pack)
    return FolderCheckpoint(folder)


@pytest.mark.parametrize(
    ("group", "name"), [*some_of(every([128, 32], FORMATS), values), (2 * TILE, "awq")]
)
def test_logits_are_those_of_the_files_numbers(executor, random, tmp_path, name, group):
    """Groups of several tiles keep their scales, too."""
    source = saved(tmp_path, name, group, intermediate_size=512)
    made = executor(source, 2)
    small = " in groups below 128 as the same numbers in 8 bits"
    kept = " as in the file" if group % TILE == 0 else small
    assert f"4-bit integers{kept}" in made.describe()["dtype"]
    tokens = random.integers(0, tiny.VOCAB, 60)
    logits = logits_of(made, tokens)
    assert distance(logits, forward(source, tokens)) < SAME
    assert np.array_equal(logits, logits_of(executor(source, kernels="portable"), tokens))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("mlx", "4-bit integers with offsets as in the file"),
        ("mlx-3", "4-bit integers with offsets as in the file"),
        ("mlx-5", "5-bit integers with offsets as in the file"),
        ("mlx-8", "few bits made q8_0"),
        ("mlx-mxfp4", "MXFP4 as in the file"),
        ("compressed-mxfp4", "MXFP4 as in the file"),
        ("compressed-nvfp4", "few bits made q8_0"),
        ("modelopt-mxfp8", "few bits made q8_0"),
    ],
)
def test_other_small_numbers(executor, random, tmp_path, name, kept):
    folder = tiny.save_folder(tiny.model("llama", **WIDE | {"intermediate_size": 512}), tmp_path)
    packers.quantise(folder, *FORMATS_OF_FOLDERS[name])
    source = FolderCheckpoint(folder)
    made = executor(source, 2)
    assert f"weights {kept}, activations" in made.describe()["dtype"]
    tokens = random.integers(0, tiny.VOCAB, 60)
    logits = logits_of(made, tokens)
    assert distance(logits, forward(source, tokens)) < SAME
    assert np.array_equal(logits, logits_of(executor(source, kernels="portable"), tokens))


def test_scales_that_float16_has_not_are_rounded_and_said_to_be(tmp_path, executor, random):
    folder = tiny.save_folder(tiny.model("llama", **WIDE), tmp_path / "tiny")
    packers.quantise(folder, *FORMATS_OF_FOLDERS["mlx"])
    tensors = load_file(folder / "model.safetensors")
    for part in ("scales", "biases"):
        tensors[f"{Q}.{part}"] = tensors[f"{Q}.{part}"].float()
    tensors[f"{Q}.scales"][3, 5] = 1e-7
    save_file(tensors, folder / "model.safetensors")
    source = FolderCheckpoint(folder)
    made, tokens = executor(source), random.integers(0, tiny.VOCAB, 40)
    assert "4-bit integers with offsets, some scales rounded, act" in made.describe()["dtype"]
    assert distance(logits_of(made, tokens), forward(source, tokens)) < SAME


def test_they_take_as_many_bytes_as_in_the_file(tmp_path, executor):
    """Of 128 weights 64 bytes, a half and a zero point, filled up to 68; floats as they are."""
    source = saved(tmp_path, "awq", 128)
    names = [name for name in source.names() if source.grouped(name)]
    assert len(names) == 14
    few = sum(np.prod(source.shape(name)) for name in names) // 128 * 68
    floats = sum(4 * np.prod(source.shape(name)) for name in source.names() if name not in names)
    assert executor(source).describe()["weight_bytes"] == pytest.approx(few + floats, rel=0.02)


def test_columns_in_any_order_are_rounded_anew_and_said_to_be(tmp_path, executor, random):
    folder = tiny.save_folder(tiny.model("llama", **WIDE), tmp_path / "tiny")
    settings = GPTQ | {"group_size": 128, "desc_act": True}
    packers.quantise(folder, settings, lambda w: packers.gptq(w, group=128, order=shuffled(w)))
    source = FolderCheckpoint(folder)
    made = executor(source)
    assert "few bits made q8_0" in made.describe()["dtype"]
    tokens = random.integers(0, tiny.VOCAB, 40)
    assert distance(logits_of(made, tokens), forward(source, tokens)) < SAME


def test_the_start_says_what_they_are_here(tmp_path):
    source = saved(tmp_path, "awq", 128)
    for kind, said in (("cpu", r"AWQ.*4-bit integers as in the file"), ("torch", "are widened")):
        config = EngineConfig(model=str(source.path), executor=kind, speculative_algorithm="NONE")
        with pytest.warns(UserWarning, match=said):
            open_target(config).close()
