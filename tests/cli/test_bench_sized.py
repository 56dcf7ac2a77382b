"""`forerun bench --random-weights`: a rehearsal on the CPU, and the arithmetic of its table."""

import json

import pytest

from forerun.cli.main import main
from forerun.measure.sized import PUBLISHED, Published, StepSweep, length, lines, measure, speed_ups
from tests.parity.tape import on_tape


def test_a_rate_gives_back_the_published_length():
    for published in PUBLISHED.values():
        assert length(published.rate(), published.chain) == pytest.approx(published.tau, abs=1e-9)
        assert published.tokens(published.chain) == pytest.approx(published.tau, abs=0.01)
        assert published.tokens(0) == 1.0
    assert Published(1.0, 7, "").rate() == pytest.approx(0, abs=1e-9)
    assert length(1.0, 5) == 6


def test_speed_up_is_tokens_over_time():
    free = speed_ups(10.0, {2: 10.0, 4: 10.0, 8: 10.0})
    for name, published in PUBLISHED.items():
        assert free[name]["draft_tokens"] == published.chain
        assert free[name]["speed_up"] == pytest.approx(published.tau, abs=0.01)
    by_position = speed_ups(10.0, {2: 10.0, 8: 10.0})["llama-3.1-8b MT-bench"]
    assert by_position == {"draft_tokens": 1.0, "speed_up": 1.73}  # Of more nothing is published.
    # Where draft tokens cost more than they bring, none is made.
    dear = speed_ups(10.0, {2: 35.0, 8: 155.0})
    assert all(gain == {"draft_tokens": 0.0, "speed_up": 1.0} for gain in dear.values())


@pytest.mark.slow
def test_rounds_with_drafting_are_measured_as_one(monkeypatch):
    on_tape(monkeypatch)
    report = measure("tiny", "cpu", "float32", StepSweep((1, 2), (1, 2, 4), 32, 2, 1 << 16))
    for rows, entry in report["batches"].items():
        assert entry["drafted_within_rounds"] and set(entry["drafted_ms"]) == {2, 4}
        assert 0 < entry["host_share"] < 1
        assert {(rows, 1, 0, 0), (rows, 2, 1, 1), (rows, 4, 3, 1)} <= {
            tuple(size)[:4] for size in report["captured"]
        }
    table = "\n".join(lines(report))
    assert "drafted in the round" in table and "host " in table


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
        for nodes, ms in entry["drafted_ms"].items():
            assert ms == entry["step_ms"][nodes] + (int(nodes) - 1) * entry["draft_ms"]
        assert entry["host_share"] is None and not entry["drafted_within_rounds"]
    assert found["acceptance"].startswith("synthetic")
    assert found["floor_ms"] > 0


def test_an_unknown_shape_is_named(capsys):
    code = main(["bench", "--random-weights", "gpt-9", "--executor", "torch"])
    assert code == 2
    assert "the shape 'gpt-9' is unknown" in capsys.readouterr().err


def test_another_executor_is_not_passed_over_in_silence(capsys):
    assert main(["bench", "--random-weights", "tiny", "--executor", "jax"]) == 2
    said = capsys.readouterr().err
    assert "steps of the torch executor, not of jax" in said and "--launch --executor jax" in said
