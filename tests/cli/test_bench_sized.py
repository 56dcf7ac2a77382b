"""`forerun bench --random-weights`: a rehearsal on the CPU, and the arithmetic of its table."""

import json

import pytest

from forerun.bench.sized import PUBLISHED, Published, length, speed_ups
from forerun.cli import main


def test_a_rate_gives_back_the_published_length():
    for published in PUBLISHED.values():
        assert length(published.rate(), published.chain) == pytest.approx(published.tau, abs=1e-9)
    assert Published(1.0, 7, "").rate() == pytest.approx(0, abs=1e-9)
    assert length(1.0, 5) == 6


def test_speed_up_is_tokens_over_time():
    free = speed_ups({1: 10.0, 2: 10.0, 8: 10.0}, 0.0)
    for name, published in PUBLISHED.items():
        assert free[name]["guesses"] == 7
        assert free[name]["speed_up"] == pytest.approx(published.tau)
    # Where guesses cost more than they bring, none is made.
    dear = speed_ups({1: 10.0, 2: 30.0, 8: 120.0}, 5.0)
    assert all(gain == {"guesses": 0.0, "speed_up": 1.0} for gain in dear.values())


def test_the_command_measures_and_says_what_is_synthetic(capsys, tmp_path):
    flags = ["--executor", "torch", "--concurrency", "2,1"]
    code = main(["bench", "--random-weights", "tiny", *flags, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert code == 0
    assert "random weights" in printed
    assert "SYNTHETIC" in printed
    found = json.loads((tmp_path / "tiny.json").read_text())
    assert list(found["batches"]) == ["1", "2"]
    for entry in found["batches"].values():
        assert set(entry["step_ms"]) == {"1", "2", "4", "8"}
        assert all(ms > 0 for ms in (*entry["step_ms"].values(), entry["draft_ms"]))
    assert found["acceptance"].startswith("synthetic")
    assert found["floor_ms"] > 0


def test_an_unknown_shape_is_named(capsys):
    code = main(["bench", "--random-weights", "gpt-9", "--executor", "torch"])
    assert code == 2
    assert "no shape is called 'gpt-9'" in capsys.readouterr().err
