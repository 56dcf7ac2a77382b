"""Scripts of bench/ that take the engine apart run on the toy, as far as they name what the type
checker cannot see: what they put in the place of something else, and methods by their names.
"""

import json
import sys

import pytest

from bench import never_slower, structured_output
from forerun.build import engine


@pytest.fixture
def asked(monkeypatch):
    """Sets the arguments; what the script puts in an engine's place is undone."""
    monkeypatch.setattr(engine, "ngram_drafter", engine.ngram_drafter)
    return lambda *words: monkeypatch.setattr(sys, "argv", ["bench", *map(str, words)])


@pytest.mark.parametrize("adversary", [False, True])
def test_speculation_and_none_in_pairs(asked, tmp_path, adversary):
    out, more = tmp_path / "out.json", ["--adversary"] * adversary
    asked(2, "--model", "toy", "--rounds", 2, "--prompts", 1, "--tokens", 8, "--out", out, *more)
    assert never_slower.main() == 0
    found = json.loads(out.read_text())
    assert found["same_tokens"] and found["machine"] and found["command"][1] == "2"
    (row,) = found["rows"]
    assert len(row["ratios"]) == 2
    assert not adversary or row["tokens_per_step"] == 1.0


def test_structured_output_by_kind(asked, monkeypatch, tmp_path):
    out, every = tmp_path / "out.json", structured_output.SPEED
    monkeypatch.setattr(structured_output, "SPEED", {k: every[k] for k in ("choice", "schema")})
    asked("speed", "--model", "toy", "--tokens", 6, "--requests", 1, "--out", out)
    structured_output.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["choice", "schema"]
    assert all(row["constrained on"]["grammar_ms_per_step"] > 0 for row in rows)
