"""The instructions for pairs of triton_few_bits, played one after the other: what they make of
every byte. What the interpreter runs in their place, and a device, are held to the references
elsewhere.
"""

import re

import numpy as np
import pytest
import torch

from tests.parity.interpreted import load

kernels = load("triton.triton_few_bits")
BYTES = np.arange(256, dtype=np.uint32).reshape(64, 4)


def permuted(first, second, selector):
    """prmt: four of the eight bytes of two words."""
    both = [first >> 8 * place & 0xFF for place in range(4)]
    both += [second >> 8 * place & 0xFF for place in range(4)]
    return sum(both[selector >> 4 * place & 7] << 8 * place for place in range(4))


def times_in_pairs(first, second):
    """fma of two bfloat16 in a word each, to which nothing (-0) is added."""
    words = torch.from_numpy(np.array([first, second], np.uint32).view(np.int32))
    left, right = words.view(torch.bfloat16).view(2, 2)
    return int((left * right).view(torch.int32)) & 0xFFFFFFFF


STEPS = {
    "prmt": permuted,
    "shr": lambda word, by: word >> by,
    "and": lambda word, mask: word & mask,
    "lop3": lambda a, b, c, table: {0xEA: (a & b) | c}[table],
    "mov": lambda word: word,
    "fma": lambda a, b, c: {0x80008000: times_in_pairs(a, b)}[c],
}


def played(asm, outputs, word):
    """The words that `asm` leaves in its outputs $0, $1, ... of one in the register behind them."""
    registers = {f"${outputs}": int(word)}
    for line in re.findall(r"^\s*(\w+[\w.]*\s.*);$", asm, re.MULTILINE):
        name, rest = line.strip().split(None, 1)
        if name == ".reg":
            continue
        place, *words = rest.split(", ")
        values = [registers[w] if w in registers else int(w, 0) for w in words]
        registers[place] = STEPS[name.split(".")[0]](*values)
    return [registers[f"${place}"] for place in range(outputs)]


def numbers(asm, outputs, dtype):
    """float64[64,outputs*2]: of every four bytes what is in the outputs' halves."""
    raw = BYTES[:, 0] | BYTES[:, 1] << 8 | BYTES[:, 2] << 16 | BYTES[:, 3] << 24
    words = np.array([played(asm.value, outputs, word) for word in raw], np.uint32)
    return torch.from_numpy(words.view(np.int16).copy()).view(dtype).double().numpy()


@pytest.mark.parametrize(
    ("asm", "dtype", "more"),
    [("_HALVES_BF16", torch.bfloat16, 128), ("_HALVES_FP16", torch.float16, 1024)],
)
def test_four_bits_are_in_the_last_places(asm, dtype, more):
    actual = numbers(getattr(kernels, asm), 4, dtype)
    assert np.array_equal(actual[:, :4], (BYTES & 15) + more)
    assert np.array_equal(actual[:, 4:], (BYTES >> 4) + more)


@pytest.mark.parametrize(
    ("asm", "dtype", "less"),
    [("_FLOATS_BF16", torch.bfloat16, 1), ("_FLOATS_FP16", torch.float16, 256)],
)
def test_float8_is_what_it_is(asm, dtype, less):
    """All numbers of E4M3 but its two NaN."""
    actual = numbers(getattr(kernels, asm), 2, dtype) * less
    expected = torch.from_numpy(BYTES.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
    there = np.isfinite(expected)
    assert there.sum() == 254
    assert np.array_equal(actual[there], expected[there])
    assert np.array_equal(np.signbit(actual[there]), np.signbit(expected[there]))
