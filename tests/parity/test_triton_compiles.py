"""Triton compiles the kernels for an A100, an H100 or H200 and a B200 here, as it will there."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHS = (80, 90, 100)

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="triton is not installed; `pip install --no-deps triton==3.6.0` lets this run",
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def usage(tmp_path_factory):
    """What is said of every binary, by kernel and architecture."""
    archs = ",".join(map(str, ARCHS))
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.compile_kernels", "--arch", archs],
        cwd=ROOT,
        env={"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = map(json.loads, done.stdout.splitlines())
    return {(line.pop("kernel"), line.pop("arch")): line for line in found}


def test_all_of_them_compile_for_all_architectures(usage):
    assert {arch for _, arch in usage} == set(ARCHS)
    names = {name for name, _ in usage}
    assert len(names) > 30
    float8 = {name for name in names if "float8" in name}
    assert {(name, arch) for name in names for arch in ARCHS} - usage.keys() == {
        (name, 80) for name in float8
    }


def test_no_register_is_spilt(usage):
    spilt = {key: line for key, line in usage.items() if line["STACK"] or line["LOCAL"]}
    assert not spilt


def test_a_model_has_at_most_eight_attention_binaries(usage):
    """Of rows of any size, its head's included: 25 when tiles and parts were constants."""
    for model in ("8b", "8b float8 pages", "135m", "135m float32"):
        lines = [n for n, arch in usage if arch == 90 and n.startswith(f"attend {model},")]
        # A head of other heads than its target's has as many again.
        assert len(lines) >= 1 and 2 * (len(lines) + 1) <= 8, lines


@pytest.mark.parametrize("arch", ARCHS)
def test_attention_fetches_ahead_and_multiplies_on_tensor_cores(usage, arch):
    found = {n: line for (n, a), line in usage.items() if a == arch and n.startswith("attend")}
    assert found
    for name, line in found.items():
        assert line["tensor_cores"], name
        if "float32" not in name:
            assert line["async_copies"] >= 20, name
            assert line["programs"] >= 2, name
