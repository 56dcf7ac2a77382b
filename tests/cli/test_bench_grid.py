"""The grid of speculative settings: every combination, beside plain decoding, equal to it."""

import json

import pytest

from forerun.build.engine import load
from forerun.cache_dir import cache_dir
from forerun.cli.main import main
from forerun.executors.toy import ToyExecutor
from forerun.measure import prove, sweep
from forerun.measure.pictures import frontier
from forerun.options.config import EngineConfig

FLAGS = [
    "bench",
    "--speculative-grid",
    "--model",
    "toy",
    "--kv-tokens",
    "8192",
    "--context",
    "1024",
]
SMALL = ["--concurrency", "1,2", "--max-tokens", "16", "--repeats", "2"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def cells(capsys, *more):
    assert main([*FLAGS, *SMALL, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)["cells"]


def test_every_combination_is_measured_and_equal(capsys, tmp_path):
    asked = ("--grid-steps", "2,8", "--grid-tokens", "3,9", "--out", str(tmp_path / "out"))
    found = cells(capsys, *asked)
    keys = ("speculative_num_steps", "speculative_num_draft_tokens")
    seen = {(cell["batch"], *(cell["setting"][key] for key in keys)) for cell in found}
    settings = (2, 3), (2, 9), (8, 9)  # 8 steps with 3 draft tokens are 2 steps with 3.
    assert seen == {(b, *setting) for b in (1, 2) for setting in settings}
    for cell in found:
        assert cell["identical"] == cell["answers"] == 8
        assert 1.0 < cell["acceptance_length"] <= 1 + cell["setting"][keys[0]]
        assert 0.0 < cell["accept_rate"] <= 1.0
        assert cell["low"] <= cell["ratio"] <= cell["high"]
    written = json.loads((tmp_path / "out" / "grid.json").read_text())
    assert written["cells"] == found and written["machine"]


def test_a_difference_is_the_verdict(capsys, monkeypatch):
    real = sweep.answers

    def wrong(target, config, requests, at_once):
        found = real(target, config, requests, at_once)
        if config.speculates:
            found.done[0].tokens[-1] += 1
        return found

    monkeypatch.setattr(sweep, "answers", wrong)
    assert main([*FLAGS, *SMALL, "--grid-steps", "2", "--grid-tokens", "3", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["identical"] for cell in found] == [6, 6]


def test_what_a_method_has_not_is_refused(capsys):
    assert main([*FLAGS, "--grid-topk", "4"]) == 2
    assert "NGRAM has no top-k" in capsys.readouterr().err


def test_a_setting_that_drafts_nothing_is_none(capsys):
    assert main([*FLAGS, "--grid-tokens", "1"]) == 2
    assert "nothing would be drafted" in capsys.readouterr().err


def test_settings_that_are_one_are_measured_once(capsys):
    shape = ("--grid-steps", "2,5,3", "--grid-tokens", "3", "--concurrency", "1")
    (cell,) = cells(capsys, *shape, "--max-tokens", "4", "--repeats", "1")
    assert cell["setting"]["speculative_num_steps"] == 2
    assert main([*FLAGS, *shape, "--max-tokens", "4", "--repeats", "1"]) == 0
    out, err = capsys.readouterr()
    assert "left out: 5 steps with 3 draft tokens make the same trees as 2 steps" in err
    assert " to " not in out, "no interval of one run"


def test_the_best_is_kept(capsys, monkeypatch):
    steps, begin = [], ToyExecutor.begin  # Steps are the clock: each takes a second.
    monkeypatch.setattr(ToyExecutor, "begin", lambda *args: (steps.append(1), begin(*args))[1])
    monkeypatch.setattr(prove, "perf_counter", lambda: float(len(steps)))
    # Long enough for a gain of many steps: when one of two arrives changes one.
    longer = ("--max-tokens", "200")
    found = cells(capsys, *longer, "--grid-steps", "8", "--grid-tokens", "5", "--keep")
    assert all(cell["ratio"] > 1.3 for cell in found), found
    loaded = load(EngineConfig(model="toy", kv_tokens=8192, context=1024))
    loaded.close()
    assert loaded.info["profile"] == "fixed 4 draft tokens, 8 deep"
    assert loaded.config.speculative_num_draft_tokens == 5 and loaded.config.policy == "fixed"


def test_of_one_repeat_all_plain_runs_are_the_noise(capsys):
    """Two settings have two plain runs, by which both are judged; one alone is not kept."""
    once = ("--repeats", "1", "--concurrency", "1", "--grid-tokens", "4")
    found = cells(capsys, *once, "--grid-steps", "2,3")
    assert found[0]["spread"] == found[1]["spread"] > 1.0
    (alone,) = cells(capsys, *once, "--grid-steps", "2", "--keep")
    assert alone["spread"] is None
    assert not list((cache_dir() / "profiles").glob("*.json"))


def test_the_frontier_leaves_out_what_another_beats():
    def cell(ms, length):
        return sweep.Cell(None, 1, 1, 0.0, ms, 1.0, 1.0, 1.0, 0.95, length, 0.0, 1, 1)

    good, better, beaten = cell(4.0, 1.2), cell(6.0, 1.9), cell(7.0, 1.5)
    assert frontier([beaten, better, good]) == [good, better]


def test_what_was_measured_before_an_interruption_is_written(capsys, monkeypatch, tmp_path):
    real, calls = sweep.answers, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 6:  # One reference, two pairs, half of a third.
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(sweep, "answers", interrupted)
    out = ("--out", str(tmp_path / "out"))
    assert main([*FLAGS, *SMALL, *out, "--grid-steps", "2,3,4,5", "--grid-tokens", "9"]) == 130
    written = json.loads((tmp_path / "out" / "grid.json").read_text())
    assert written["interrupted"] and len(written["cells"]) == 2
    assert all(cell["answers"] == 4 == cell["identical"] for cell in written["cells"])
    assert "4 settings, 2 times at each of 1, 2 at once: 16 pairs" in capsys.readouterr().err
