"""Codebook and ternary types, which become places in a table or Q4_0: the very same numbers."""

import gguf
import numpy as np
import pytest

from forerun.checkpoints.ggml import STORAGE, floats_of
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.executors.cpu import levels, packed_bytes
from forerun.executors.cpu.levels import LEVELS, TERNARY, rows_of_levels, rows_of_q4_0
from tests.cpu.reference import forward
from tests.cpu.test_logits import SAME, distance, logits_of
from tests.models import tiny


def blocks(random, kind, shape):
    """Random rows whose numbers are finite, and small enough for a model's logits."""
    storage = STORAGE[kind]
    made = random.integers(0, 256, (shape[0], shape[1] // storage.block, storage.size), np.uint8)
    at = slice(-2, None) if kind.startswith("TQ") else slice(0, 2)
    largest = 31 * np.abs(LEVELS.get(kind, [2])).max()
    scales = (random.standard_normal(made.shape[:2]) / largest / shape[1] ** 0.5).astype("<f2")
    if kind == "IQ1_M":
        bits = scales.view("<u2")[..., None] >> np.array([0, 4, 8, 12], np.uint16) << 12
        words = made[..., 48:].copy().view("<u2") & 0xFFF | bits
        made[..., 48:] = words.astype("<u2").view(np.uint8)
    else:
        made[..., at] = scales[..., None].view(np.uint8)
    return made.reshape(shape[0], -1)


def numbers_of(rows):
    """What rows of blocks with tables mean, as csrc/quant.h says."""
    block = rows.reshape(-1, 166)
    unit, table = block[:, 2:6].copy().view("<f4"), block[:, 6:22].view(np.int8)
    scale = np.repeat(block[:, 22:38].astype("f4"), 16, 1) * block[:, :2].copy().view("<f2")
    pairs = block[:, 38:].reshape(-1, 8, 1, 16)
    places = np.concatenate([pairs & 15, pairs >> 4], 2).reshape(len(block), 256)
    meant = unit * scale * np.take_along_axis(table, places.astype(int), 1)
    return meant.reshape(len(rows), -1)


@pytest.mark.parametrize("kind", [*LEVELS, *TERNARY])
def test_the_numbers_are_the_files(random, kind, monkeypatch):
    """Any bytes are such rows; a few blocks at a time."""
    monkeypatch.setattr(levels, "_BLOCKS_AT_ONCE", 5)
    rows = blocks(random, kind, (6, 768))
    given = rows.copy()
    if kind in LEVELS:
        meant = numbers_of(rows_of_levels(kind, rows))
    else:
        meant = floats_of("Q4_0", rows_of_q4_0(kind, rows))
    assert np.array_equal(meant, floats_of(kind, given))
    assert np.array_equal(rows, given)


@pytest.mark.parametrize("kind", ["IQ1_M", "IQ3_XXS", "TQ2_0"])
def test_logits_are_those_of_the_files_numbers(kind, random, tmp_path, executor):
    hf = tiny.model("llama", hidden_size=256, intermediate_size=256)
    ggml = gguf.GGMLQuantizationType[kind]
    stored = {
        name: (blocks(random, kind, array.shape), ggml)
        for name, array in tiny.weights(hf).items()
        if array.ndim == 2 and array.shape[1] % 256 == 0
    }
    source = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", "Q8_0", stored=stored))
    tokens = random.integers(0, tiny.VOCAB, 40)
    made = executor(source, 2)
    described = made.describe()["dtype"]
    assert kind in described and "made" not in described
    logits = logits_of(made, tokens)
    assert np.array_equal(logits, logits_of(executor(source, kernels="portable"), tokens))
    assert distance(logits, forward(source, tokens)) < SAME
    assert packed_bytes(source, "file") < 0.7 * source.architecture.parameters
