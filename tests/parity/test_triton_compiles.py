"""Triton compiles the kernels for an A100, an H100 or H200 and a B200 here, as it will there."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHS = [80, 90, 100]

TURNS = ("rotation", *(f"prepare {nodes} nodes" for nodes in (1, 8, 64)))
PARKED = {(name, arch): 32 for name in TURNS for arch in ARCHS}
PARKED["attend 8b with window and cap, 64 lines", 80] = 8
"""Bytes on the stack. What turns positions has the table of libdevice's cosine for angles above
105,615, a few of a context's first frequencies; 22 to 31 registers are taken, so nothing is spilt.
The cap at 64 lines spills two registers on sm_80; with half the keys a turn none, but then layers
without a cap, which spill none, would have half as well, and no such device was there to time it.
"""

LATENTS = "attend latents, 32 lines"
ALONE = {("attend 135m float32, 64 lines", 100), *((LATENTS, arch) for arch in ARCHS)}
"""One program of eight warps, not two of four: those spill 40 bytes, with more keys a turn more.
The 512 numbers of a latent's value leave 32 lines 180 registers.
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="triton is not installed; `pip install --no-deps triton==3.6.0` lets this run",
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module", params=ARCHS)
def usage(request, tmp_path_factory):
    """What is said of every binary of one architecture, by kernel."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.compile_kernels", "--arch", str(request.param)],
        cwd=ROOT,
        env={"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line.pop("kernel"): line for line in map(json.loads, done.stdout.splitlines())}
    assert {line["arch"] for line in found.values()} == {request.param}
    return found


def test_all_of_them_compile_and_none_spills(usage):
    assert len(usage) > 20
    spilt = {
        (name, line["arch"]): line["STACK"] + line["LOCAL"]
        for name, line in usage.items()
        if line["STACK"] or line["LOCAL"]
    }
    assert spilt.items() <= PARKED.items()


def test_a_model_has_at_most_eight_attention_binaries(usage):
    """Of rows of any size: 25 when tiles and parts were constants. Two sets (a head of other heads
    than its target's, or layers with a window beside layers without) and one that merges for each.
    """
    for model in ("8b", "to float8 8b", "8b with window and cap", "135m", "135m float32"):
        lines = [name for name in usage if name.startswith(f"attend {model},")]
        assert (lines or "float8" in model) and 2 * (len(lines) + 1) <= 8, lines


def test_attention_fetches_ahead_and_multiplies_on_tensor_cores(usage):
    found = {name: line for name, line in usage.items() if name.startswith("attend")}
    assert len(found) >= 12
    for name, line in found.items():
        least = 1 if (name, line["arch"]) in ALONE else 2
        assert line["tensor_cores"] and line["programs"] >= least, name
        few_keys = "float32" in name or "gemma" in name or "latents" in name  # 16 of 576 numbers
        assert line["async_copies"] >= (20 if few_keys else 70), name
