"""Weights that stay in the file's few bits on the torch executor: read exactly, counted, and the
same text with and without speculation. The kernel itself is in test_triton_few_bits.py.
"""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build.registry import EXECUTORS, choose_executor
from forerun.build.sizing import Described, described, sizing
from forerun.build.target import open_target
from forerun.checkpoints.counted import counted
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.quantised_matrices import (
    grouped_of,
    quantised_matrices,
    quantised_sentence,
    saved_bytes,
)
from forerun.checkpoints.tensor_parallel import RankCheckpoint, TensorParallel
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.decoder import few_bits
from forerun.executors.torch.decoder.decoder import Decoder
from forerun.executors.torch.decoder.few_bits import alike, loaded
from forerun.executors.torch.decoder.few_bits_layers import FewBitsLinear, SideBySide
from forerun.executors.torch.decoder.layers import Linear
from forerun.options.config import EngineConfig
from tests.covering import spread
from tests.models import packers, tiny
from tests.models.test_quantised import AWQ, FP8, GPTQ, GROUP, compressed, shuffled
from tests.parity.driver import limits, logits_in_chunks
from tests.parity.tape import Tape, on_tape
from tests.parity.test_torch_captured import half_true, no_draft, texts

CPU = torch.device("cpu")
IN_32 = {"group_size": 32}
FORMATS = {
    "awq": (AWQ | IN_32, lambda w: packers.awq(w, 32)),
    "gptq": (GPTQ | IN_32, lambda w: packers.gptq(w, group=32)),
    "gptq-8": (GPTQ | IN_32 | {"bits": 8}, lambda w: packers.gptq(w, bits=8, group=32)),
    "gptq-order": (
        GPTQ | IN_32 | {"desc_act": True},
        lambda w: packers.gptq(w, group=32, order=shuffled(w)),
    ),
    "packed": (
        compressed("pack-quantized", **GROUP | IN_32),
        lambda w: packers.packed(w, group=32),
    ),
    "packed-zeros": (
        compressed("pack-quantized", **GROUP | IN_32, **{"symmetric": False}),
        lambda w: packers.packed(w, group=32, symmetric=False),
    ),
    "packed-8": (
        compressed("pack-quantized", num_bits=8),
        lambda w: packers.packed(w, bits=8, group=0),
    ),
    "int8": (compressed("int-quantized"), packers.int8),
    "float8-blocks": (FP8 | {"weight_block_size": [24, 32]}, lambda w: packers.float8(w, 24, 32)),
    "float8-channel": (
        compressed("float-quantized", type="float"),
        lambda w: packers.float8(w, 1, 0, "weight_scale"),
    ),
    "float8-tensor": (FP8, lambda w: packers.float8(w, 0, 0, "weight_scale")),
}


def its_own(weight):
    """An order that no two matrices share."""
    seed = abs(int(1e6 * weight.sum()))
    return np.random.default_rng(seed).permutation(weight.shape[1])


