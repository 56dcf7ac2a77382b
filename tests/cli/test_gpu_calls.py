"""The calls of docs/inside/gpu-runbook.md: they are as short as a lent machine takes them, all
that they name exists, and the scripts run here as far as a machine without a GPU goes.
"""

import importlib.util
import json
import re
import shlex
import subprocess
import sys

import pytest
import torch

from bench import gpu, large_engine
from forerun.build import target as built
from forerun.cli.commands import COMMANDS
from tests.parity.tape import on_tape
from tests.shape.tree import ROOT

PAGE = (ROOT / "docs" / "inside" / "gpu-runbook.md").read_text()
CALLS = re.findall(r"(?ms)^## (Call \d): .*?(limit \d+ s).*?\n    (\S.*?)\n", PAGE)

SHELL = ("cat", "cp", "exit", "export", "nvidia-smi", "sha256sum", "tee", "wait")


def parts_of(command):
    """Words of every simple command of a line, without its redirections and its variables."""
    lexer = shlex.shlex(command.replace("2>&1", ""), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands, words = [], []
    for word in lexer:
        if set(word) <= set(";&|<>()"):
            commands, words = [*commands, words], []
        else:
            words.append(word)
    return [words for words in [*commands, words] if words]


def test_there_are_five_and_a_machine_takes_them():
    assert [name for name, _, _ in CALLS] == [f"Call {number}" for number in range(1, 6)]
    limits = [int(limit.split()[1]) for _, limit, _ in CALLS]
    assert max(limits) <= 600 and sum(limits) <= 30 * 60
    for _, limit, command in CALLS:
        assert len(command) <= 2000
        assert "$OUT/" in command or "--out $OUT" in command
        timeouts = map(int, re.findall(r"timeout (\d+)", command))
        assert sum(timeouts) < int(limit.split()[1])
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0


@pytest.mark.parametrize(("name", "command"), [(name, line) for name, _, line in CALLS])
def test_what_a_call_names_exists(name, command):
    named = 0
    for whole in parts_of(command):
        words = whole[2:] if whole[0] == "timeout" else whole
        if words[0] != "python3":
            assert words[0] in SHELL or "/" in words[0]
            continue
        named += 1
        if words[1] != "-m":
            source = (ROOT / words[1]).read_text()
        elif words[2] == "forerun.cli":
            assert words[3] in COMMANDS
            continue
        elif words[2] in ("pip", "pytest"):
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
            continue
        else:
            source = (ROOT / (words[2].replace(".", "/") + ".py")).read_text()
        for flag in (word for word in words if word.startswith("--")):
            assert f'"{flag}"' in source, f"{name}: {words[1]} has no {flag}"
    assert named
    assert importlib.util.find_spec("bench.compile_kernels")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rounds", "formats"])
def test_the_8b_calls_run_with_captures(what, monkeypatch, tmp_path):
    """Every number, events apart: a tape captures, plain torch stands for Triton."""
    on_tape(monkeypatch)
    monkeypatch.setattr(gpu, "kernels_of", lambda *_: [])
    command = ["gpu.py", what, "--device", "cpu", "--shape", "tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu.main() == 0
    report = json.loads((tmp_path / f"{what}.json").read_text())
    assert report["errors"] == {}
    if what == "formats":
        assert report["float8, pages same"]["1 rows, replay_ms"] > 0
        return
    points = [entry for name, entry in report.items() if "(" in name]
    assert len(points) > 8
    for entry in points:
        assert entry["replay_ms"] > 0 and entry["step_ms"] > 0, entry


def test_the_profilers_table_names_what_ran():
    table = gpu.kernels_of(lambda: torch.ones(64, 64) @ torch.ones(64, 64), torch.device("cpu"))
    assert any("mm" in name and calls >= 1 and took > 0 for name, calls, took in table)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["wrong", "prompts"])
def test_engines_of_random_weights_run(what, monkeypatch, tmp_path):
    """With a random head, whose draft tokens a policy leaves out."""
    command = ["large_engine.py", what, "--device", "cpu", "--shape", "tiny"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path)])
    before = built.open_model
    assert large_engine.main() == 0
    assert built.open_model is before
    report = json.loads((tmp_path / f"{what}.json").read_text())
    assert report["errors"] == {}
    if what == "wrong":
        assert report["head, 2 streams"]["texts that differ"] == 0
        assert report["head, 2 streams"]["tokens per step"] < 1.2
    else:
        assert report["triton, tokens/s"]["least"] > 0
