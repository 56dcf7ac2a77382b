"""Prompt chunks by torch's own attention are what our kernels' references make of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.errors import ConfigError
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch import model_runner as module
from forerun.executors.torch.attention.geometry import geometry_of
from forerun.executors.torch.attention.kv import KvShape, PagedCache
from forerun.executors.torch.attention.prompt_attention import PromptAttention, flash, row_by_row
from forerun.interface.plan import Plan
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.layer_spec import AttentionSpec
from forerun.speculative.tree import NO_DRAFT, batch
from tests.covering import every
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, limits
from tests.parity.interpreted import load
from tests.parity.launches import META, Launches
from tests.references.kernels import REFERENCE_KERNELS, attend_dense

_Zeros = load("triton.compile_ahead")._Zeros  # Interpreted, for all tests of this process.


@pytest.fixture
def made(checkpoint, monkeypatch, calls):
    """Executors of a family as on a device with kernels, whose references these are."""
    counted = replace(REFERENCE_KERNELS, varlen=calls)
    monkeypatch.setattr(module, "kernels_for", lambda device: counted)
    return lambda family, prompts="triton", **how: TorchExecutor(
        checkpoint(family), limits(tiny.VOCAB), prompts=prompts, **how
    )


class Calls(list):
    """(nodes, keys) of the rows of every variable-length call, layer by layer."""

    def __call__(self, queries, keys, values, packed, spec):
        self.append(list(zip(packed.queries.tolist(), packed.keys.tolist(), strict=True)))
        assert len(queries) == sum(packed.queries) == packed.query_start[-1]
        assert len(keys) == len(values) == sum(packed.keys) == packed.key_start[-1]
        return row_by_row(queries, keys, values, packed, spec)


@pytest.fixture
def calls():
    return Calls()


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


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [*every(["llama", "qwen3"], ["same", "float8"]), ("gemma3_text", "same")],
)
def test_chunks_by_torch_are_those_of_the_kernels(made, calls, family, kv_dtype):
    """In one chunk and behind a prefix, beside others, over pages in float8 as well. Layers of
    gemma3 with a window of 24 see no more than it.
    """
    prompts = prompts_of(5, 150, 96)
    expected, ours = served(made(family, kv_dtype=kv_dtype), prompts)
    assert not calls
    tokens, theirs = served(made(family, kv_dtype=kv_dtype, prompts="torch_native"), prompts)
    layers = tiny.config(family).num_hidden_layers
    assert calls == [[(70, 70), (96, 96)]] * layers + [[(80, 150)]] * layers
    np.testing.assert_allclose(theirs, ours, atol=1e-4 if kv_dtype == "same" else 0.05)
    assert tokens == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_in_fewer_bits_they_differ_less_than_these_bits_do(made, calls, dtype):
    prompts = prompts_of(5, 150, 96)
    _, exact = served(made("llama"), prompts)
    _, ours = served(made("llama", dtype=dtype), prompts)
    _, theirs = served(made("llama", dtype=dtype, prompts="torch_native"), prompts)
    assert calls
    assert 0 < np.abs(theirs - ours).mean() <= np.abs(ours - exact).mean()


@pytest.mark.parametrize("count", [1, 64])
def test_a_layer_launches_three_kernels_for_any_number_of_prompts(count):
    """Of 1 to 64 prompts, and one behind a prefix: two gathers and FlashAttention."""
    room = replace(limits(tiny.VOCAB), pages=512, max_nodes=4096)
    cache = PagedCache(KvShape((CacheLayer(2, 64),)), room, META, torch.bfloat16)
    rows = np.arange(count, dtype=np.int32)
    known = tuple(np.zeros(70 + row, np.int32) for row in rows)
    pages = np.tile(np.arange(20, dtype=np.int32), (count, 1))
    none = np.zeros(count, np.int32)
    plan = Plan(rows, 16 * (rows % 2), known, rows >= 0, none, none, pages, rows < 0)
    trees = batch(list(known), [NO_DRAFT] * count)
    places = np.zeros(len(trees.tokens), np.int64)
    geometry = geometry_of(plan, trees, places, cache, 4, META)
    attention = PromptAttention(attend_dense, flash, geometry, plan, trees, cache)
    spec = AttentionSpec(scale=0.125)
    queries = torch.empty(len(trees.tokens), 8, 64, dtype=torch.bfloat16, device=META)
    with Launches() as mode:
        context = attention(queries, *cache.layers[0], spec)
    assert context.shape == queries.shape
    assert mode.launches == {"index_select": 2, "_flash_attention_forward": 1}


def test_layers_with_a_cap_stay_with_the_kernels(made, calls):
    prompts = prompts_of(5, 150, 96)
    expected, _ = served(made("gemma2"), prompts)
    tokens, _ = served(made("gemma2", prompts="torch_native"), prompts)
    assert not calls and tokens == expected


def test_on_a_cpu_it_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="prefill-attention-backend torch_native is for cuda"):
        TorchExecutor(checkpoint("llama"), limits(tiny.VOCAB), prompts="torch_native")


def test_what_is_compiled_ahead_leaves_the_library_alone(made, calls):
    """Under the mode in which start-up compiles, torch makes no bias of its own kind. As seen on an
    H100, where 16 bits go through the library by themselves.
    """
    executor = made("llama", prompts="auto", dtype="bfloat16")
    with _Zeros():
        executor.rehearse(96)
    assert not calls
    served(executor, prompts_of(5, 150, 90))
    assert calls
    executor.shutdown()
