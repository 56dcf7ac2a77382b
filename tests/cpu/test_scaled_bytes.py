"""Storage whose numbers are whole ones times a half of each block: the core has them in bytes."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.executors.cpu.few_bits import SCALED_BYTES, as_bytes
from tests.cpu.test_logits import SAME, distance, logits_of
from tests.cpu.twin import forward
from tests.models import tiny

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def blocks(kind, rows, columns, random):
    """Rows of random blocks, each with a scale that is small enough for logits."""
    made = random.integers(0, 256, (rows, columns // 32, SCALED_BYTES[kind]), np.uint8)
    scales = (random.standard_normal(made.shape[:2]) / columns).astype("<f2")
    made[..., :2] = scales[..., None].view(np.uint8)
    return made.reshape(rows, -1)


@pytest.mark.parametrize("kind", SCALED_BYTES)
def test_every_number_is_the_same_bit_for_bit(kind, random):
    ggml = gguf.GGMLQuantizationType[kind]
    rows = blocks(kind, 40, 96, random)
    rows[0, :2] = np.float16(np.finfo(np.float16).smallest_subnormal).reshape(1).view(np.uint8)
    rows[1, 2:] = 0
    rows[2, 2:] = 255
    expected = dequantize(rows, ggml)
    found = dequantize(as_bytes(kind, rows), Q8_0)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    strided = np.repeat(rows, 2, 0)[::2]
    np.testing.assert_array_equal(as_bytes(kind, strided), as_bytes(kind, rows))


@pytest.mark.parametrize("kind", SCALED_BYTES)
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
            name: (each if stored == kind else as_bytes(kind, each), ggml)
            for name, each in raw.items()
        }
        paths[stored] = tiny.write_gguf(hf, tmp_path / f"{stored}.gguf", stored=rows)
    source, same = (GgufCheckpoint(path) for path in paths.values())
    tokens = random.integers(0, tiny.VOCAB, 40)
    made = executor(source, 2)
    assert f"{kind} as the same numbers in 8 bits" in made.describe()["dtype"]
    found = logits_of(made, tokens)
    assert np.array_equal(found, logits_of(executor(same, 2), tokens))
    assert np.array_equal(found, logits_of(executor(source, kernels="portable"), tokens))
    assert distance(found, forward(source, tokens)) < SAME


def test_what_is_rounded_loses_nothing_more_than_its_own_steps(random):
    """By largest / 127 a block of Q5_0 had an error of .5 percent; now it has none."""
    values = random.standard_normal((64, 256)).astype(np.float32)
    rows = quantize(values, gguf.GGMLQuantizationType.Q5_0)
    meant = dequantize(rows, gguf.GGMLQuantizationType.Q5_0)
    rounded = dequantize(quantize(meant, Q8_0), Q8_0)
    kept = dequantize(as_bytes("Q5_0", rows), Q8_0)
    assert np.array_equal(kept, meant) and not np.array_equal(rounded, meant)
