"""Weights and pages in float8: what they cost in accuracy and memory, and the executor on them."""

import pytest
import torch

from forerun.build.registry import choose_executor
from forerun.build.shapes import SHAPES
from forerun.build.target import open_target
from forerun.errors import ConfigError
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.decoder.elementwise import PLAIN, compiled
from forerun.executors.torch.decoder.few_bits import IN_TORCH, rounded
from forerun.executors.torch.decoder.few_bits_layers import FewBitsLinear
from forerun.executors.torch.decoder.float8 import FLOAT8, float8_rows
from forerun.options.config import EngineConfig
from tests.models import tiny
from tests.parity.driver import limits, logits_in_chunks
from tests.parity.tape import on_tape
from tests.parity.test_torch_captured import half_true, no_draft, texts


def test_rows_are_scaled_by_their_greatest():
    x = torch.randn(5, 64) * torch.tensor([1e-4, 1.0, 7.0, 300.0, 0.0])[:, None]
    narrow, scale = float8_rows(x)
    assert narrow.dtype == FLOAT8
    assert narrow[:4].float().abs().amax(-1).tolist() == [448.0] * 4
    assert not narrow[4].float().any()
    # Three bits of mantissa: half a step of 1/8.
    error = (narrow.float() * scale - x).abs()
    assert (error <= x.abs() / 16 + scale * 2**-9).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(poison):
    weight, x = torch.randn(16, 96), torch.randn(3, 96)
    weight[1, 5] = poison
    y = IN_TORCH.product(x, rounded(weight), None)
    assert y[:, 1].isnan().all() and y[:, [0, *range(2, 16)]].isfinite().all()


@pytest.mark.parametrize("inputs", [24, 96, 256])
@pytest.mark.parametrize("bias", [None, torch.randn(48)])
def test_the_product_is_nearly_the_wide_one(inputs, bias):
    weight, x = torch.randn(48, inputs), torch.randn(9, inputs)
    made = FewBitsLinear(rounded(weight), bias, IN_TORCH)
    expected = torch.nn.functional.linear(x, weight, bias)
    actual = made(x)
    assert made.shape == (48, inputs)
    assert 0.005 < (actual - expected).norm() / expected.norm() < 0.05
    # The same numbers, multiplied one by one.
    numbers, scale = float8_rows(weight)
    wide = x.double() @ (numbers.double() * scale.double()).T
    wide = wide if bias is None else wide + bias
    torch.testing.assert_close(actual.double(), wide, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "qwen2_moe"])
def test_the_executor_in_float8(checkpoint, random, family):
    tokens = random.integers(0, tiny.VOCAB, 60)
    narrow = TorchExecutor(checkpoint(family), limits(tiny.VOCAB), dtype="float8")
    wide = TorchExecutor(checkpoint(family), limits(tiny.VOCAB))
    logits, expected = (logits_in_chunks(executor, tokens, [40, 20]) for executor in (narrow, wide))
    assert 0.01 < (logits - expected).norm() / expected.norm() < 0.3
    buffers = narrow.describe()
    assert (buffers["dtype"], buffers["batch_invariant"]) == ("float8", False)
    half = TorchExecutor(checkpoint(family), limits(tiny.VOCAB), dtype="bfloat16").describe()
    assert buffers["weight_bytes"] < half["weight_bytes"]
    assert buffers["cache_bytes"] == half["cache_bytes"]


