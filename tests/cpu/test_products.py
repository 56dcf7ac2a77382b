"""Products of packed weights: against NumPy, and plain C++ against this machine's instructions."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from forerun.checkpoints.grouped import GroupedRows
from forerun.executors.cpu import native
from forerun.executors.cpu.few_bits import rows_of_bytes, rows_of_tiles
from forerun.executors.cpu.levels import LEVELS, rows_of_levels
from tests.covering import every, some_of
from tests.cpu.reference import quantised

SOURCES = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2, "F32": 3, "F16": 4, "BF16": 5, "Q5_0": 11, "Q5_1": 12}
FLOATS = ("F32", "F16", "BF16")
K_QUANTS = {
    "Q4_K": (6, 144, slice(0, 4)),
    "Q5_K": (7, 176, slice(0, 4)),
    "Q6_K": (8, 210, slice(208, 210)),
    "IQ4_XS": (14, 136, slice(0, 2)),
    "Q3_K": (15, 110, slice(108, 110)),
    "Q2_K": (16, 84, slice(80, 84)),
    "IQ3_S": (17, 110, slice(0, 2)),
    "IQ2_XS": (18, 74, slice(0, 2)),
}
"""Number, bytes of a file's block of 256, and which of them are float16 scales."""


def stored(weight, kind):
    """The bytes a file would hold, and what they mean."""
    quant = GGMLQuantizationType[kind]
    raw = quantize(weight, quant)
    return np.ascontiguousarray(raw).view(np.uint8), dequantize(raw, quant)


FOUR_BITS = {"integers": 9, "MXFP4": 10, "IQ4_NL": 13}
"""4 bits that no type of ggml's quantisers writes."""

NUMBERS = SOURCES | FOUR_BITS | {name: entry[0] for name, entry in K_QUANTS.items()}
"""What csrc/quant.h calls each, `Source`."""


