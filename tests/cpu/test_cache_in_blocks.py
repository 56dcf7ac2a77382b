"""Keys and values in blocks of 32 bytes with a half each (`--kv-dtype q8_0`)."""

import numpy as np
import pytest

from forerun.build import shapes
from forerun.build.memory import plan_memory
from forerun.build.registry import EXECUTORS, choose_executor
from forerun.errors import ConfigError
from forerun.executors.cpu import native
from forerun.networks.layer_spec import GatedDelta
from forerun.options.config import EngineConfig
from tests.cpu.reference import forward, from_blocks, in_blocks
from tests.cpu.test_floats import cuts_change_no_bit
from tests.cpu.test_logits import SHAPES, distance, logits_of

KERNELS = [name for name in native.KERNELS if native.available() is None and native.kernels(name)]
LAYERS = {
    "heads of 64": ("llama", SHAPES["three share 64"]),
    "heads of 128": ("llama", SHAPES["large heads"]),
    "heads of 24": ("llama", SHAPES["a head each"]),
    "windows and caps": ("gemma2", {"sliding_window": 20}),
    "sinks": ("gpt_oss", {"sliding_window": 20}),
    "latent": ("deepseek_v3", {}),
    "recurrent layers, gates": ("qwen3_next", {}),
    "another layer's keys": ("gemma4_text", {}),
}


def blocks_by(name, rows):
    """The bytes uint8[n, .] of rows float32[n, count] in the cache, by kernels of that name."""
    count = rows.shape[1]
    out = np.zeros((len(rows), count + 2 * -(-count // 32)), np.uint8)
    for row, to in zip(rows, out, strict=True):
        addresses = row.ctypes.data, count, to.ctypes.data
        assert native.load().forerun_blocks(name.encode(), *addresses) == 0
    return out


@pytest.mark.parametrize("count", [8, 24, 64, 128, 576])
@pytest.mark.parametrize("name", KERNELS)
def test_blocks_are_numpys(random, name, count):
    rows = random.standard_normal((40, count)) * 10.0 ** random.integers(-9, 8, (40, 1))
    rows[0], rows[1, 3], rows[2, 0], rows[3] = 0, np.nan, -np.inf, -1e30
    rows = rows.astype(np.float32)
    quants, scales = in_blocks(rows)
    expected = [quants.reshape(len(rows), -1)[:, :count].view(np.uint8), scales.view(np.uint8)]
    assert np.array_equal(blocks_by(name, rows), np.concatenate(expected, 1))


def test_numbers_come_back_within_half_a_step(random):
    rows = random.standard_normal((100, 64)).astype(np.float32)
    quants, scales = in_blocks(rows)
    step = np.repeat(scales.astype(np.float32), 32, 1)
    assert np.all(np.abs(from_blocks(quants, scales, 64) - rows) <= 0.5001 * step)


@pytest.mark.parametrize("name", LAYERS)
def test_logits_are_the_references(executor, checkpoint, random, name):
    """Weights and activations are floats, so that nothing else is rounded. (Experts of random
    weights are chosen otherwise by a hair.)
    """
    family, changes = LAYERS[name]
    source = checkpoint(family, None, **changes)
    tokens = random.integers(0, 320, 70)
    logits = logits_of(executor(source, 2, kv_dtype="q8_0"), tokens)
    exact = forward(source, tokens)
    assert distance(logits, forward(source, tokens, "q8_0")) < 2e-3
    assert 1e-4 < distance(logits, exact) < 0.3


@pytest.mark.parametrize("name", LAYERS)
def test_every_instruction_set_gives_the_same_bits(executor, checkpoint, random, name):
    family, changes = LAYERS[name]
    source = checkpoint(family, None, **changes)
    tokens = random.integers(0, 320, 60)
    results = []
    for kernels in KERNELS:
        made = executor(source, kernels=kernels, kv_dtype="q8_0")
        logits = logits_of(made, tokens)
        pages = [] if made.pages is None else [made.pages.read_page(page) for page in range(3)]
        results.append((logits, pages))
    assert all(np.array_equal(results[-1][0], logits) for logits, _ in results)
    assert all(results[-1][1] == pages for _, pages in results)


@pytest.mark.parametrize("name", ["heads of 64", "sinks", "latent"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_threads_and_trees_change_no_bit(executor, checkpoint, random, name, page_size):
    family, changes = LAYERS[name]
    source = checkpoint(family, None, **changes)
    tokens = random.integers(0, 320, 90)
    made = executor(source, kv_dtype="q8_0", page_size=page_size, pages=1024 // page_size)
    cuts_change_no_bit(executor(source, threads=2, kv_dtype="q8_0"), made, tokens)


def test_a_page_goes_out_and_comes_back(executor, checkpoint, random):
    """Half the bytes of float16's and a scale for every 32."""
    source = checkpoint("llama", "Q8_0", **SHAPES["three share 64"])
    made, wide = (executor(source, kv_dtype=kind) for kind in ("q8_0", "same"))
    assert 2 * 32 * made.pages.page_bytes == 34 * wide.pages.page_bytes
    content = random.integers(0, 256, made.pages.page_bytes, np.uint8).tobytes()
    made.pages.write_page(3, content)
    assert made.pages.read_page(3) == content
    assert made.describe()["cache_dtype"] == "q8_0"


@pytest.mark.parametrize("name", LAYERS)
def test_the_plan_counts_what_there_will_be(executor, checkpoint, name):
    family, changes = LAYERS[name]
    source = checkpoint(family, None, **changes)
    config = EngineConfig(model=str(source.path), dtype="file", executor="cpu", kv_dtype="q8_0")
    needs = EXECUTORS["cpu"].needs(config, source.architecture, source)
    made = executor(source, kv_dtype="q8_0")
    places = made.limits.pages * made.limits.page_size + made.limits.max_nodes
    assert made.model.cache_bytes == needs.per_token * places
    same = EXECUTORS["cpu"].needs(EngineConfig(executor="cpu"), source.architecture, source)
    rooms = [plan_memory(config, each, 10**9).cache for each in (needs, same)]
    assert rooms[0] < 0.35 * rooms[1]  # Of float32.
    assert any(isinstance(s.recurrent, GatedDelta) for s in source.architecture.layer_specs) == (
        name.startswith("recurrent")
    )


def test_it_is_this_executors_option():
    arch = shapes.SHAPES["tiny"]
    assert choose_executor(EngineConfig(kv_dtype="q8_0"), arch).executor == "cpu"
    for changes in ({"executor": "torch"}, {"executor": "jax"}, {"model": "toy"}):
        with pytest.raises(ConfigError, match="kv-dtype q8_0 needs the cpu executor"):
            EngineConfig(kv_dtype="q8_0", **changes)
    for changes in ({"device": "cpu", "dtype": "float32"}, {"tp_size": 2, "device": "cpu"}):
        with pytest.raises(ConfigError, match="runs on the torch executor, which has no such"):
            choose_executor(EngineConfig(kv_dtype="q8_0", **changes), arch)
