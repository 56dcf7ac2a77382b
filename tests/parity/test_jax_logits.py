"""The JAX executor's logits are those of transformers on the same weights."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.executors.jax import JaxExecutor, JaxOptions
from forerun.executors.jax.network.decoder import JaxDecoder
from forerun.executors.jax.network.weights import Pattern
from forerun.networks.arch import FAMILIES
from tests.models import tiny
from tests.parity.conftest import little_optimised
from tests.parity.driver import Driver, Row, limits, paths_of_a_tree
from tests.parity.test_torch_logits import FURTHER, GEMMAS, VARIANTS
from tests.worlds.checkpoints import expected_logits

SMALL = limits(tiny.VOCAB, context=320, max_nodes=256, slots=2)


def opened(checkpoint, compiled, small=SMALL, **options):
    options = {"draft_nodes": 3, "cache_dir": compiled} | options
    return JaxExecutor(checkpoint, small, JaxOptions(**options))


def forward(executor, tokens, chunks):
    """float32[T,V] of a text run in chunks of the given lengths. It goes on, so that no round has
    to be compiled.
    """
    logits = []
    with Driver(executor) as driver:
        driver.open(0, [*tokens, 5])
        for chunk in chunks:
            result = driver.step([Row(0, known=chunk)])
            logits.append(executor.programs.logits(result.round.place))
    return torch.from_numpy(np.concatenate(logits))


CASES = [
    *((family, "plain") for family in FAMILIES),
    *(("llama", variant) for variant in VARIANTS if variant != "plain"),
    ("qwen3", "tied"),
    ("gemma3_text", "GELU by erf"),
    *(("gemma4_text", name) for name in FURTHER["gemma4_text"] if name != "plain"),
    *(
        (family, name)
        for family in ("glm4_moe", "deepseek_v3", "deepseek_v2")
        for name in FURTHER[family]
        if name != "plain"
    ),
]
FAST = [("llama", "plain"), ("deepseek_v3", "yarn")]


@pytest.fixture(autouse=True)
def compiler(request):
    """The first case is compiled as it is for a server, the others with fewer optimisations."""
    with nullcontext() if request.node.name.endswith("[llama-plain]") else little_optimised():
        yield


@pytest.mark.parametrize(
    ("family", "variant"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_every_family_equals_transformers(checkpoint, compiled, random, family, variant):
    model = checkpoint(family, **(FURTHER | {"gemma3_text": GEMMAS}).get(family, VARIANTS)[variant])
    tokens = random.integers(0, tiny.VOCAB, 176)
    expected = expected_logits(model, tokens)
    logits = forward(opened(model, compiled), tokens, [126, 50])  # All of it in chunks of 32.
    assert expected.std() > 0.5
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("layers", "stacked"),
    [(2, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, False), (1, True)))],
)
def test_biases_everywhere_and_layers_in_a_scan(checkpoint, compiled, random, layers, stacked):
    source = checkpoint("llama", attention_bias=True, mlp_bias=True, num_hidden_layers=layers)
    tokens = random.integers(0, tiny.VOCAB, 40)
    expected = expected_logits(source, tokens)
    executor = opened(source, compiled, stacked=stacked)
    assert executor.describe()["layers"] == ("stacked" if stacked and layers > 1 else "apart")
    assert (forward(executor, tokens, [30, 10]) - expected).abs().max() < 1e-4


SLIDING = [*(["sliding_attention"] * 2 + ["full_attention"]) * 2, "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "changes", "stacked", "pattern", "traced"),
    [
        ("gemma3_text", {"num_hidden_layers": 7, "layer_types": SLIDING}, True, (0, 3, 2), 4),
        pytest.param(
            *("gemma3_text", {"num_hidden_layers": 7, "layer_types": SLIDING}, False, (0, 3, 2), 2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("deepseek_v3", {"num_hidden_layers": 4}, True, (1, 1, 3), 2), marks=pytest.mark.slow
        ),
    ],
)
def test_layers_that_repeat_are_traced_once(
    checkpoint, compiled, random, monkeypatch, family, changes, stacked, pattern, traced
):
    source, counted, real = checkpoint(family, **changes), [], JaxDecoder.layer
    assert Pattern.of(source.architecture) == pattern

    def layer(self, spec, *given):
        counted.append(spec)
        return real(self, spec, *given)

    tokens = random.integers(0, tiny.VOCAB, 40)
    expected = expected_logits(source, tokens)
    monkeypatch.setattr(JaxDecoder, "layer", layer)
    executor = opened(source, compiled, stacked=stacked)
    assert (forward(executor, tokens, [40]) - expected).abs().max() < 1e-4
    assert len(counted) == traced, "in chunks of one size"


@pytest.mark.parametrize(
    "page_size", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 5, 16, 64)]
)
def test_a_tree_sees_its_prefix_and_its_ancestors(checkpoint, compiled, random, page_size):
    """Logits at every node of a tree are those of its path as plain text."""
    source = checkpoint("qwen3")
    small = limits(tiny.VOCAB, context=320, page_size=page_size, pages=1024 // page_size, slots=2)
    executor = opened(source, compiled, small, draft_nodes=13)
    for text, logits in paths_of_a_tree(executor, random, 127, last=1):
        assert (logits - expected_logits(source, text)[127:]).abs().max() < 1e-4


def test_gguf(tmp_path, compiled, random):
    hf = tiny.model("qwen2")
    source = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", "Q8_0"))
    tokens = random.integers(0, tiny.VOCAB, 40)
    expected = expected_logits(source, tokens)
    small = limits(tiny.VOCAB, context=256, max_nodes=256, slots=2)
    assert (forward(opened(source, compiled, small), tokens, [40]) - expected).abs().max() < 1e-4


@pytest.mark.slow
def test_bfloat16_is_near_float32(checkpoint, compiled, random):
    source = checkpoint("qwen3")
    tokens = random.integers(0, tiny.VOCAB, 40)
    narrow, wide = (
        forward(opened(source, compiled, dtype=dtype), tokens, [40])
        for dtype in ("bfloat16", "float32")
    )
    assert 0 < (narrow - wide).std() < 0.03 * wide.std()
