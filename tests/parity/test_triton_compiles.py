"""Triton compiles the kernels for an H100 or H200 here, as it will there."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = [
    *("attend 8b, one node", "attend 8b, tree", "attend 135m"),
    *("attend 8b, tree, window and cap", "merge", "choose"),
    *("attend 8b, float8 pages", "write float8"),
    *("pick", "norm", "gate", "gelu gate", "rotate", "write"),
]

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None,
    reason="triton is not installed; `pip install --no-deps triton==3.6.0` lets this run",
)


@pytest.fixture(scope="module")
def usage(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.compile_kernels", *CASES],
        cwd=ROOT,
        env={"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {line.pop("kernel"): line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES)
def test_no_register_is_spilt(usage, case):
    assert usage[case]["STACK"] == usage[case]["LOCAL"] == 0


@pytest.mark.parametrize("case", CASES[:4])
def test_attention_fetches_ahead_and_multiplies_on_tensor_cores(usage, case):
    assert usage[case]["async_copies"] >= 20
    assert usage[case]["tensor_cores"]
    assert usage[case]["shared"] <= 120_000  # Two programs of a multiprocessor.
