"""What start-up compiles and captures, so that nothing is later."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.parity.interpreted import load

ROOT = Path(__file__).parents[2]
compiling = load("triton.compile_ahead")

STEPS = 2_000
BINARIES = {
    **dict.fromkeys(("_norm", "_add_norm", "_gate", "_enter", "_merge", "_choose"), 1),
    **dict.fromkeys(("_cut", "_rotation", "_candidates", "_grow", "_inputs"), 1),
    # By nodes of a row, to the next power of two; by tiles of 16, 32 and 64 queries.
    **dict.fromkeys(("_prepare", "_walk", "_resume", "_leave"), 4),
    **{"_attend": 3, "_follow": 2, "_move": 2, "_edit": 2},
}
"""Of a model with a draft head whose chains are up to 3 long: rows are no part of any key."""


@pytest.mark.slow
def test_mixed_steps_compile_and_capture_nothing():
    """Rows and nodes of any number, sampling parameters, grammars, reports, drafts in rounds, and
    prompts in between.
    """
    command = [sys.executable, "-m", "tests.parity.kernel_keys", "--steps", str(STEPS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["late"] == [] and report["captures"] == 0
    assert report["declared"] == BINARIES
    assert report["rounds"] + report["eager"] == STEPS < 12 * report["rounds"] / 10
    assert report["captured"] == [report["ready"]] * 2
    assert 30 < report["wanted"] <= report["ready"] + 1 and report["ready"] <= 50


class Compiler:
    """In place of Triton's: a binary is made when another one is being made too."""

    def __init__(self, keys):
        self.keys, self.made, self.launched = keys, [], []
        self.together = threading.Barrier(2, timeout=60)

    def ran(self, kernel, *args, warmup):
        """As JITFunction.run: the first launch of a key compiles it."""
        if not warmup:
            self.launched.append(args)
            return
        cache = self.keys.setdefault(kernel, {})
        if args not in cache:
            mode = compiling.triton.runtime._async_compile.active_mode.get()

            def make():
                self.together.wait()
                self.made.append(args)
                return args

            mode.submit((kernel, args), make, lambda made: cache.__setitem__(args, made))


def test_binaries_are_compiled_together_and_once(monkeypatch):
    compiler, progress = Compiler({}), []
    kernel = compiling.triton_layers._norm
    monkeypatch.setattr(compiling, "cores", lambda: 2)

    def compiled(self, *args, grid, warmup):
        compiler.ran(self, *args, warmup=warmup)

    monkeypatch.setattr(type(kernel), "run", compiled)

    def work():
        for number in (1, 2, 3, 4, 2, 1):
            kernel[1,](number)
        assert compiling.torch.empty(1000).count_nonzero() == 0

    compiling.compile_ahead(work, lambda *news: progress.append(news))
    assert sorted(compiler.made) == [(1,), (2,), (3,), (4,)] and not compiler.launched
    assert progress == [(done, 4) for done in (1, 2, 3, 4)]
    assert compiler.keys[kernel] == {(n,): (n,) for n in (1, 2, 3, 4)}
    kernel[1,](1)
    assert compiler.launched == [(1,)]


def test_what_cannot_be_compiled_says_so(monkeypatch):
    kernel = compiling.triton_layers._norm

    def run(self, *args, grid, warmup):
        def make():
            raise ValueError("no such register")

        mode = compiling.triton.runtime._async_compile.active_mode.get()
        mode.submit(args, make, lambda made: None)

    monkeypatch.setattr(type(kernel), "run", run)
    with pytest.raises(ValueError, match="no such register"):
        compiling.compile_ahead(lambda: kernel[1,](1), lambda *_: None)
    assert "run" not in vars(kernel)