@pytest.mark.slow
def test_compiled_parts_compute_the_same(monkeypatch):
    """By the tracer without its code generator, which a test machine may lack."""
    seen = []

    def trace(function, dynamic):
        seen.append(dynamic)
        return torch._dynamo.optimize("eager", dynamic=dynamic)(function)

    monkeypatch.setattr(torch, "compile", trace)
    parts = compiled(PLAIN)
    x, weight = torch.randn(3, 32), torch.rand(32)
    torch.testing.assert_close(parts.norm(x, weight, 1e-5), PLAIN.norm(x, weight, 1e-5))
    torch.testing.assert_close(
        parts.add_norm(x, x, weight, 1e-5), PLAIN.add_norm(x, x, weight, 1e-5)
    )
    torch.testing.assert_close(parts.gate(x, x), PLAIN.gate(x, x))
    torch.testing.assert_close(parts.gelu_gate(x, x), PLAIN.gelu_gate(x, x))
    torch.testing.assert_close(parts.clamped_gate(x, x), PLAIN.clamped_gate(x, x))
    cos, sin = torch.rand(2, 3, 8)
    heads = torch.randn(3, 2, 16)
    torch.testing.assert_close(parts.rotate(heads, cos, sin), PLAIN.rotate(heads, cos, sin))
    inputs = torch.tensor([2, 0, 1]), torch.randn(4, 32), x, (weight, weight * 2), 1e-5
    torch.testing.assert_close(parts.draft_inputs(*inputs), PLAIN.draft_inputs(*inputs))
    gated = torch.randn(3, 2, 32), weight, 1e-5, torch.randn(3, 2, 32)
    torch.testing.assert_close(parts.gated_norm(*gated), PLAIN.gated_norm(*gated))
    assert seen == [True] * 8


def test_float8_pages_cost_little_and_take_half(checkpoint, random):
    tokens = random.integers(0, tiny.VOCAB, 60)
    narrow = TorchExecutor(checkpoint(), limits(tiny.VOCAB), kv_dtype="float8")
    wide = TorchExecutor(checkpoint(), limits(tiny.VOCAB))
    logits, expected = (logits_in_chunks(executor, tokens, [40, 20]) for executor in (narrow, wide))
    assert 1e-4 < (logits - expected).norm() / expected.norm() < 0.1
    buffers = narrow.describe()
    assert (buffers["kv_dtype"], buffers["batch_invariant"]) == ("float8", True)
    head = wide.decoder.arch.head_size
    assert buffers["cache_bytes"] * 4 * head == wide.describe()["cache_bytes"] * (head + 4)
    held = sum(part.numbers.nbytes + part.scales.nbytes for part in narrow._cache.parts)
    assert held == buffers["cache_bytes"]
    # The same bits in other chunks: what a chunk's own tokens see is rounded too.
    again = logits_in_chunks(narrow, tokens, [7, 33, 20])
    assert torch.equal(logits, again)


def test_rounds_in_float8_run(checkpoint, monkeypatch):
    on_tape(monkeypatch)
    small = limits(tiny.VOCAB, context=128, pages=40, max_nodes=128)
    made = TorchExecutor(checkpoint(), small, dtype="float8").capture()
    first, second = (texts(made, no_draft) for _ in range(2))
    assert first == second and made.describe()["rounds"] > 20


@pytest.mark.parametrize("taped", [False, True])
def test_guesses_change_nothing_over_float8_pages(checkpoint, monkeypatch, taped):
    if taped:
        on_tape(monkeypatch)
    small = limits(tiny.VOCAB, context=128, pages=40, max_nodes=128)
    made = TorchExecutor(checkpoint(), small, kv_dtype="float8").capture()
    plain = texts(made, no_draft)
    assert texts(made, half_true(plain, 3)) == plain
    assert bool(made.describe().get("captured")) == taped


def test_the_memory_plan_knows_float8_pages(tmp_path):
    hf = tiny.model("llama")
    folder, size = str(tiny.save_folder(hf, tmp_path)), hf.config.head_dim
    plans = []
    for kv_dtype in ("same", "float8"):
        target = open_target(
            EngineConfig(
                model=folder,
                executor="torch",
                kv_dtype=kv_dtype,
                policy="fixed",
                kv_tokens=2048,
                context=256,
                chunked_prefill_size=256,
            )
        )
        plans.append((target.memory.cache, target.executor.describe()["cache_bytes"]))
        target.close()
    (wide, _), (narrow, held) = plans
    assert narrow * 4 * size == wide * (size + 4)
    assert narrow < held < 1.3 * narrow  # Scratch is there too.


def test_float8_pages_belong_to_torch():
    arch = SHAPES["tiny"]
    assert choose_executor(EngineConfig(kv_dtype="float8"), arch).executor == "torch"
    for changes in ({"executor": "cpu"}, {"model": "toy"}):
        with pytest.raises(ConfigError, match="kv-dtype float8 needs the torch executor"):
            EngineConfig(kv_dtype="float8", **changes)
