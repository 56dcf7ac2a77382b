"""Floats made Q4_K on load: the bytes of the rule in NumPy, and what a folder then is."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from forerun.build.registry import EXECUTORS
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.executors.cpu import CpuExecutor, native
from forerun.options.config import EngineConfig
from tests.cpu.test_logits import distance, fp32, logits_of
from tests.cpu.test_products import SOURCES, multiply, stored
from tests.models import tiny
from tests.parity.driver import limits
from tests.references.q4_k import quantise

Q4_K = GGMLQuantizationType["Q4_K"]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


def weights(random, kind, rows=33, inputs=512):
    """float32[rows, inputs] that the rule has to look at twice."""
    plain = random.standard_normal((rows, inputs)).astype(np.float32)
    if kind == "long tails":
        plain = random.standard_t(2, plain.shape).astype(np.float32)
    if kind == "positive":
        plain = np.abs(plain) + np.float32(0.1)
    if kind == "mostly zero":
        plain *= random.random(plain.shape) < 0.03
        plain[:, :96] = 0
    if kind == "a few values":
        plain = np.float32(0.25) * np.rint(plain)
    return plain * np.float32(0.02)


KINDS = ("normal", "long tails", "positive", "mostly zero", "a few values")


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_the_oracles(random, kind):
    """A product of both is the same to the bit: so are their tiles, whatever is multiplied."""
    weight = weights(random, kind)
    raw = quantise(weight)
    unit = np.eye(512, dtype=np.float32)
    expected = multiply("", "Q4_K", raw, len(weight), unit)
    made = multiply("", "F32", weight.view(np.uint8), len(weight), unit, "Q4_K")
    assert np.array_equal(made.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_halves_become_what_their_numbers_do(random, kind):
    raw, meant = stored(weights(random, "normal", 16, 256), kind)
    x = random.standard_normal((3, 256)).astype(np.float32)
    expected = multiply("", "Q4_K", quantise(meant), 16, x)
    assert np.array_equal(multiply("", kind, raw, 16, x, "Q4_K"), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_is_better_than_what_spans_each_group(random, kind):
    """Against 16 steps from the smallest number, or 0, to the largest of 32, with exact scales: 6
    bits of a scale cost less than looking for the best one wins, but where few values repeat.
    """
    weight = weights(random, kind, 16, 512)
    groups = weight.reshape(-1, 32)
    low, high = np.minimum(groups.min(1), 0)[:, None], groups.max(1)[:, None]
    step = np.where(high > low, (high - low) / 15, 1)
    spanned = (np.rint((groups - low) / step) * step + low).reshape(weight.shape)
    values = dequantize(quantise(weight), Q4_K)
    size = np.square(weight).sum()
    worst = 1.2 if kind == "a few values" else 1.0
    assert np.square(values - weight).sum() <= worst * np.square(spanned - weight).sum()
    assert np.square(values - weight).sum() < 0.02 * size


def test_what_is_not_finite_is_noticed(random):
    weight = weights(random, "normal", 16, 256)
    weight[5, 7], weight[6, 9] = np.nan, np.inf
    unit = np.eye(256, dtype=np.float32)
    made = multiply("", "F32", weight.view(np.uint8), 16, unit, "Q4_K")
    assert np.isnan(made[:, [5, 6]]).all() and np.isfinite(np.delete(made, [5, 6], 1)).all()


def test_rows_that_are_no_whole_blocks_are_refused(random):
    library, weight = native.load(), weights(random, "normal", 16, 288)
    out = np.empty((1, 16), np.float32)
    x = np.zeros((1, 288), np.float32)
    places = [array.ctypes.data for array in (weight, x, out)]
    code = library.forerun_multiply(
        b"", SOURCES["F32"], 3, places[0], 16, 288, places[1], 1, places[2]
    )
    assert code and b"cannot become" in library.forerun_error()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def build(**changes):
        hf = tiny.model("llama", **{"max_position_embeddings": 512} | changes)
        path = tmp_path_factory.mktemp("llama")
        return FolderCheckpoint(tiny.save_folder(hf, path))

    return build


def test_a_folder_computes_with_it(folder, random):
    source, tokens = folder(**WIDE), random.integers(0, tiny.VOCAB, 60)
    made = CpuExecutor(source, limits(tiny.VOCAB), 1, dtype="q4_k")
    facts, arch = made.describe(), source.architecture
    assert facts["dtype"] == (
        "weights float32 made q4_k, embedding and output head made q8_0, "
        "activations 8 bits in groups of 32"
    )
    ends = arch.vocab * arch.hidden * (1 if arch.tied_head else 2)
    bits = (arch.parameters - ends) * 4.5 + ends * 8.5
    assert bits / 8 <= facts["weight_bytes"] < bits / 8 * 1.1
    config = EngineConfig(model=str(source.path), dtype="q4_k")
    assert 0.8 * facts["weight_bytes"] < EXECUTORS["cpu"].needs(config, arch, source).weights
    logits, exact = logits_of(made, tokens), fp32(source, tokens)
    made.shutdown()
    assert 1e-3 < distance(logits, exact) < 0.6


def test_narrow_matrices_become_8_bits_and_the_start_says_so(folder, random):
    """Rows of 64: nothing is Q4_K, and logits are those of q8_0."""
    source, tokens = folder(), random.integers(0, tiny.VOCAB, 40)
    logits, said = [], []
    for dtype in ("q4_k", "q8_0"):
        made = CpuExecutor(source, limits(tiny.VOCAB), 1, dtype=dtype)
        logits.append(logits_of(made, tokens))
        said.append(made.describe()["dtype"])
        made.shutdown()
    assert np.array_equal(*logits)
    assert "made q4_k, q8_0 where inputs are no multiple of 256, " in said[0]
