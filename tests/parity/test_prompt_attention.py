"""Prompt chunks by torch's own attention are what our kernels' twins make of them."""

import numpy as np
import pytest

from forerun.errors import ConfigError
from forerun.executors.torch import TorchExecutor, prompt_attention
from forerun.executors.torch import executor as module
from forerun.executors.torch.compile_ahead import _Zeros
from forerun.executors.torch.kernels import SLOW_TWINS
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, limits


@pytest.fixture
def made(checkpoint, monkeypatch):
    """Executors of a family as on a device with kernels, whose twins these are."""
    monkeypatch.setattr(module, "kernels_for", lambda device: SLOW_TWINS)
    return lambda family, prompts="triton", **how: TorchExecutor(
        checkpoint(family), limits(tiny.VOCAB), prompts=prompts, **how
    )


@pytest.fixture
def chunks(monkeypatch):
    """(queries, keys) of every chunk that torch's attention was given, layer by layer."""
    seen, attend = [], prompt_attention.attend_chunk

    def counted(queries, keys, values, slots, scale):
        seen.append((len(queries), len(slots)))
        return attend(queries, keys, values, slots, scale)

    monkeypatch.setattr(prompt_attention, "attend_chunk", counted)
    return seen


def served(executor, prompts):
    """Tokens and logits of two prompts in chunks, beside a tree, and of a step after them."""
    tokens, logits = [], []
    with Driver(executor) as driver:
        driver.open(0, prompts[0])
        for slot, prompt in enumerate(prompts[1:], 1):
            driver.open(slot, prompt)
        tree = as_draft([3, 5, 7], [-1, -1, 0])
        for rows in (
            [Row(1, known=70), Row(2, known=len(prompts[2]))],
            [Row(0), Row(1)],
            [Row(0, draft=tree), Row(1, draft=tree), Row(2)],
        ):
            step = driver.step(rows)
            tokens.append(step.outcome.tokens.tolist())
            last = [len(step.trees.nodes(row)) - 1 for row in range(len(rows))]
            logits += [
                step.logits(row, node).numpy()
                for row, node in enumerate(last)
                if step.plan.samples[row]
            ]
    return tokens, np.stack(logits)


def prompts_of(*lengths):
    random = np.random.default_rng(5)
    return [random.integers(8, tiny.VOCAB, count).tolist() for count in lengths]


@pytest.mark.parametrize("kv_dtype", ["same", "float8"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_chunks_by_torch_are_those_of_the_kernels(made, chunks, family, kv_dtype):
    """In one chunk and behind a prefix, beside others, over pages in float8 as well."""
    prompts = prompts_of(5, 150, 96)
    expected, ours = served(made(family, kv_dtype=kv_dtype), prompts)
    assert not chunks
    tokens, theirs = served(made(family, kv_dtype=kv_dtype, prompts="torch_native"), prompts)
    layers = tiny.config(family).num_hidden_layers
    assert chunks == [(70, 70), (96, 96)] * layers + [(80, 150)] * layers
    np.testing.assert_allclose(theirs, ours, atol=1e-4 if kv_dtype == "same" else 0.05)
    assert tokens == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_in_fewer_bits_they_differ_less_than_these_bits_do(made, chunks, dtype):
    prompts = prompts_of(5, 150, 96)
    _, exact = served(made("llama"), prompts)
    _, ours = served(made("llama", dtype=dtype), prompts)
    _, theirs = served(made("llama", dtype=dtype, prompts="torch_native"), prompts)
    assert chunks
    assert 0 < np.abs(theirs - ours).mean() <= np.abs(ours - exact).mean()


def test_layers_with_a_window_or_a_cap_stay_with_the_kernels(made, chunks):
    prompts = prompts_of(5, 150, 96)
    expected, _ = served(made("gemma2"), prompts)
    tokens, _ = served(made("gemma2", prompts="torch_native"), prompts)
    assert not chunks and tokens == expected


def test_on_a_cpu_it_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="prefill-attention-backend torch_native is for cuda"):
        TorchExecutor(checkpoint("llama"), limits(tiny.VOCAB), prompts="torch_native")


def test_what_is_compiled_ahead_leaves_the_library_alone(made, chunks):
    """Under the mode in which start-up compiles, torch makes no bias of its own kind. As seen on an
    H100, where 16 bits go through the library by themselves.
    """
    executor = made("llama", prompts="auto", dtype="bfloat16")
    with _Zeros():
        executor.rehearse(96)
    assert not chunks
    served(executor, prompts_of(5, 150, 90))
    assert chunks
    executor.shutdown()
