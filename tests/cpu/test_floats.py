"""Checkpoints of float32, bfloat16 and float16 are computed with as they are."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from forerun.build.registry import EXECUTORS
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.errors import ConfigError
from forerun.executors.cpu import CpuExecutor
from forerun.options.config import EngineConfig
from tests.cpu.reference import forward
from tests.cpu.test_logits import SAME, distance, fp32, logits_of
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, limits

FOLDERS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small random checkpoints whose numbers are of one kind."""

    def build(kind, family="llama", seed=0):
        path = tmp_path_factory.mktemp(f"{family}-{kind}-{seed}")
        hf = tiny.model(family, seed, max_position_embeddings=512)
        return FolderCheckpoint(tiny.save_folder(hf, path, dtype=FOLDERS[kind]))

    return build


@pytest.mark.parametrize("family", [*tiny.LLAMAS, "GGUF"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_logits_are_those_of_transformers_in_float32(
    executor, folder, checkpoint, random, family, kind
):
    source = checkpoint("qwen3", kind) if family == "GGUF" else folder(kind, family)
    tokens = random.integers(0, tiny.VOCAB, 60)
    assert distance(logits_of(executor(source), tokens), fp32(source, tokens)) < 2e-6


def cuts_change_no_bit(at_once, made, tokens):
    """Assert that a text of 69 tokens or more has the same logits in chunks, and under draft tokens
    that are right.
    """
    whole = logits_of(at_once, tokens)
    with Driver(made) as driver:
        driver.open(0, tokens)
        for known in (1, 40, 3, 16):
            driver.step([Row(0, known=known)])
        right = as_draft(tokens[61:69], np.arange(8) - 1)
        result = driver.step([Row(0, known=1, draft=right)])
        for node in range(9):
            assert np.array_equal(result.logits(0, node), whole[60 + node]), node


@pytest.mark.parametrize("kind", FOLDERS)
def test_chunks_threads_and_draft_tokens_change_no_bit(executor, folder, random, kind):
    source = folder(kind)
    tokens = random.integers(0, tiny.VOCAB, 90)
    cuts_change_no_bit(executor(source, threads=2), executor(source), tokens)


def test_it_says_what_the_weights_are(executor, folder, checkpoint):
    for kind, name in STORED.items():
        facts = executor(folder(kind)).describe()
        assert facts["dtype"] == f"weights {name} as in the file, activations float32"
        assert facts["cache_dtype"] == "float32"
    facts = executor(checkpoint("llama", "Q4_1")).describe()
    assert facts["dtype"] == "weights Q4_1 as in the file, activations 8 bits in groups of 32"
    assert facts["cache_dtype"] == "float16"


def test_quants_without_a_format_of_their_own_become_eight_bits(executor, random, tmp_path):
    hf = tiny.model("llama", num_hidden_layers=1, intermediate_size=128)
    stored = {}
    for name, array in tiny.weights(hf).items():
        if array.ndim == 2:
            raw = random.integers(0, 256, (len(array), array.shape[1] // 64, 36), np.uint8)
            raw[..., :4] = random.integers(8, 24, raw[..., :4].shape)  # Small scales.
            stored[name] = raw.reshape(len(array), -1), GGMLQuantizationType["NVFP4"]
    source = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", stored=stored))
    made, tokens = executor(source), random.integers(0, tiny.VOCAB, 30)
    dtype = "weights NVFP4 made q8_0, activations 8 bits in groups of 32"
    assert made.describe()["dtype"] == dtype
    assert distance(logits_of(made, tokens), forward(source, tokens)) < SAME


@pytest.mark.parametrize(("dtype", "bits", "off"), [("q8_0", 8.5, 0.07), ("q4_1", 5, 0.6)])
def test_floats_are_quantised_only_with_the_option(folder, random, dtype, bits, off):
    source = folder("BF16")
    tokens = random.integers(0, tiny.VOCAB, 60)
    made = CpuExecutor(source, limits(tiny.VOCAB), 1, dtype=dtype)
    facts, exact = made.describe(), fp32(source, tokens)
    assert facts["dtype"].startswith(f"weights bfloat16 made {dtype}, ")
    assert facts["dtype"].endswith("activations 8 bits in groups of 32")
    assert facts["cache_dtype"] == "float16"
    arch = source.architecture
    ends = arch.vocab * arch.hidden * (1 if arch.tied_head else 2)
    packed = (arch.parameters - ends) * bits / 8 + ends * 8.5 / 8
    assert packed <= facts["weight_bytes"] < packed * 1.3
    assert 1e-3 < distance(logits_of(made, tokens), exact) < off
    made.shutdown()


def test_the_plan_counts_what_there_will_be(executor, folder):
    source, entry = folder("BF16"), EXECUTORS["cpu"]
    for dtype in ("file", "q8_0", "q4_k"):
        config = EngineConfig(model=str(source.path), dtype=dtype)
        needs = entry.needs(config, source.architecture, source)
        made = CpuExecutor(source, limits(tiny.VOCAB), 1, dtype=dtype)
        places = made.limits.pages * made.limits.page_size + made.limits.max_nodes
        assert made.model.cache_bytes == needs.per_token * places
        made.shutdown()
        assert 0.8 * made.describe()["weight_bytes"] < needs.weights


def test_it_is_this_executors_option():
    for dtype in ("file", "q8_0", "q4_1"):
        assert EXECUTORS["cpu"].unsuited(EngineConfig(device="cpu", dtype=dtype)) is None
    with pytest.raises(
        ConfigError, match="dtype is q4_1, but the torch executor computes in: file"
    ):
        EngineConfig(executor="torch", dtype="q4_1")
