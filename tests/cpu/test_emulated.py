"""Products of instruction sets that this machine may lack, emulated: the bits of plain C++.

What test_build.py's slow tests compare at length with all of csrc, here of the products alone and
compiled without optimisation, so that a change to matmul_wide.inl, matmul_amx.inl or VNNI's part of
simd_avx2.h is met by what always runs.
"""

import ctypes

import numpy as np
import pytest

from forerun.executors.cpu import native
from tests.cpu.test_build import compiler_tool
from tests.cpu.test_products import FOUR_BITS, K_QUANTS, NUMBERS, as_source, matrix_of, multiply
from tests.shape.tree import ROOT

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_QUANTS, *FOUR_BITS)
PACKING = ("quant", "k_quants", "make_q4_k")
"""Sources of csrc that a matrix is packed by."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """emulated_products.cpp as a library, each part with the flags of its own."""
    tool, folder = compiler_tool(), tmp_path_factory.mktemp("emulated")
    include = (f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'cpu'}")
    source = ROOT / "tests" / "cpu" / "emulated_products.cpp"
    parts = {
        "wide": (source, ()),
        **{name: (ROOT / "csrc" / f"{name}.cpp", ()) for name in PACKING},
    }
    if native.kernels("avx2"):
        parts["vnni"] = (source, ("-DEMULATE_VNNI", *tool.AVX2))
    jobs, objects = [], [str(folder / f"{name}.o") for name in parts]
    for (path, flags), output in zip(parts.values(), objects, strict=True):
        command = [*tool.compiler(), *tool.FLAGS, *flags, "-O0", *include, "-Wno-psabi"]
        jobs.append([*command, "-c", str(path), "-o", output])
    made = str(folder / "emulated.so")
    assert tool.run_all(jobs) == [None] * len(jobs)
    assert tool.run_all([[*tool.compiler(), "-shared", *objects, "-o", made]]) == [None]
    return ctypes.CDLL(made)


NATIVE = {"wide": "avx512-vnni-512", "tiles": "avx512-amx", "vnni": "avx-vnni"}
"""Where the machine has the instructions, test_products.py runs them as they are."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (native.kernels(there) is not None))
        for name, there in NATIVE.items()
    ],
)
@pytest.mark.parametrize("kind", QUANTISED)
def test_an_emulated_product_gives_the_bits_of_plain_code(random, library, name, kind):
    """Numbers of rows that are treated in ways of their own, and a last block that is cut."""
    if not hasattr(library, f"{name}_product"):
        pytest.skip("the other instructions of these kernels are AVX2's")
    channels, inputs = 40, 512 if kind in K_QUANTS or kind in FOUR_BITS else 96
    raw = matrix_of(random, kind, channels, inputs)
    source = as_source(kind, raw)
    bias = random.standard_normal(channels).astype(np.float32)
    for rows in (1, 2, 3, 4, 5, 9, 12, 66):
        x = random.standard_normal((rows, inputs)) * np.exp(random.normal(0, 3, (rows, inputs)))
        x = np.ascontiguousarray(x, np.float32)
        plain = multiply("portable", kind, raw, channels, x)
        before = random.standard_normal(plain.shape).astype(np.float32)
        for added, expected in ((None, plain), (bias, before + (plain + bias))):
            out = before.copy()
            getattr(library, f"{name}_product")(
                NUMBERS[kind],
                ctypes.c_void_p(source.ctypes.data),
                channels,
                inputs,
                ctypes.c_void_p(x.ctypes.data),
                rows,
                ctypes.c_void_p(None if added is None else added.ctypes.data),
                ctypes.c_void_p(out.ctypes.data),
            )
            assert np.array_equal(out, expected), rows
