"""Storage whose numbers are whole ones times a half of each block: the same as Q8_0's."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from forerun.checkpoints.gguf.file import GgufCheckpoint
from tests.cpu.reference import forward
from tests.cpu.test_logits import SAME, distance, logits_of
from tests.models import tiny

BLOCK_BYTES = {"Q5_0": 22, "IQ4_NL": 18}


def blocks(kind, rows, columns, random):
    """Rows of random blocks, each with a scale that is small enough for logits."""
    made = random.integers(0, 256, (rows, columns // 32, BLOCK_BYTES[kind]), np.uint8)
    scales = (random.standard_normal(made.shape[:2]) / columns).astype("<f2")
    made[..., :2] = scales[..., None].view(np.uint8)
    return made.reshape(rows, -1)


def in_q8_0(kind, rows):
    """The same numbers as Q8_0, by their meaning."""
    made = rows.reshape(len(rows), -1, BLOCK_BYTES[kind])
    scales = made[..., :2].copy().view("<f2")
    with np.errstate(invalid="ignore", divide="ignore"):
        meant = dequantize(rows, gguf.GGMLQuantizationType[kind]).reshape(*made.shape[:2], 32)
        numbers = np.rint(meant / scales.astype(np.float32))
    whole = np.nan_to_num(numbers).astype(np.int8).view(np.uint8)
    return np.concatenate([scales.view(np.uint8), whole], -1).reshape(len(rows), -1)


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_logits_are_those_of_the_same_numbers_in_q8_0(kind, random, tmp_path, executor):
    hf = tiny.model("llama")
    raw = {
        name: blocks(kind, *array.shape, random)
        for name, array in tiny.weights(hf).items()
        if array.ndim == 2
    }
    paths = {}
    for stored in (kind, "Q8_0"):
        ggml = gguf.GGMLQuantizationType[stored]
        rows = {
            name: (each if stored == kind else in_q8_0(kind, each), ggml)
            for name, each in raw.items()
        }
        paths[stored] = tiny.write_gguf(hf, tmp_path / f"{stored}.gguf", stored=rows)
    source, same = (GgufCheckpoint(path) for path in paths.values())
    tokens = random.integers(0, tiny.VOCAB, 40)
    made = executor(source, 2)
    assert f"{kind} as in the file" in made.describe()["dtype"]
    logits = logits_of(made, tokens)
    assert np.array_equal(logits, logits_of(executor(same, 2), tokens))
    assert np.array_equal(logits, logits_of(executor(source, kernels="portable"), tokens))
    assert distance(logits, forward(source, tokens)) < SAME
