"""Storage whose numbers are whole ones times a half of each block: the same as Q8_0's."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.executors.cpu.few_bits import rows_of_levels
from tests.cpu.reference import forward
from tests.cpu.test_logits import SAME, distance, logits_of
from tests.models import tiny

Q8_0 = gguf.GGMLQuantizationType.Q8_0
BLOCK_BYTES = {"Q5_0": 22, "IQ4_NL": 18}
REPORTED = {"Q5_0": "Q5_0 as in the file", "IQ4_NL": "IQ4_NL as the same numbers in 8 bits"}


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


def test_every_level_is_the_same_bit_for_bit(random):
    rows = blocks("IQ4_NL", 40, 96, random)
    rows[0, :2] = np.float16(np.finfo(np.float16).smallest_subnormal).reshape(1).view(np.uint8)
    rows[1, 2:] = 0
    rows[2, 2:] = 255
    expected = dequantize(rows, gguf.GGMLQuantizationType.IQ4_NL)
    actual = dequantize(rows_of_levels(rows), Q8_0)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))
    strided = np.repeat(rows, 2, 0)[::2]
    np.testing.assert_array_equal(rows_of_levels(strided), rows_of_levels(rows))


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
    assert REPORTED[kind] in made.describe()["dtype"]
    logits = logits_of(made, tokens)
    assert np.array_equal(logits, logits_of(executor(same, 2), tokens))
    assert np.array_equal(logits, logits_of(executor(source, kernels="portable"), tokens))
    assert distance(logits, forward(source, tokens)) < SAME
