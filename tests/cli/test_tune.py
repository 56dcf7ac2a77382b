import json
from dataclasses import replace

import pytest

from forerun.build import tuned
from forerun.build.engine import load
from forerun.build.target import open_target
from forerun.build.tuned import Setting
from forerun.cli import tune
from forerun.cli.main import main
from forerun.errors import ConfigError
from forerun.executors.toy import ToyExecutor
from forerun.measure import prove
from forerun.measure.sweep import OFF, Cell, Sweep, best, halving, verdict
from forerun.measure.workload import read_prompts
from forerun.options.config import EngineConfig

TOY = EngineConfig(model="toy", policy="adaptive", kv_tokens=8192, context=1024, max_sequences=8)
FOUR, ONE = Setting("NGRAM", 5, 4, "fixed"), Setting("NGRAM", 2, 1, "fixed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class CountedToy(ToyExecutor):
    """Its steps are the clock: each takes a second, whatever it holds."""

    steps = 0

    def begin(self, plan, trees, masks=None):
        self.steps += 1
        return super().begin(plan, trees, masks)


def test_free_guesses_win_and_off_is_always_there(monkeypatch):
    target = open_target(TOY)
    toy = CountedToy(target.memory.limits)
    monkeypatch.setattr(prove, "perf_counter", lambda: float(toy.steps))
    target = replace(target, executor=toy)
    sweep = Sweep(tuple(read_prompts()), settings=(FOUR, ONE), batches=(1, 2), tokens=80)
    cells = halving(target, sweep)
    target.close()
    assert best(cells)[0] == FOUR == verdict(cells)[0]
    assert {(cell.setting, cell.batch) for cell in cells} == {
        (setting, batch) for setting in (OFF, FOUR, ONE) for batch in (1, 2)
    }
    won = next(cell for cell in cells if cell.setting == FOUR)
    assert won.ratio > 1.05 and won.acceptance_length > 1.05
    assert all(cell.identical == cell.answers > 0 for cell in cells)


def cell(batch, ratio, spread=1.0, length=1.6):
    return Cell(FOUR, batch, 1, 50.0, ratio, length, 4, 4, spread=spread)


def test_off_wins_where_nothing_beats_it():
    assert best([cell(1, 0.98)])[0] == OFF
    assert best([cell(1, 0.98), cell(4, 1.5)])[0] == FOUR


def test_what_the_noise_explains_is_not_kept():
    assert verdict([cell(1, 1.05, spread=1.04)])[0] == FOUR
    assert verdict([cell(1, 1.05, spread=1.2)]) == (
        None,
        "best: fixed 4 draft tokens, 4 deep at 1.05 of plain decoding, whose own speed varied by "
        "20%: nothing is kept",
    )
    kept, reason = verdict([cell(1, 1.5, spread=2.0)])
    assert kept is None and reason.startswith("the machine was busy, plain decoding's own speed")
    assert verdict([cell(1, 0.9, spread=1.04)])[0] == OFF


def test_a_single_run_shows_no_noise_and_nothing_is_kept():
    kept, reason = verdict([cell(1, 1.5, spread=None)])
    assert kept is None and "one run of plain decoding shows no noise" in reason
    assert verdict([cell(1, 1.5, spread=None), cell(1, 1.5, spread=1.0)])[0] == FOUR
    assert verdict([cell(1, 1.5, spread=None), cell(4, 1.5, spread=1.0)])[0] is None


def test_a_picture_that_cannot_be_written_is_said_in_a_sentence(tmp_path, capsys):
    folder = tmp_path / "a.png"
    folder.mkdir()
    assert main(["tune", "toy", "--out", str(folder)]) == 2
    assert "a.png is a folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"gone/a\.png cannot be written: No such file"):
        tune._draw(tmp_path / "gone" / "a.png", [cell(1, 1.5)], FOUR, "toy")


def test_no_speed_beyond_the_tokens_of_a_step_is_believed():
    """A busy machine showed 1.97 of plain decoding at 1.00 tokens a step."""
    assert best([cell(1, 1.97, length=1.0)])[0] == OFF
    assert best([cell(1, 1.97, length=1.3)])[1] == pytest.approx(1.3)


def test_the_command_keeps_a_profile_that_is_used_from_then_on(capsys, monkeypatch):
    steps, begin = [], ToyExecutor.begin  # Steps are the clock: each takes a second.
    monkeypatch.setattr(ToyExecutor, "begin", lambda *args: (steps.append(1), begin(*args))[1])
    monkeypatch.setattr(prove, "perf_counter", lambda: float(len(steps)))
    flags = ["--model", "toy", "--kv-tokens", "4096", "--context", "512"]
    assert main(["tune", *flags, "--batches", "1", "--tokens", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    best = Setting(**result["best"])
    config = EngineConfig(model="toy", kv_tokens=4096, context=512)
    with_profile = load(config)
    with_profile.close()
    assert with_profile.info["profile"] == best.name
    assert with_profile.config.policy == best.policy
    assert with_profile.config.speculative_algorithm == best.speculative_algorithm
    other = load(replace(config, speculative_num_draft_tokens=4))
    other.close()
    assert other.info["profile"] is None and other.config.speculative_num_draft_tokens == 4


def test_a_broken_profile_is_no_profile():
    config = EngineConfig(model="toy")
    path = tuned.save(config, FOUR, {})
    assert tuned.find(config, config) == FOUR
    path.write_text('{"setting": {"speculation": "nonsense"}}')
    assert tuned.find(config, config) is None


def test_a_profile_belongs_to_what_decides_speed():
    config = EngineConfig(model="toy", device="cpu", speculative_algorithm="NGRAM")
    target = '["toy", "auto", "cpu", "auto", null, "same", 1, false]'
    key = f'[{target}, ["NGRAM", null, 1], "0.1.0", "some processor"]'
    assert tuned.key_of(config, "0.1.0", "some processor") == key
    for change in ({"tp_size": 2, "executor": "torch"}, {"kv_dtype": "q8_0", "executor": "cpu"}):
        keys = {tuned.path_of(EngineConfig(**{"executor": change["executor"], **more}))
                for more in ({}, change)}  # fmt: skip
        assert len(keys) == 2


def test_a_file_of_the_same_name_in_another_folder_is_another_model(tmp_path, monkeypatch):
    keys = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").touch()
        monkeypatch.chdir(tmp_path / name)
        keys.add(tuned.path_of(EngineConfig(model="model.gguf")))
        keys.add(tuned.path_of(EngineConfig(model=str(tmp_path / name / "model.gguf"))))
    assert len(keys) == 2


def test_profiles_are_forgotten(capsys):
    config = EngineConfig(model="toy")
    tuned.save(config, FOUR, {"model": "toy"})
    other = tuned.save(EngineConfig(model="other"), FOUR, {"model": "other"})
    other.with_name("noise.json").write_text("[")
    assert main(["tune", "--model", "toy", "--forget"]) == 0
    assert "1 profiles deleted" in capsys.readouterr().err
    assert tuned.find(config, config) is None and other.exists()