def four_bit_rows(random, kind, channels, inputs):
    """uint8[channels, bytes of a row], what it means, and its numbers as Q8_0, which holds them."""
    if kind == "MXFP4":
        raw = random.integers(0, 256, (channels, inputs // 32, 17), dtype=np.uint8)
        raw[..., 0] = random.integers(118, 130, raw.shape[:2])
        raw = raw.reshape(channels, -1)
        meant = dequantize(raw, GGMLQuantizationType["MXFP4"])
        groups = meant.reshape(channels, -1, 32)
        scale = np.exp2(raw.reshape(channels, -1, 17)[..., 0] - np.float32(128))
    elif kind == "IQ4_NL":
        raw = random.integers(0, 256, (channels, inputs // 32, 18), dtype=np.uint8)
        halves = random.uniform(0.001, 0.01, raw.shape[:2]).astype(np.float16)
        raw[..., :2] = halves[..., None].view(np.uint8)
        raw, scale = raw.reshape(channels, -1), halves.astype(np.float32)
        groups = dequantize(raw, GGMLQuantizationType["IQ4_NL"]).reshape(channels, -1, 32)
    else:
        group = 128
        scales = random.uniform(0.001, 0.01, (channels, inputs // group)).astype(np.float16)
        zeros = random.integers(0, 16, scales.shape, dtype=np.uint8)
        numbers = random.integers(0, 16, (channels, inputs), dtype=np.uint8)
        raw = rows_of_tiles(GroupedRows(numbers, scales, zeros))
        whole = (numbers.astype(np.float32) - np.repeat(zeros, group, 1)).reshape(channels, -1, 32)
        scale = np.repeat(scales, group // 32, 1).astype(np.float32)
        groups = whole * scale[..., None]
    eight = np.empty((channels, inputs // 32, 34), np.uint8)
    eight[..., :2] = scale.astype(np.float16)[..., None].view(np.uint8)
    eight[..., 2:] = np.rint(groups / scale[..., None]).astype(np.int8).view(np.uint8)
    return raw, groups.reshape(channels, inputs), eight.reshape(channels, -1)


GROUP_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24}
"""Kinds whose groups of 32 inputs have each a scale, and the bytes of one."""

INSTRUCTION_SETS = native.KERNELS[:-1]  # Compared with plain C++.


BECOMES = {"Q8_0": 2, "Q4_1": 1, "Q4_K": 3}


def as_source(kind, raw):
    """A file's rows as the core reads them."""
    return rows_of_levels(kind, raw) if kind in LEVELS else raw


def multiply(kernels, kind, raw, channels, x, becomes=None):
    """`becomes`: what floats are made, of BECOMES."""
    x = np.ascontiguousarray(x, np.float32)
    raw = as_source(kind, raw)
    out = np.full((len(x), channels), np.nan, np.float32)
    library = native.load()
    source = NUMBERS[kind]
    code = library.forerun_multiply(
        kernels.encode(),
        source,
        BECOMES[becomes] if becomes else library.forerun_own_format(source),
        raw.ctypes.data,
        channels,
        x.shape[1],
        x.ctypes.data,
        len(x),
        out.ctypes.data,
    )
    assert code == 0, library.forerun_error()
    return out


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("channels", "inputs"), [(16, 32), (40, 64), (33, 96), (192, 576)])
def test_equal_to_numpy(random, kind, channels, inputs):
    raw, weight = stored(random.standard_normal((channels, inputs)).astype(np.float32), kind)
    x = random.standard_normal((7, inputs)) * random.choice([1e-3, 1, 50], (7, 1))
    x = x.astype(np.float32)
    meets = x.astype(np.float64) if kind in FLOATS else quantised(x)
    product = multiply("", kind, raw, channels, x)
    size = np.abs(x) @ np.abs(weight.T)
    assert np.all(np.abs(product - meets @ weight.T) <= 2e-6 * size + 1e-30)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("becomes", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("inputs", [72, 95])
def test_floats_are_quantised_where_wanted(random, kind, becomes, inputs):
    raw, weight = stored(random.standard_normal((40, inputs)).astype(np.float32), kind)
    x = random.standard_normal((7, inputs)).astype(np.float32)
    kept = eight_bits(weight) if becomes == "Q8_0" else four_bits(weight)
    product = multiply("", kind, raw, 40, x, becomes)
    size = np.abs(x) @ np.abs(weight.T)
    assert np.all(np.abs(product - quantised(x) @ kept.T) <= 4e-6 * size + 1e-30)
    assert np.array_equal(product, multiply("portable", kind, raw, 40, x, becomes))


@pytest.mark.parametrize("kernels", ["", "portable"])
@pytest.mark.parametrize("kind", FLOATS)
def test_floats_are_added_in_the_order_that_is_written(random, kind, kernels):
    """Bit for bit: even inputs, odd inputs, each one rounding a step (float64 holds the product of
    two float32 exactly, and the sum with a third is rounded twice only where it is a near tie).
    """
    raw, weight = stored(random.standard_normal((19, 51)).astype(np.float32), kind)
    x = random.standard_normal((3, 51)).astype(np.float32)
    product = multiply(kernels, kind, raw, 19, x)
    sums = np.zeros((2, 3, 19), np.float32)
    for i in range(51):
        exact = x[:, i, None].astype(np.float64) * weight[:, i] + sums[i % 2]
        sums[i % 2] = exact.astype(np.float32)
    assert np.mean(product == sums[0] + sums[1]) > 0.95
    assert np.allclose(product, sums[0] + sums[1], rtol=1e-5, atol=1e-6)


def in_groups(weight):
    """Of 32, the last filled with zeros."""
    padded = np.zeros((len(weight), -(-weight.shape[1] // 32) * 32), np.float32)
    padded[:, : weight.shape[1]] = weight
    return padded.reshape(len(weight), -1, 32)


def as_half(values):
    return values.astype(np.float16).astype(np.float32)


def eight_bits(weight):
    """8 bits in groups of 32, the scale a half."""
    groups = in_groups(weight)
    scale = as_half(np.abs(groups).max(-1, keepdims=True) / np.float32(127))
    kept = np.clip(np.rint(groups / scale), -127, 127) * scale
    return kept.reshape(len(weight), -1)[:, : weight.shape[1]]


def four_bits(weight):
    """16 steps from the smallest number of a group to its largest, both ends halves."""
    groups = in_groups(weight)
    least = as_half(groups.min(-1, keepdims=True))
    scale = as_half((groups.max(-1, keepdims=True) - least) / np.float32(15))
    kept = np.clip(np.rint((groups - least) / scale), 0, 15) * scale + least
    return kept.reshape(len(weight), -1)[:, : weight.shape[1]]


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 64, 67])
def test_plain_code_gives_the_same_bits(random, kind, rows):
    raw, _ = stored(random.standard_normal((48, 160)).astype(np.float32), kind)
    x = random.standard_normal((rows, 160)) * np.exp(random.normal(0, 4, (rows, 160)))
    best = multiply("", kind, raw, 48, x)
    assert np.array_equal(best, multiply("portable", kind, raw, 48, x))
    # And a row's company does not matter.
    alone = np.concatenate([multiply("", kind, raw, 48, row[None]) for row in x])
    assert np.array_equal(best, alone)


def k_quantised(random, kind, channels, inputs):
    """uint8[channels, bytes of a row]"""
    _, size, at = K_QUANTS[kind]
    shape = (channels, inputs // 256)
    raw = random.integers(0, 256, (*shape, size), dtype=np.uint8)
    scales = random.uniform(0.001, 0.01, (*shape, (at.stop - at.start) // 2)).astype(np.float16)
    raw[..., at] = scales.view(np.uint8).reshape(*shape, -1)
    return raw.reshape(channels, -1)


def matrix_of(random, kind, channels, inputs):
    """uint8[channels, bytes of a row] of any kind."""
    if kind in K_QUANTS:
        return k_quantised(random, kind, channels, inputs)
    if kind in FOUR_BITS:
        return four_bit_rows(random, kind, channels, inputs)[0]
    return stored(random.standard_normal((channels, inputs)).astype(np.float32), kind)[0]


@pytest.mark.parametrize("kind", [*K_QUANTS, *FOUR_BITS])
def test_a_rows_company_does_not_matter(random, kind):
    """Of more rows than meet a tile at a time."""
    raw = matrix_of(random, kind, 40, 512)
    x = random.standard_normal((135, 512)).astype(np.float32)
    together = multiply("", kind, raw, 40, x)
    for row in (0, 3, 5, 63, 64, 70, 127, 128, 134):
        assert np.array_equal(together[row], multiply("", kind, raw, 40, x[row : row + 1])[0]), row


def groups_of(raw, kind):
    """Of each 32 inputs of a row's bytes: whole numbers int[channels, 32], and float32 scales and
    offsets [channels].
    """
    for body in np.split(raw, raw.shape[1] // GROUP_BYTES[kind], 1):
        halves = body[:, :4].copy().view(np.float16).astype(np.float32)
        scale = halves[:, 0]
        if kind == "Q8_0":
            yield body[:, 2:].view(np.int8).astype(np.int64), scale, 0 * scale
            continue
        nibbles = body[:, -16:]
        numbers = np.concatenate([nibbles & 15, nibbles >> 4], 1).astype(np.int64)
        if kind in ("Q5_0", "Q5_1"):
            fifths = np.unpackbits(body[:, -20:-16], axis=1, bitorder="little").astype(np.int64)
            numbers += 16 * fifths
        if kind == "Q5_0":
            yield numbers - 16, scale, 0 * scale
            continue
        yield numbers, scale, scale * np.float32(-8) if kind == "Q4_0" else halves[:, 1]


@pytest.mark.parametrize("kernels", ["", "portable"])
@pytest.mark.parametrize("kind", GROUP_BYTES)
def test_groups_are_added_in_the_order_that_is_written(random, kind, kernels):
    """Bit for bit, as matmul.inl begins: group after group, each product with a scale rounded once
    as it is added (in float64, as where floats are added).
    """
    x = random.standard_normal((3, 320)).astype(np.float32)
    raw = matrix_of(random, kind, 19, 320)
    acc, low = np.zeros((2, 3, 19), np.float32)
    for part, (q, scale, offset) in zip(np.split(x, 10, 1), groups_of(raw, kind), strict=True):
        largest = np.abs(part).max(1)
        factor = largest / np.float32(127)
        numbers = np.rint(part * (np.float32(127) / largest)[:, None]).astype(np.int64)
        scales = (scale * factor[:, None]).astype(np.float64)
        acc = (scales * (numbers @ q.T) + acc).astype(np.float32)
        sums = (factor * numbers.sum(1).astype(np.float32)).astype(np.float64)
        low = (sums[:, None] * offset + low).astype(np.float32)
    product = multiply(kernels, kind, raw, 19, x)
    assert np.mean(product == (acc if kind in ("Q8_0", "Q5_0") else acc + low)) > 0.95


@pytest.mark.parametrize("kernels", ["", "portable"])
@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants(random, kind, kernels):
    """Any bytes are such a matrix; the halves of scales are made modest ones."""
    raw = k_quantised(random, kind, 40, 512)
    weight = dequantize(raw, GGMLQuantizationType[kind])
    x = random.standard_normal((5, 512))
    expected = quantised(x.astype(np.float32)) @ weight.T.astype(np.float64)
    product = multiply(kernels, kind, raw, 40, x)
    # The two parts of a weight with an offset are added up apart.
    size = np.abs(x).sum(-1, keepdims=True) * 0.01 * 64 * 63
    assert np.all(np.abs(product - expected) <= 2e-6 * size)


@pytest.mark.parametrize("kernels", ["", "portable"])
@pytest.mark.parametrize("kind", FOUR_BITS)
def test_four_bits_that_ggml_does_not_write(random, kind, kernels):
    raw, weight, eight = four_bit_rows(random, kind, 40, 512)
    x = random.standard_normal((5, 512)).astype(np.float32)
    product = multiply(kernels, kind, raw, 40, x)
    # The two parts of a weight with a zero point are added up apart.
    size = np.abs(x).sum(-1, keepdims=True) * np.abs(weight).max() * 2
    assert np.all(np.abs(product - quantised(x) @ weight.T.astype(np.float64)) <= 2e-6 * size)
    if kind != "integers":  # The same integers, and the same order of float32.
        assert np.array_equal(product, multiply(kernels, "Q8_0", eight, 40, x))


def test_small_groups_of_integers_are_the_same_numbers_in_eight_bits(random):
    for group in (32, 64):
        scales = random.uniform(0.001, 0.01, (24, 256 // group)).astype(np.float16)
        zeros = random.integers(0, 16, scales.shape, dtype=np.uint8)
        numbers = random.integers(0, 16, (24, 256), dtype=np.uint8)
        rows = rows_of_bytes(GroupedRows(numbers, scales, zeros))
        meant = numbers.astype(np.float32) - np.repeat(zeros, group, 1)
        meant *= np.repeat(scales, group, 1).astype(np.float32)
        assert np.array_equal(dequantize(rows, GGMLQuantizationType["Q8_0"]), meant)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_extreme_integers_do_not_overflow(random, kind):
    """Every weight and activation at the end of its range, signs at random or all alike."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    payload = 32 if kind == "Q8_0" else 16
    for fill in ("alike", "random"):
        raw = np.zeros((16, 4, size), np.uint8)
        raw[..., :2] = np.array([1.0], np.float16).view(np.uint8)
        ends = [0x80, 0x7F] if kind == "Q8_0" else [0xFF, 0xF0, 0x0F, 0x00]
        choice = random.integers(0, len(ends), (16, 4, payload))
        raw[..., -payload:] = np.array(ends, np.uint8)[choice if fill == "random" else choice * 0]
        x = random.choice([-1.0, 1.0], (4, 128)) if fill == "random" else np.ones((4, 128))
        flat = np.ascontiguousarray(raw.reshape(16, -1))
        weight = dequantize(flat, GGMLQuantizationType[kind]).astype(np.float64)
        product = multiply("", kind, flat, 16, x)
        assert np.allclose(product, x @ weight.T, rtol=1e-5, atol=1e-3)
        assert np.array_equal(product, multiply("portable", kind, flat, 16, x))


@pytest.mark.parametrize("kernels", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", [*K_QUANTS, "MXFP4"])
@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_extreme_integers_that_are_spread_do_not_overflow(random, kernels, kind, fill):
    """Rows few and many, whose sums are made in ways of their own."""
    if native.kernels(kernels) is None:
        pytest.skip(f"this machine or this build has no {kernels}")
    if kind == "MXFP4":
        raw = np.full((16, 8, 17), 0x77 if fill else 0xFF, np.uint8)  # 12 and -12
        raw[..., 0] = 127
    else:
        _, size, at = K_QUANTS[kind]
        raw = np.full((16, 1, size), fill, np.uint8)
        raw[..., at] = np.full((at.stop - at.start) // 2, 1e-3, np.float16).view(np.uint8)
    raw = raw.reshape(16, -1)
    weight = dequantize(raw, GGMLQuantizationType[kind]).astype(np.float64)
    for x in (np.ones((12, 256)), -np.ones((4, 256)), random.choice([-1.0, 1.0], (12, 256))):
        product = multiply(kernels, kind, raw, 16, x)
        assert np.allclose(product, x @ weight.T, rtol=1e-5, atol=1e-3)
        assert np.array_equal(product, multiply("portable", kind, raw, 16, x))


@pytest.mark.parametrize("kernels", ["", "portable"])
def test_every_half_is_read_as_ieee_says(kernels):
    """All 65,536 halves as scales of a Q8_0 matrix, one per (channel, group)."""
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(4096, 16)
    raw = np.zeros((4096, 16, 34), np.uint8)
    raw[..., :2] = halves[..., None].view(np.uint8).reshape(4096, 16, 2)
    raw[..., 2] = 1
    x = np.zeros((16, 512), np.float32)
    x[np.arange(16), np.arange(16) * 32] = 127.0  # scale 1, q = 127
    product = multiply(kernels, "Q8_0", raw.reshape(4096, -1), 4096, x)
    with np.errstate(invalid="ignore"):
        expected = halves.view(np.float16).astype(np.float32).T * np.float32(127)
    finite = np.isfinite(expected).all(0)
    assert finite.sum() > 3800
    assert np.array_equal(product[:, finite], expected[:, finite])
    assert not np.isfinite(product[:, ~finite]).all(0).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_says_so_and_spares_the_others(random, bad):
    raw, _ = stored(random.standard_normal((32, 64)).astype(np.float32), "Q4_0")
    x = random.standard_normal((4, 64)).astype(np.float32)
    clean = multiply("", "Q4_0", raw, 32, x)
    x[2, 40] = bad
    for kernels in ("", "portable"):
        product = multiply(kernels, "Q4_0", raw, 32, x)
        assert np.isnan(product[2]).all()
        assert np.array_equal(np.delete(product, 2, 0), np.delete(clean, 2, 0))


def test_zeros_and_the_smallest_numbers(random):
    raw, _ = stored(random.standard_normal((32, 64)).astype(np.float32), "Q8_0")
    x = np.stack([np.zeros(64), np.full(64, 1e-42), np.full(64, 1e-25)]).astype(np.float32)
    product = multiply("", "Q8_0", raw, 32, x)
    assert np.array_equal(product[:2], np.zeros((2, 32), np.float32))
    assert np.isfinite(product).all() and np.abs(product[2]).max() > 0
    assert np.array_equal(product, multiply("portable", "Q8_0", raw, 32, x))


def test_kernels_are_chosen_by_name():
    assert native.kernels("portable") == "portable"
    assert native.kernels("none such") is None
    assert native.kernels() in ("portable", *INSTRUCTION_SETS)


@pytest.mark.parametrize(
    ("kernels", "kind", "shape"),
    some_of(
        every(
            INSTRUCTION_SETS, [*SOURCES, *K_QUANTS, *FOUR_BITS], [(33, 512), (16, 256), (100, 256)]
        )
    ),
)
def test_every_instruction_set_gives_the_bits_of_plain_code(random, kernels, kind, shape):
    """For every number of rows that is treated in a way of its own, and full and cut blocks."""
    if native.kernels(kernels) is None:
        pytest.skip(f"this machine or this build has no {kernels}")
    channels, inputs = shape
    raw = matrix_of(random, kind, channels, inputs)
    for rows in (*range(1, 18), 31, 64, 65, 67, 72, 130):
        x = random.standard_normal((rows, inputs)) * np.exp(random.normal(0, 3, (rows, inputs)))
        x[rows // 2, 7] = np.nan if rows % 5 == 3 else 1.0
        plain, product = (multiply(name, kind, raw, channels, x) for name in ("portable", kernels))
        same = (plain.view(np.uint32) == product.view(np.uint32)) | (
            np.isnan(plain) & np.isnan(product)
        )
        assert same.all(), rows
