"""Embeddings of real executors are transformers' hidden states, with the same bits in any batch,
but on XLA.
"""

import numpy as np
import pytest
import torch

from forerun.executors import cpu
from forerun.executors.cpu import CpuExecutor
from forerun.executors.jax import JaxExecutor
from forerun.executors.torch import TorchExecutor
from forerun.interface.executor import ExecutorLimits
from tests.engine.test_embeddings import embed, vector
from tests.engine.toys import ask, make, run
from tests.models import tiny

NATIVE = pytest.mark.skipif(bool(cpu.available()), reason="the compiled core is not built")
LENGTHS = (1, 2, 33, 90)


@pytest.mark.parametrize(
    "kind",
    [
        TorchExecutor,
        pytest.param(CpuExecutor, marks=NATIVE),
        pytest.param(JaxExecutor, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_5_text"])
def test_the_same_as_transformers_and_alone(checkpoint, quickly, kind, family):
    source = checkpoint(family)
    limits = ExecutorLimits(16, 64, 6, 40, 160, tiny.VOCAB, checkpoints=4)
    executor = kind(source, limits)
    random = np.random.default_rng(3)
    texts = [random.integers(8, 250, n).astype(np.uint8).tobytes() for n in LENGTHS]
    requests = [embed(f"{p}{i}", text, p) for p in ("mean", "last") for i, text in enumerate(texts)]
    sink = run(make(executor=executor), *requests, ask("text", "Hello"), check=False)
    hf = tiny.reference(source)
    for i, text in enumerate(texts):
        with torch.inference_mode():
            ids = torch.tensor(list(text))[None]
            states = hf.model(ids).last_hidden_state[0].double().numpy()
        np.testing.assert_allclose(vector(sink, f"mean{i}"), states.mean(0), atol=1e-4)
        np.testing.assert_allclose(vector(sink, f"last{i}"), states[-1], atol=1e-4)
    for one in requests[2::3]:
        alone = vector(run(make(executor=executor), one, check=False), one.id)
        if kind is JaxExecutor:
            np.testing.assert_allclose(alone, vector(sink, one.id), atol=1e-5)
        else:
            assert alone.tobytes() == vector(sink, one.id).tobytes()
    executor.shutdown()
