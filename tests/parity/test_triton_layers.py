"""The kernels between the products, interpreted on the CPU, against plain torch."""

import pytest
import torch

from forerun.executors.torch.kv import KvShape, PagedCache, read
from forerun.executors.torch.layers import FLOAT8, PLAIN
from tests.parity.driver import limits
from tests.parity.interpreted import load

layers = load("triton_layers")
DTYPES = [torch.float32, torch.bfloat16]


def same(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    # One rounding of bfloat16 apart, where the sums' order decides it.
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if found.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype):
    weight = torch.rand(96)
    x = torch.randn(5, 96).to(dtype) * 3
    same(layers.norm(x, weight, 1e-5), PLAIN.norm(x, weight, 1e-5))
    # Query heads: a slice of a wider row.
    heads = torch.randn(4, 6, 96).to(dtype)[:, 1:4]
    same(layers.norm(heads, weight, 1e-5), PLAIN.norm(heads, weight, 1e-5))


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
@pytest.mark.parametrize("poison", [None, torch.nan, torch.inf])
def test_write(dtype, poison):
    keys, values = torch.randn(2, 5, 9, 16).to(dtype)[:, :, 3:5]
    if poison is not None:
        keys[1, 0, 3] = values[2, 1, 5] = poison
    found = []
    for fast in (True, False):
        cache = PagedCache(KvShape(2, 2, 16), limits(8), torch.device("cpu"), dtype)
        if fast:
            layers.write(keys, values, cache.of_layer(1), cache.scratch_begin)
        else:
            cache.write(1, keys, values)
        found.append(cache._kv)
    torch.testing.assert_close(*found, equal_nan=True, rtol=0, atol=0)
    assert bool(found[0].isnan().any()) == (poison is not None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [None, torch.nan, torch.inf])
def test_write_into_float8(dtype, poison):
    keys, values = (torch.randn(2, 5, 9, 16) * 30).to(dtype)[:, :, 3:5]
    keys[3, 1] = 0.0
    if poison is not None:
        keys[1, 0, 3] = values[2, 1, 5] = poison
    found = []
    for fast in (True, False):
        cache = PagedCache(KvShape(2, 2, 16), limits(8), torch.device("cpu"), FLOAT8)
        if fast:
            layers.write(keys, values, cache.of_layer(1), cache.scratch_begin)
        else:
            cache.write(1, keys, values)
        place = cache.scratch_begin + torch.arange(5)
        found.append(torch.stack([read(staging, place) for staging in cache.of_layer(1)]))
    torch.testing.assert_close(*found, equal_nan=True, rtol=0, atol=0)
    rows = found[0].transpose(1, 2)
    wide = torch.stack([keys, values]).float().nan_to_num(0, 0, 0)
    half = wide.abs() / 16 + wide.abs().amax(-1, keepdim=True) / 448 / 512
    assert ((rows - wide).abs() <= 1.001 * half)[rows.isfinite()].all()
    if poison is None:
        assert rows.isfinite().all()
    else:  # As in any other format: all of the key, nothing of the values.
        assert rows[0, 1, 0].isnan().all() and rows[0, 2, 1].isnan().all()
        assert rows[1].isfinite().all() and int(rows.isnan().any(-1).sum()) == 2
