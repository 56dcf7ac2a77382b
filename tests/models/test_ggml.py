"""The table of ggml's storage types against the gguf package, and that nothing else needs it."""

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from forerun.checkpoints.ggml import NAMES, STORAGE, UNREADABLE, floats_of
from tests.worlds.servers import run_program


def test_the_table_is_that_of_the_package():
    theirs = {kind.name: (int(kind), *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    ours = {name: tuple(storage) for name, storage in STORAGE.items()}
    assert ours == {"Q2_0": (42, 64, 18)} | theirs  # The newest, which gguf 0.19 lacks.
    assert {name: number for number, name in NAMES.items()} == {
        name: storage.number for name, storage in STORAGE.items()
    }


@pytest.mark.parametrize("kind", GGMLQuantizationType, ids=lambda kind: kind.name)
def test_what_cannot_be_read_is_what_the_package_cannot_turn_into_floats(kind):
    block = np.zeros((1, STORAGE[kind.name].size), np.uint8)
    if kind.name in UNREADABLE:
        with pytest.raises((NotImplementedError, KeyError)):
            dequantize(block, kind)
    elif kind.name != "Q1_0":
        assert dequantize(block, kind).shape == (1, STORAGE[kind.name].block)


@pytest.mark.parametrize(
    ("kind", "bits", "levels"), [("Q1_0", 1, (-1, 1)), ("Q2_0", 2, range(-1, 3))]
)
def test_numbers_of_one_and_two_bits_are_ggmls(kind, bits, levels):
    """Number by number, as `dequantize_row_q1_0` and `_q2_0` of ggml-quants.c have them."""
    storage, scale = STORAGE[kind], np.float16(0.37)
    packed = np.random.default_rng(0).integers(0, 256, (3, 2, storage.size), np.uint8)
    packed[..., :2] = np.array([scale]).view(np.uint8)
    values = floats_of(kind, packed.reshape(3, -1)).reshape(6, storage.block)
    for row, block in zip(values, packed.reshape(6, -1), strict=True):
        for place, number in enumerate(row):
            byte, shift = divmod(place * bits, 8)
            code = block[2 + byte] >> shift & (1 << bits) - 1
            assert number == np.float32(levels[code]) * np.float32(scale)


def test_half_floats_are_those_of_the_package():
    rows = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(4, -1)
    theirs = dequantize(rows, GGMLQuantizationType.F16)
    assert np.array_equal(floats_of("F16", rows), theirs, equal_nan=True)


@pytest.mark.model
def test_the_default_model_loads_without_the_package():
    program = (
        "import sys; from forerun.client.llm import LLM; llm = LLM(context=256);"
        "answers = llm.generate('Hi', max_tokens=2, ignore_eos=True);"
        "print(len(answers[0].tokens), 'gguf' in sys.modules);"
        "llm.close()"
    )
    done = run_program(program)
    assert done.stdout.split() == ["2", "False"], done.stderr