OTHERS = {
    "awq-16": (AWQ, packers.awq),
    "gptq-orders": (
        GPTQ | IN_32 | {"desc_act": True},
        lambda w: packers.gptq(w, group=32, order=its_own(w)),
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints in the formats, by name and family."""
    result = {}

    def build(name, family="llama", formats=FORMATS):
        if (name, family) not in result:
            settings, pack = formats[name]
            path = tmp_path_factory.mktemp(name) / "tiny"
            hf = tiny.model(family, max_position_embeddings=512)
            packers.quantise(tiny.save_folder(hf, path), settings, pack)
            result[name, family] = FolderCheckpoint(path)
        return result[name, family]

    return build


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_of_the_file_are_kept_exactly(made, name):
    """What is kept stands for the very floats that it would be widened to."""
    checkpoint = made(name)
    kept = quantised_matrices(checkpoint)
    assert len(kept) == 7 * checkpoint.architecture.layers
    for each, matrix in kept.items():
        weight = loaded([matrix], CPU)
        expected = torch.from_numpy(np.array(checkpoint.tensor(each)))
        assert torch.equal(weight.widened(0, matrix.shape[0]), expected), each
        there = (weight.numbers, weight.scales, weight.zeros, weight.order)
        held = sum(part.numel() * part.itemsize for part in there if part is not None)
        assert held == matrix.bytes < expected.numel() * 2


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_that_are_read_side_by_side_make_the_matrix(made, name, monkeypatch):
    two = [next(iter(quantised_matrices(made(name)).values()))] * 2
    assert alike(two)
    whole = loaded(two, CPU)
    monkeypatch.setattr(few_bits, "READ", 7 * two[0].shape[1])
    pieces = loaded(two, CPU)
    assert torch.equal(whole.widened(0, whole.shape[0]), pieces.widened(0, whole.shape[0]))


def test_parts_of_a_fused_matrix_are_kept(made):
    """Phi-3 stores queries, keys and values as one, gate and up as another."""
    linear = packers.LINEAR
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packers, "LINEAR", (*linear, "qkv_proj", "gate_up_proj"))
        checkpoint = made("awq", "phi3")
    kept = quantised_matrices(checkpoint)
    assert len(kept) == 7 * checkpoint.architecture.layers
    for each, matrix in kept.items():
        expected = torch.from_numpy(np.array(checkpoint.tensor(each)))
        assert torch.equal(loaded([matrix], CPU).widened(0, matrix.shape[0]), expected), each


@pytest.mark.parametrize("name", ["awq", "gptq-order", "packed-8", "float8-blocks"])
def test_ranks_keep_their_parts(made, name):
    whole = made(name)
    for rank in range(2):
        part = RankCheckpoint(whole, TensorParallel(rank, 2))
        kept = quantised_matrices(part)
        names = {each.split(".")[-2] for each in kept}
        assert names >= {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
        if name == "packed-8":
            assert names >= {"o_proj", "down_proj"}
        for each, matrix in kept.items():
            assert matrix.shape == part.shape(each)
            expected = torch.from_numpy(np.array(part.tensor(each)))
            actual = loaded([matrix], CPU).widened(0, matrix.shape[0])
            assert torch.equal(actual, expected), each


def test_progress_counts_what_is_kept(made):
    progress = []
    checkpoint = counted(made("awq"), 4, lambda done, total: progress.append((done, total)))
    Decoder(checkpoint, CPU, torch.float32, keep=True)
    assert progress[-1][0] == progress[-1][1] > 0


def executor(checkpoint, dtype="file", **changes):
    small = limits(tiny.VOCAB, **{"context": 128, "pages": 40, "max_nodes": 128} | changes)
    return TorchExecutor(checkpoint, small, dtype=dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_widened_weights(made, name):
    tokens = np.random.default_rng(0).integers(3, tiny.VOCAB, 20)
    kept, wide = (
        logits_in_chunks(executor(made(name), dtype), tokens, [20]) for dtype in ("file", "float32")
    )
    torch.testing.assert_close(kept, wide, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", spread(["awq", "gptq-order", "int8", "float8-blocks"], 1))
def test_texts_are_equal_with_and_without_speculation(made, name):
    tape, eager = Tape(), executor(made(name))
    with pytest.MonkeyPatch.context() as patch:
        on_tape(patch, tape)
        captured = executor(made(name)).capture()
    assert eager.describe()["batch_invariant"]
    expected = texts(eager, no_draft)
    assert texts(eager, half_true(expected, 5)) == expected
    assert texts(captured, no_draft) == expected
    assert texts(captured, half_true(expected, 5)) == expected
    assert tape.replays > 20 and captured.describe()["captured"]


def products(decoder):
    return [type(product) for block in decoder._blocks for product in block.linears]


def test_which_products_keep_what(made):
    layers = made("awq").architecture.layers
    assert products(executor(made("awq")).decoder) == [FewBitsLinear] * 4 * layers
    assert products(executor(made("awq"), "float32").decoder) == [Linear] * 4 * layers
    assert products(executor(made("gptq-order")).decoder) == [FewBitsLinear] * 4 * layers
    orders = executor(made("gptq-orders", formats=OTHERS)).decoder
    assert products(orders) == [SideBySide, FewBitsLinear] * 2 * layers


def test_groups_that_no_product_reads_are_widened(made):
    checkpoint = made("awq-16", formats=OTHERS)
    assert not quantised_matrices(checkpoint)
    opened = executor(checkpoint)
    assert products(opened.decoder) == [Linear] * 4 * checkpoint.architecture.layers
    assert "widened" in opened.describe()["dtype"]


def test_experts_are_widened_and_the_sentence_says_how_many_are_kept(made):
    checkpoint = made("awq", "qwen3_moe")
    kept = quantised_matrices(checkpoint)
    layers = checkpoint.architecture.layers
    assert len(kept) == 4 * layers and not any("experts" in name for name in kept)
    text = executor(checkpoint).describe()["dtype"]
    assert text == (
        f"weights 4-bit integers in groups of 32 ({4 * layers} matrices) as in the file, all "
        "others widened"
    )


def test_memory_is_counted_as_it_is_kept(made):
    """By the plan, by the executor, and by the tensors that it holds."""
    checkpoint = made("awq")
    kept = quantised_matrices(checkpoint)
    saved = saved_bytes(kept.values(), 4)
    assert saved > 0.8 * 4 * sum(np.prod(matrix.shape) for matrix in kept.values())
    few, wide = (
        executor(checkpoint, dtype).describe()["weight_bytes"] for dtype in ("file", "float32")
    )
    assert wide - few == saved
    needs = {}
    for dtype in ("file", "float32"):
        config = EngineConfig(executor="torch", device="cpu", dtype=dtype)
        needs[dtype] = EXECUTORS["torch"].needs(config, checkpoint.architecture, checkpoint)
    assert needs["float32"].weights - needs["file"].weights == saved
    assert needs["file"].fixed > needs["float32"].fixed
    decoder = executor(checkpoint).decoder
    held = 0
    for block in decoder._blocks:
        for product in block.linears:
            weight = product.weight
            parts = (weight.numbers, weight.scales, weight.zeros, weight.order)
            held += sum(part.numel() * part.itemsize for part in parts if part is not None)
    assert held == sum(matrix.bytes for matrix in kept.values())


def test_the_line_at_the_start_says_what_is_kept_and_what_it_takes(made):
    checkpoint = made("awq")
    config = EngineConfig(
        model=str(checkpoint.path), executor="torch", context=256, policy="fixed", kv_tokens=512
    )
    said = []
    for dtype in ("file", "float32"):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            target = open_target(replace(config, dtype=dtype))
        target.close()
        said.append(next(str(each.message) for each in warned if "few bits" in str(each.message)))
    count = 7 * checkpoint.architecture.layers
    kept = f"here weights 4-bit integers in groups of 32 ({count} matrices) as in the file"
    assert kept in said[0]
    assert "widened when they are read" in said[1]
    assert said[0].count("of weights") == said[1].count("of weights") == 1


def test_on_cuda_files_in_few_bits_stay_what_they_are_unless_a_format_is_said(made):
    arch = made("awq").architecture
    cuda = EngineConfig(device="cuda", executor="torch")
    assert choose_executor(cuda, arch, made("awq")).dtype == "file"
    assert choose_executor(cuda, arch, made("awq-16", formats=OTHERS)).dtype == "bfloat16"
    config = replace(cuda, dtype="bfloat16")
    assert choose_executor(config, arch, made("awq")).dtype == "bfloat16"
    cpu = replace(cuda, device="cpu")
    assert choose_executor(cpu, arch, made("awq")).dtype == "float32"
    assert choose_executor(replace(cpu, dtype="file"), arch, made("awq")).dtype == "file"


def test_plans_of_a_configuration_alone_count_what_would_be_kept(made, tmp_path):
    """`forerun plan`: by the files and by config.json alone, the same to the byte."""
    checkpoint = made("awq")
    (tmp_path / "config.json").write_text((checkpoint.path / "config.json").read_text())
    config = EngineConfig(model=str(tmp_path), device="cuda", executor="torch")
    alone = described(config)
    assert not alone.stored
    plans = [
        sizing(config, model, 1 << 33) for model in (alone, Described("whole", checkpoint, True))
    ]
    assert plans[0].config.dtype == plans[1].config.dtype == "file"
    assert plans[0].needs == plans[1].needs
    wide = sizing(replace(config, dtype="bfloat16"), alone, 1 << 33)
    kept = quantised_matrices(checkpoint).values()
    assert wide.needs.weights - plans[0].needs.weights == saved_bytes(kept, 2)


def test_what_is_kept_is_said_in_words():
    assert "no matrix" in quantised_sentence({})


def test_ggufs_of_four_and_eight_bits_are_kept(tmp_path):
    hf = tiny.model("llama")
    for kind, group in (("Q4_0", 32), ("Q8_0", 32)):
        checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / f"{kind}.gguf", kind))
        kept = quantised_matrices(checkpoint)
        assert len(kept) == 7 * checkpoint.architecture.layers
        for name, matrix in kept.items():
            assert matrix.group == group and grouped_of(checkpoint, name) is not None
            expected = torch.from_numpy(np.array(checkpoint.tensor(name)))
            actual = loaded([matrix], CPU).widened(0, matrix.shape[0])
            assert torch.equal(actual, expected), (kind, name)
