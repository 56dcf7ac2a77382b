"""Scripts of bench/ that take the engine apart run on the toy, as far as they name what the type
checker cannot see: what they put in the place of something else, and methods by their names.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import never_slower, records, steps, structured_output
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


@pytest.mark.parametrize("name", ["steps_onnx", "steps_llamacpp", "server_openvino"])
def test_a_peers_script_tells_its_arguments_without_the_peer(name):
    script = Path(__file__).parents[2] / "bench" / "peers" / f"{name}.py"
    told = subprocess.run(
        [sys.executable, script, "--help"], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stderr) == (0, "") and "usage:" in told.stdout


def test_an_error_of_forerun_ends_a_script_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["steps.py", "nosuchmodel", "--nodes", "1"])
    with pytest.raises(SystemExit) as ended:
        records.ended(steps.main)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.startswith("there is no model 'nosuchmodel'")
    assert "Traceback" not in told


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (None, 7)])
def test_how_a_script_ends(error, code):
    def main():
        if error:
            raise error
        return code

    with pytest.raises(SystemExit) as ended:
        records.ended(main)
    assert ended.value.code == code
