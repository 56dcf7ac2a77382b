"""The table of ggml's storage types against the gguf package, and that nothing else needs it."""

import subprocess
import sys

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL, dequantize

from forerun.checkpoints.ggml import IQ4_NL_LEVELS, NAMES, STORAGE, UNREADABLE, floats_of


def test_the_table_is_that_of_the_package():
    theirs = {kind.name: (int(kind), *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert {name: tuple(storage) for name, storage in STORAGE.items()} == theirs
    assert {name: number for number, name in NAMES.items()} == {
        name: storage.number for name, storage in STORAGE.items()
    }
    assert tuple(IQ4_NL.kvalues) == IQ4_NL_LEVELS


@pytest.mark.parametrize("kind", GGMLQuantizationType, ids=lambda kind: kind.name)
def test_what_cannot_be_read_is_what_the_package_cannot_turn_into_floats(kind):
    block = np.zeros((1, STORAGE[kind.name].size), np.uint8)
    if kind.name in UNREADABLE:
        with pytest.raises((NotImplementedError, KeyError)):
            dequantize(block, kind)
    else:
        assert dequantize(block, kind).shape == (1, STORAGE[kind.name].block)


def test_half_floats_are_those_of_the_package():
    rows = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(4, -1)
    theirs = dequantize(rows, GGMLQuantizationType.F16)
    assert np.array_equal(floats_of("F16", rows), theirs, equal_nan=True)


@pytest.mark.model
def test_the_default_model_loads_without_the_package():
    program = (
        "import sys; from forerun.client.llm import LLM; llm = LLM(context=256);"
        "told = llm.generate('Hi', max_tokens=2, ignore_eos=True);"
        "print(len(told[0].tokens), 'gguf' in sys.modules);"
        "llm.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, text=True
    )
    assert done.stdout.split() == ["2", "False"], done.stderr
