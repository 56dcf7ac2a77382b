"""The compiled core under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.

    python -m tests.chaos.sanitize [pytest arguments]

Builds the core with both into a copy of the package, and runs on it tests/cpu, what fuzzes the
n-grams, and what compares recurrent states. The first finding of either ends the process, and so
the run, with its report.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)
"""At -O1 the kernels of one instruction set are compiled in 42 s of processor time, at -O3 in more
than 200 (GCC 12, Zen 3), and there are five.
"""
STATES = "tests/parity/test_recurrent_states.py::"
TESTS = (
    "tests/cpu",
    "tests/drafters/test_ngram.py",
    "tests/drafters/test_ngram_cache.py",
    f"{STATES}test_the_core_and_torch_make_the_same_bits",
    f"{STATES}test_the_states_of_trees_are_the_oracles",
)
LEFT_OUT = "not ready_soon_and_small and not how_far_its_weights and not start_says_what_they_are"
"""How much memory a start takes says nothing where every byte has a shadow, and a chat template's
process, whose memory is limited, has no room for shadows.
"""


def build_tool():
    """csrc/build.py as a module."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "csrc" / "build.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def library(tool, name: str) -> str:
    """Where the compiler has a library; its bare name where it has none."""
    command = [*tool.compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    tool = build_tool()
    # Python has no libstdc++: libasan would find nothing there that throws, and end with that.
    asan, standard = (library(tool, name) for name in ("libasan.so", "libstdc++.so"))
    if not Path(asan).is_absolute():
        print("the compiler has no AddressSanitizer (GCC brings libasan)")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        for name in ("forerun", "tests", "csrc"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("*.so"))
        for name in ("pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        tool.build(Path(folder, "forerun", "executors", "cpu", "_core.so"), FLAGS)
        environment = os.environ | {
            "PYTHONPATH": folder,
            "LD_PRELOAD": f"{asan} {standard}",
            # Python and torch keep what they have until the end; the core is checked for overruns.
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=1",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            "CI": "1",
        }
        line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-s"]
        line += sys.argv[1:] or ["-m", "not slow", "-k", LEFT_OUT, "--timeout=900", *TESTS]
        return subprocess.run(line, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
