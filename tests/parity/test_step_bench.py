"""The bench of steps on every executor that runs on the host: a step may be repeated."""

import numpy as np
import pytest

from bench.step_bench import StepBench, limits_for
from forerun.build.shapes import SHAPES, RandomCheckpoint
from forerun.executors import cpu
from forerun.executors.cpu import CpuExecutor
from forerun.executors.jax import JaxExecutor
from forerun.executors.torch import TorchExecutor
from forerun.executors.toy import ToyExecutor
from forerun.networks.config_json import architecture_from
from forerun.speculative.sampling import Sampling
from tests.models import tiny

ROWS, NODES, CONTEXT = 2, 4, 24
SHAPED = Sampling(temperature=0.8, top_k=5, repetition_penalty=1.1, logprobs=2)


def bench_of(name, arch):
    limits = limits_for(arch, ROWS, NODES, CONTEXT)
    if name == "toy":
        return StepBench(ToyExecutor(limits), CONTEXT)
    made = {"cpu": CpuExecutor, "torch": TorchExecutor, "jax": JaxExecutor}[name](
        RandomCheckpoint(arch), limits
    )
    return StepBench(made, CONTEXT)


def recurrent(tmp_path):
    return architecture_from(tiny.config("qwen3_next").to_dict(), tmp_path)


NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("toy", False),
        ("torch", False),
        ("torch", True),
        pytest.param("cpu", True, marks=NATIVE),
        pytest.param("jax", False, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_repeated_as_it_was(name, states, tmp_path):
    """Of a model with recurrent states as well, behind a context that ends within a page."""
    bench = bench_of(name, recurrent(tmp_path) if states else SHAPES["tiny"])
    for sampling in (None, SHAPED):
        assert bench.fill(sampling) >= 0
        for rows, nodes in ((1, 1), (ROWS, NODES)):
            work = bench.step(rows, nodes)
            seen = []
            took = bench.times(lambda work=work, seen=seen: seen.append(work().outcome), 2)
            assert len(took) == 2 and len(seen) == 5 and all(ms >= 0 for ms in took)
            for outcome in seen:
                np.testing.assert_array_equal(outcome.tokens, seen[0].tokens)
                assert outcome.n_draft_tokens.tolist() == [nodes - 1] * rows
    bench.rewind()
    for _ in range(2):
        assert not bench.prompt(8)().outcome.n_tokens.any()
    assert bench.drafted(ROWS, NODES, 1) is None
    # A step that only begins is finished before the next one.
    assert len(bench.times(bench.forward(ROWS, NODES), 2)) == 2
    bench.rewind()
