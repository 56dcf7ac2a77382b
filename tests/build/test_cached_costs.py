"""Costs of steps are timed by the first starts; their medians count afterwards."""

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

from forerun.build import cached_costs, target
from forerun.build.cached_costs import STARTS, cached_or_measured
from forerun.build.target import open_target
from forerun.control.step_costs import StepCosts
from forerun.executors import cpu
from forerun.options.config import EngineConfig

FACTS = ["a model", 7]


def costs(ms, nodes=(1, 2, 8)):
    return StepCosts(
        nodes, tuple(ms * (1.0 + node / 10) for node in nodes), ms / 4, ms / 8, ms / 16, True
    )


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """Start with what each measurement returns; how many were made counts."""
    monkeypatch.setattr(cached_costs, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(cached_costs, "_busy", lambda: False)
    made = []

    def start(measured, facts=FACTS):
        def measure():
            made.append(measured)
            return measured

        return cached_or_measured(facts, measure)

    start.made = made
    return start


def test_medians_of_the_first_starts_count(starts):
    every = [costs(ms) for ms in (4.0, 40.0, 5.0)]
    assert [starts(one) for one in every] == every
    assert STARTS == 3
    assert starts(costs(100.0)) == costs(5.0) and len(starts.made) == 3


def test_each_number_is_a_median_of_its_own(starts):
    one, two, three = costs(4.0), costs(5.0), costs(6.0)
    for measured in (replace(one, attend_ms=9.0), two, replace(three, follow_ms=0.0)):
        starts(measured)
    assert starts(one) == replace(two, attend_ms=1.5, follow_ms=0.25)


def test_other_facts_are_measured_by_themselves(starts):
    for ms in (4.0, 5.0, 6.0):
        starts(costs(ms))
    assert starts(costs(7.0), ["a model", 8]) == costs(7.0)


def test_they_are_measured_again_when_they_are_old(starts, monkeypatch):
    now = 1_000.0
    monkeypatch.setattr(cached_costs.time, "time", lambda: now)
    for ms in (4.0, 5.0, 6.0):
        starts(costs(ms))
    now += cached_costs.SECONDS - 1.0
    assert starts(costs(7.0)) == costs(5.0)
    now += 1.0
    assert starts(costs(7.0)) == costs(7.0)
    now = 999.0  # A clock that was set back.
    assert starts(costs(8.0)) == costs(8.0)


def test_a_busy_machine_is_not_remembered(starts, monkeypatch):
    for ms in (4.0, 5.0):
        starts(costs(ms))
    monkeypatch.setattr(cached_costs, "_busy", lambda: True)
    assert starts(costs(70.0)) == costs(70.0)
    monkeypatch.setattr(cached_costs, "_busy", lambda: False)
    assert starts(costs(6.0)) == costs(6.0)
    assert starts(costs(9.0)) == costs(5.0)


def test_a_measurement_of_other_counts_is_the_first_again(starts):
    """A slow start times fewer."""
    for ms in (4.0, 5.0):
        starts(costs(ms))
    for ms in (6.0, 7.0, 8.0):
        assert starts(costs(ms, (1, 64))) == costs(ms, (1, 64))
    assert starts(costs(9.0)) == costs(7.0, (1, 64))


GOOD = asdict(costs(4.0))


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff", b"[", b"7", b'{"at": 1}', b'[{"at": 1}]', b"[[]]", b"[[0.0, 1]]"),
        *(
            json.dumps([[0.0, GOOD | change]] * 3).encode()
            for change in (
                {"verify_ms": [1.0, 2.0]},
                {"verify_ms": [0.0, 1.0, 2.0]},
                {"attend_ms": -1.0},
                {"draft_ms": float("inf")},
                {"nodes": "abc"},
            )
        ),
    ],
)
def test_a_damaged_file_counts_as_none(starts, tmp_path, monkeypatch, content):
    monkeypatch.setattr(cached_costs.time, "time", lambda: 1.0)
    starts(costs(4.0))
    (file,) = (tmp_path / "costs").iterdir()
    file.write_bytes(content)
    for ms in (5.0, 6.0, 7.0):
        assert starts(costs(ms)) == costs(ms)
    assert starts(costs(9.0)) == costs(6.0)


def test_what_cannot_be_written_is_measured_each_time(starts, tmp_path):
    (tmp_path / "costs").write_text("a file where the folder should be")
    for ms in (4.0, 5.0, 6.0, 7.0, 8.0):
        assert starts(costs(ms)) == costs(ms)


def test_a_full_disk_keeps_no_part_of_a_file(starts, tmp_path, monkeypatch):
    def part(path, content):
        with path.open("wb") as file:
            file.write(content[:7])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", part)
    assert starts(costs(4.0)) == costs(4.0)
    assert [*(tmp_path / "costs").iterdir()] == []


def test_a_system_that_does_not_say_how_busy_it_is_keeps_nothing(starts, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cached_costs, "cache_dir", lambda: tmp_path)

    def unknown():
        raise OSError("Load averages are unobtainable")

    monkeypatch.setattr(cached_costs.os, "getloadavg", unknown, raising=False)
    assert starts(costs(4.0)) == costs(4.0)
    assert not (tmp_path / "costs").exists()


def test_few_files_are_kept(starts, tmp_path, monkeypatch):
    monkeypatch.setattr(cached_costs, "FILES", 2)
    for model in range(4):
        starts(costs(4.0), ["a model", model])
    assert len([*(tmp_path / "costs").iterdir()]) == 2


COMMON = EngineConfig(
    executor="cpu", policy="adaptive", speculative_algorithm="EAGLE3", kv_tokens=2048, threads=1
)
ALONE = {
    "speculative_algorithm": "STANDALONE",
    "speculative_draft_model_path": "smollm2-135m",
    "draft_on_error": "stop",
}


@pytest.fixture(scope="module")
def facts_of():
    """Return what names the file of the costs of a start."""

    @cache
    def facts(**changes):
        every = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                target, "cached_or_measured", lambda facts, _: every.append(facts) or costs(4.0)
            )
            open_target(replace(COMMON, **changes)).executor.shutdown()
        return json.dumps(every)

    return facts


@pytest.mark.skipif(bool(cpu.available()), reason="no compiled core on this machine")
@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ({}, {"kv_tokens": 4096, "context": 1536, "speculative_num_steps": 4}, True),
        ({}, {"kv_tokens": 256}, False),
        (ALONE, ALONE | {"speculative_token_map": "map.json"}, False),
    ],
)
def test_all_that_step_times_depend_on_names_the_file(
    facts_of, tmp_path, monkeypatch, one, two, same
):
    """Of lengths, what is timed."""
    (tmp_path / "map.json").write_text(json.dumps([*range(300)]))
    monkeypatch.chdir(tmp_path)
    assert (facts_of(**one) == facts_of(**two)) == same
