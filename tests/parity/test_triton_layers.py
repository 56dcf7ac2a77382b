"""The kernels between the products, interpreted on the CPU, against plain torch."""

import pytest
import torch

from forerun.executors.torch.attention.kv import KvShape, PagedCache, enter, read
from forerun.executors.torch.decoder.elementwise import PLAIN, Heads
from forerun.executors.torch.decoder.float8 import FLOAT8
from forerun.networks.cache_layer import CacheLayer
from tests.parity.driver import limits
from tests.parity.interpreted import load

layers = load("triton.triton_layers")
DTYPES = [torch.float32, torch.bfloat16]


def same(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    # One rounding of bfloat16 apart, where the sums' order decides it.
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if actual.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype):
    weight = torch.rand(96)
    x = torch.randn(5, 96).to(dtype) * 3
    same(layers.norm(x, weight, 1e-5), PLAIN.norm(x, weight, 1e-5))
    # Query heads: a slice of a wider row.
    heads = torch.randn(4, 6, 96).to(dtype)[:, 1:4]
    same(layers.norm(heads, weight, 1e-5), PLAIN.norm(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm(dtype):
    """The gate is a part of a wider row."""
    actual, weight = torch.randn(5, 3, 24) * 2, torch.rand(24)
    gate = torch.randn(5, 100).to(dtype)[:, 20:92].unflatten(-1, (3, 24))
    wanted = actual, weight, 1e-5, gate
    same(layers.gated_norm(*wanted), PLAIN.gated_norm(*wanted))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype):
    both = torch.randn(3, 2 * 1100).to(dtype) * 4
    same(layers.gate(*both.chunk(2, -1)), PLAIN.gate(*both.chunk(2, -1)))
    same(layers.gelu_gate(*both.chunk(2, -1)), PLAIN.gelu_gate(*both.chunk(2, -1)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 80])
def test_rotate(dtype, size):
    heads = torch.randn(3, 7, size).to(dtype)[:, 2:5]
    cos, sin = torch.randn(2, 3, size // 2)
    same(layers.rotate(heads, cos, sin), PLAIN.rotate(heads, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(dtype):
    x, more = torch.randn(2, 5, 2 * 96).to(dtype)[:, :, 30:126]
    weight = torch.rand(96)
    for actual, expected in zip(
        layers.add_norm(x, more, weight, 1e-5), PLAIN.add_norm(x, more, weight, 1e-5), strict=True
    ):
        same(actual, expected)


def heads_of(dtype, size=16, normed=True, poison=None, late=False):
    """Three query heads and two key heads of five nodes."""
    qkv = (torch.randn(5, 7, size) * 3).to(dtype)
    if poison is not None:
        qkv[1, 3, 3] = qkv[2, 6, 5] = poison
    cos, sin = torch.randn(2, 5, size // 2)
    norms = torch.rand(2, size) if normed else (None, None)
    return Heads(qkv, 2, *norms, 1e-5, (cos, sin), PLAIN, late=late)


def written(heads, kinds):
    """Queries, keys and values by the kernel, then by plain torch."""
    size, slots = heads.qkv.shape[2], torch.tensor([40, 3, 77, 0, 16], dtype=torch.int32)
    for work in (layers.enter, enter):
        cache = PagedCache(
            KvShape((CacheLayer(2, size),) * 2), limits(8), torch.device("cpu"), kinds
        )
        queries = work(heads, cache.layers[1], slots)
        yield queries, torch.stack([read(cached, slots.long()) for cached in cache.layers[1]])
        untouched = torch.ones(cache.null + 1, dtype=torch.bool)
        untouched[slots.long()] = False
        numbers = cache.parts[0].numbers
        assert not numbers[1][:, :, untouched].any() and not numbers[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normed", "late"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("size", [16, 80])
def test_heads_are_normed_turned_and_written(dtype, normed, late, size):
    (queries, held), (plain, expected) = written(heads_of(dtype, size, normed, late=late), dtype)
    same(queries, plain)
    same(held, expected)
    assert held.any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("kinds", [torch.float32, FLOAT8])
def test_what_is_not_finite_stays_in_its_key(poison, kinds):
    (_, actual), (_, expected) = written(heads_of(torch.float32, poison=poison), kinds)
    for keys, values in (actual, expected):
        assert keys[0, 1].isnan().any() and keys[1, 2].isnan().any()
        assert values.isfinite().all() and keys[:, [0, 3, 4]].isfinite().all()
    assert torch.equal(actual.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_written_into_float8(dtype):
    heads = heads_of(dtype, normed=False)
    heads.qkv[3, 3:] = 0.0
    (_, actual), (_, expected) = written(heads, FLOAT8)
    # But for what lies at the edge between two numbers.
    assert ((actual - expected).abs() > 1e-6).float().mean() < 0.02
    _, keys, values = heads.turned()
    wide = torch.stack([keys, values]).float().transpose(1, 2)
    half = wide.abs() / 16 + wide.abs().amax(-1, keepdim=True) / 448 / 512
    assert ((actual - wide).abs() <= 1.001 * half + 1e-6).all()
