"""`forerun eval`, where it is interrupted."""

import json
from pathlib import Path

import pytest

from forerun.cli.eval import _named, _promised
from forerun.cli.main import INTERRUPTED, main
from forerun.measure import acceptance

LINE = ["eval", "toy", "--count", "1", "--tokens", "8", "--temperatures", "0,1", "--json"]


@pytest.mark.parametrize(("served", "known"), [(0, None), (2, [0.0]), (3, [0.0])])
def test_what_is_known_is_shown(served, known, capsys, monkeypatch):
    """Each temperature is served plain and with drafts: the third pass is plain again."""
    real, passes = acceptance.serve, []

    def serve(*how):
        passes.append(how)
        if len(passes) > served:
            raise KeyboardInterrupt
        return real(*how)

    monkeypatch.setattr(acceptance, "serve", serve)
    assert main(LINE) == INTERRUPTED
    printed = capsys.readouterr()
    findings = json.loads(printed.out)["findings"] if known else []
    assert (printed.out == "") == (not known)
    assert [one["temperature"] for one in findings] == (known or [])
    assert "interrupted" in printed.err


def test_two_sets_of_one_name_are_refused(tmp_path, capsys):
    for folder in ("a", "b=c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_text('{"prompt": "Hi"}')
    both = [str(tmp_path / folder / "x.jsonl") for folder in ("a", "b=c")]
    assert main([*LINE, "--set", both[0], "--set", both[1]]) == 2
    assert "two sets are called x; give each a name of its own" in capsys.readouterr().err
    assert _named(both[1]) == ("x", Path(both[1])) and _named(f"y={both[0]}")[0] == "y"


def test_a_damaged_file_of_the_trainer_costs_no_result(tmp_path, capsys):
    for text in ("", "[]", "{}", '{"best_simulated_length": 1.5}'):
        (tmp_path / "metrics.json").write_text(text)
        promised = _promised(str(tmp_path / "draft"))
        assert promised == (1.5 if "1.5" in text else None)
        assert ("cannot be read" in capsys.readouterr().err) == (promised is None)
