"""The grouped product of experts, interpreted on the CPU, against each expert's own product."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.executors.torch.decoder.elementwise import PLAIN, clamped_swiglu
from forerun.executors.torch.decoder.experts import Mixture, routes
from forerun.executors.torch.decoder.float8 import float8_rows
from forerun.executors.torch.decoder.grouped import Pairs, Stacked
from forerun.executors.torch.decoder.layers import Linear
from forerun.executors.torch.decoder.weights import Weights
from forerun.networks.layer_spec import Router
from tests.models import tiny
from tests.parity.interpreted import load
from tests.parity.tape import Watch
from tests.references.kernels import grouped_loop

experts, layers = load("triton.triton_experts"), load("triton.triton_layers")


def stacked(kind, count, outputs, inputs):
    numbers = torch.randn(count, outputs, inputs) / inputs**0.5
    bias = torch.randn(count, outputs) if kind == "bias" else None
    if kind != "float8":
        return Stacked(numbers, None, bias)
    rows = float8_rows(numbers)
    return Stacked(rows.numbers, rows.scale[..., 0], bias)


def by_hand(x, matrices, chosen):
    """[M*k,out] of each pair on its own, in float64."""
    rows = []
    for row, mine in zip(x.double(), chosen, strict=True):
        for expert in mine.tolist():
            product = matrices.numbers[expert].double() @ row
            if matrices.scale is not None:
                product = product * matrices.scale[expert]
            rows.append(product + (0 if matrices.bias is None else matrices.bias[expert]))
    return torch.stack(rows).float()


@pytest.mark.parametrize("kind", ["plain", "bias", "float8"])
@pytest.mark.parametrize(
    ("rows", "count", "k", "outputs", "inputs"),
    [(1, 4, 2, 24, 40), (5, 3, 3, 70, 64), (40, 2, 1, 33, 130), (9, 16, 4, 64, 96)],
)
def test_each_pair_is_its_experts_product(kind, rows, count, k, outputs, inputs):
    torch.manual_seed(rows)
    x, matrices = torch.randn(rows, inputs), stacked(kind, count, outputs, inputs)
    chosen = torch.randn(rows, count).topk(k, -1)[1]
    pairs, expected = Pairs.of(chosen, count), by_hand(x, matrices, chosen)
    for product in (experts.grouped, grouped_loop):
        torch.testing.assert_close(product(x, matrices, pairs, k), expected, atol=2e-5, rtol=2e-5)


def test_a_second_product_reads_what_the_first_gave():
    x, matrices = torch.randn(12, 32), stacked("plain", 5, 16, 32)
    pairs = Pairs.of(torch.randint(0, 5, (4, 3)), 5)
    torch.testing.assert_close(
        experts.grouped(x, matrices, pairs, 1), grouped_loop(x, matrices, pairs, 1)
    )


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("wanted", ["all one", "each another", "random"])
def test_tiles_hold_every_pair_once(rows, wanted):
    count, pairs = 7, 150
    chosen = {
        "all one": torch.full((pairs, 1), 3),
        "each another": torch.arange(pairs)[:, None] % count,
        "random": torch.randint(0, count, (pairs, 1)),
    }[wanted]
    made = Pairs.of(chosen, count)
    seen = []
    for expert, first, end in experts.tiles_of(made, rows).tolist():
        if expert >= 0:
            mine = made.order[first:end]
            assert 0 < len(mine) <= rows
            assert (made.expert[mine] == expert).all()
            seen += mine.tolist()
    assert sorted(seen) == list(range(pairs))


def test_tiles_grow_with_the_rows_of_an_expert():
    assert [experts.rows_for(n, 8) for n in (1, 128, 300, 1000, 9000)] == [16, 16, 32, 64, 64]


def test_the_clamped_gate_is_its_reference():
    gate, up = torch.randn(2, 5, 90) * 8
    expected = clamped_swiglu(gate, up)
    torch.testing.assert_close(layers.clamped_gate(gate, up), expected, atol=1e-6, rtol=1e-6)
    assert (expected[(gate > 7) & (up > 7)] == expected[(gate > 7) & (up > 7)][0]).all()


ROUTERS = [
    Router(),
    Router(normalised=True),
    Router("sigmoid", True, 2.5, correction=True, groups=4, topk_group=2),
    Router("sigmoid", correction=True, groups=2, topk_group=1),
]


@pytest.mark.parametrize("router", ROUTERS)
def test_routes_by_hand(router):
    """Each row on its own, as the papers say it."""
    torch.manual_seed(1)
    logits, correction = torch.randn(30, 8), torch.randn(8) if router.correction else None
    weights, chosen = routes(logits, router, 3, correction)
    for row in range(30):
        line = logits[row].double().numpy()
        softmax = np.exp(line) / np.exp(line).sum()
        scores = softmax if router.scores == "softmax" else 1 / (1 + np.exp(-line))
        ranked = scores + (0 if correction is None else correction.numpy())
        groups = ranked.reshape(router.groups, -1)
        sums = np.sort(groups, 1)[:, -2:].sum(1)
        for group in np.argsort(sums)[: router.groups - router.topk_group]:
            groups[group] = -np.inf
        best = np.argsort(-groups.ravel())[:3]
        assert chosen[row].tolist() == best.tolist()
        actual = scores[best] / (scores[best].sum() if router.normalised else 1) * router.scale
        np.testing.assert_allclose(weights[row].numpy(), actual, rtol=1e-5)


def test_a_mixture_that_only_launches_never_waits(checkpoint):
    """Where a device has the grouped product, the host need not know which rows go where."""
    source = checkpoint("qwen3_moe")
    weights = Weights(source, torch.device("cpu"), torch.float32, Linear)
    about = source.architecture.layer_specs[0].feed_forward
    parts = replace(PLAIN, grouped=grouped_loop)
    launched = Mixture(weights, "model.layers.0.mlp", about, parts)
    waiting = Mixture(weights, "model.layers.0.mlp", about, PLAIN)
    x = torch.randn(9, tiny.config("qwen3_moe").hidden_size)
    with Watch():
        fast = launched(x, ())
    torch.testing.assert_close(fast, waiting(x, ()), atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError, match="waits"), Watch():
        waiting(x, ())
