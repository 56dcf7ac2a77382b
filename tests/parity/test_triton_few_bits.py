"""Products with weights in few bits, interpreted, against their reference and by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.executors.torch.decoder.elementwise import PLAIN
from forerun.executors.torch.decoder.few_bits import (
    FEW,
    GATED,
    IN_TORCH,
    FewBitsProducts,
    few_bits_product,
    loaded,
    rounded,
)
from forerun.executors.torch.decoder.few_bits_layers import (
    FewBitsLinear,
    GatedFeedForward,
    feed_forward,
)
from forerun.executors.torch.decoder.layers import FeedForward
from tests.covering import covering, every, some_of, values
from tests.parity.driver import first_is_fast
from tests.parity.grouped import grouped
from tests.parity.interpreted import load
from tests.parity.tape import Watch

kernels, layers = load("triton.triton_few_bits"), load("triton.triton_layers")


def weight(*args, **changes):
    made, wide = grouped(*args, **changes)
    return loaded([made], torch.device("cpu")), wide


KINDS = [("int4", True), ("int4", False), ("int8", True), ("int8", False), ("float8", False)]
SHAPES = [((70, 256), 128), ((33, 64), 32), ((129, 640), 64), ((64, 1024), 256), ((20, 200), 200)]
SHAPES += [((40, 1500), 1500)]


@pytest.mark.parametrize(("form", "sized", "rows"), covering(every(KINDS, SHAPES, [1, 17, 33])))
def test_the_kernel_is_its_reference_and_the_formats_definition(form, sized, rows):
    (kind, zeros), (shape, group) = form, sized
    made, wide = weight(kind, shape, group, zeros)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
    expected = (x.double() @ wide.t()).float()
    for product in (kernels.product, few_bits_product):
        actual = product(x, made, None)
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-5)
    assert not made.through.any()


@pytest.mark.parametrize("shape", [(70, 256), (33, 40), (20, 200)])
@pytest.mark.parametrize("rows", [1, 33, FEW + 7])
def test_weights_rounded_to_float8_are_read_by_the_kernel(shape, rows):
    made, x = rounded(torch.randn(shape)), torch.randn(rows, shape[1])
    actual = kernels.product(x, made, None)
    torch.testing.assert_close(actual, few_bits_product(x, made, None), atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("rows", [3, 40, FEW + 7])
def test_columns_in_an_order_biases_and_many_rows(kind, rows):
    made, wide = weight(kind, (70, 320), 64, True, ordered=True)
    x, bias = torch.randn(rows, 320), torch.randn(70)
    expected = (x.double() @ wide.t() + bias).float()
    for product in (kernels.product, few_bits_product):
        torch.testing.assert_close(product(x, made, bias), expected, atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize(("kind", "zeros"), KINDS)
def test_many_rows_are_multiplied_a_part_of_the_weight_at_a_time(kind, zeros, monkeypatch):
    made, wide = weight(kind, (150, 200), 200, zeros)
    monkeypatch.setattr(kernels, "SCRATCH", 4 * 200 * 70)
    x = torch.randn(FEW + 1, 200)
    expected = (x.double() @ wide.t()).float()
    torch.testing.assert_close(kernels.product(x, made, None), expected, atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize(("kind", "zeros"), KINDS)
def test_sixteen_bits_hold_the_numbers_exactly(kind, zeros):
    """What is multiplied is what the format means: rows are rounded, weights are not."""
    made, wide = weight(kind, (64, 256), 128, zeros)
    x = torch.randn(5, 256).bfloat16()
    expected = x.double() @ wide.t()
    for product in (kernels.product, few_bits_product):
        actual = product(x, made, None)
        assert actual.dtype == torch.bfloat16
        # Half a step of the result, and what 256 sums in float32 may be off by.
        assert ((actual.double() - expected).abs() <= expected.abs() / 256 + 1e-4).all()


class FixedDot:
    """Products of the interpreter in the order of the columns: what NumPy's library does depends on
    the number of rows, tensor cores do not.
    """

    def __init__(self, monkeypatch):
        builder = kernels.triton.runtime.interpreter.InterpreterBuilder
        whole = builder.create_dot

        def each_row(self, a, b, d, *rest):
            product = np.zeros((a.data.shape[0], b.data.shape[1]), np.float32)
            left, right = a.data.astype(np.float32), b.data.astype(np.float32)
            for column in range(left.shape[1]):
                product += left[:, column, None] * right[column]
            made = whole(self, a, b, d, *rest)
            made.data = product + d.data
            return made

        monkeypatch.setattr(builder, "create_dot", each_row)


def alike_in_company(product, made):
    x = torch.randn(70, 2048)
    whole = product(x, made, None)
    for first, last in ((0, 1), (5, 6), (3, 19), (16, 33), (69, 70), (0, 65)):
        assert torch.equal(product(x[first:last].clone(), made, None), whole[first:last]), first


@pytest.mark.parametrize("kind", first_is_fast(["int4", "int8", "float8"]))
def test_a_rows_bits_do_not_depend_on_its_company(kind, monkeypatch):
    FixedDot(monkeypatch)
    made, _ = weight(kind, (80, 2048), 128, False)
    assert kernels.splits_of(made)[0] > 2
    alike_in_company(kernels.product, made)


def test_a_rows_bits_do_not_depend_on_its_company_on_the_cpu():
    alike_in_company(few_bits_product, weight("int4", (80, 2048), 128, True)[0])


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "activation"),
    some_of(
        [
            (rows, *shape, activation)
            for rows, shape, activation in every([1, 16, 17, 33], [(140, 256), (66, 2048)], GATED)
        ],
        lambda cell: values((cell[0], cell[1:3], cell[3])),
    ),
)
def test_a_gate_in_the_product_is_the_product_and_then_the_gate(
    activation, outputs, inputs, rows, monkeypatch
):
    """To the bit, whether columns are split or not."""
    FixedDot(monkeypatch)
    made, wide = weight("int4", (outputs, inputs), 128, True)
    assert (kernels.splits_of(made)[0] > 1) == (inputs > 1000)
    x, bias = torch.randn(rows, inputs) / 8, torch.randn(outputs)
    actual = kernels.gated_product(x, made, bias, activation)
    gate = {"silu": layers.gate, "gelu_tanh": layers.gelu_gate, "clamped_silu": layers.clamped_gate}
    apart = kernels.product(x, made, bias)
    assert torch.equal(actual, gate[activation](*apart.chunk(2, -1)))
    gate = PLAIN.gate_for(activation)
    expected = gate(*(x.double() @ wide.t() + bias).float().chunk(2, -1))
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
    assert not made.through.any()


def test_many_rows_are_gated_behind_the_library():
    made, _ = weight("int4", (66, 64), 64, True)
    x = torch.randn(FEW + 1, 64)
    expected = PLAIN.gate(*few_bits_product(x, made, None).chunk(2, -1))
    actual = kernels.gated_product(x, made, None, "silu")
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_a_feed_forward_has_its_gate_in_the_product():
    """Where there is such a product, and the activation is one that it knows."""
    gate_up, _ = weight("int4", (96, 64), 64, True)
    down, _ = weight("int4", (64, 48), 48, True)
    x = torch.randn(5, 64)
    fast, slow = (FewBitsProducts(kernels.product, kernels.gated_product), IN_TORCH)
    for activation, kind in (("silu", GatedFeedForward), ("gelu", FeedForward)):
        gate, outputs = PLAIN.gate_for(activation), []
        for by in (fast, slow):
            made = [FewBitsLinear(each, None, by) for each in (gate_up, down)]
            network = feed_forward(tuple(made), gate, activation)
            assert type(network) is (kind if by is fast else FeedForward)
            outputs.append(network(x, ()))
        torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)


def test_columns_are_split_by_the_weight_alone():
    """4096 outputs are 64 tiles, for which 4096 columns are split among 8 programs; wide weights
    have tiles enough, and no program has fewer than LEAST columns.
    """
    split_of = {}
    for outputs, inputs in ((4096, 4096), (4096, 14_336), (28_672, 4096), (512, 1024), (64, 256)):
        made, _ = weight("int4", (1, inputs), 128, True)
        numbers = made.numbers.expand(-1, outputs, -1)
        splits, each = kernels.splits_of(replace(made, shape=(outputs, inputs), numbers=numbers))
        assert (splits - 1) * each < inputs // 128 <= splits * each
        split_of[outputs, inputs] = splits
    assert list(split_of.values()) == [8, 8, 1, 2, 1]


def test_a_product_only_launches():
    made, _ = weight("int4", (70, 320), 64, True, ordered=True)
    for rows in (1, FEW + 1):
        with Watch():
            few_bits_product(torch.randn(rows, 320), made, None)
