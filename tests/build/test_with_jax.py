"""--executor jax: what it takes to choose it, what it refuses, and a whole engine on it."""

import pytest

from forerun.build import device, with_jax
from forerun.build.device import DeviceChoice
from forerun.build.registry import choose_executor
from forerun.build.target import open_target
from forerun.build.tuned import Setting
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import ConfigError
from forerun.measure.sweep import OFF, Sweep, halving
from forerun.measure.workload import Prompt
from forerun.options.config import EngineConfig
from tests.models import tiny

SMALL = {
    "executor": "jax", "context": 128, "max_sequences": 2, "chunked_prefill_size": 64,
    "kv_tokens": 512, "speculative_num_draft_tokens": 4, "policy": "fixed",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_folder(tiny.model("qwen3"), tmp_path_factory.mktemp("target"))


@pytest.fixture
def installed(monkeypatch):
    """This version of jax, or none."""

    def pretend(number):
        def version(_):
            if number is None:
                raise with_jax.PackageNotFoundError
            return number

        monkeypatch.setattr(with_jax, "version", version)

    return pretend


def test_without_jax_one_sentence_says_what_to_do(folder, installed):
    installed(None)
    with pytest.raises(ConfigError, match=r"needs jax, which is not installed\. .*forerun\[jax\]"):
        open_target(EngineConfig(model=str(folder), **SMALL))
    installed("0.4.38")
    with pytest.raises(ConfigError, match=r"needs jax 0\.10 or newer, not 0\.4\.38\. .*pip"):
        open_target(EngineConfig(model=str(folder), **SMALL))
    installed("0.10.0.dev1")
    with_jax.check_jax()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tp_size": 64}, "tp-size is 64, but jax sees 1 device here"),
        ({"device": "tpu"}, "device is tpu, but jax sees none here"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be one of float32, bfloat16"),
        ({"threads": 2}, "XLA chooses its threads itself"),
        ({"executor": "cpu", "tp_size": 2}, "cpu executor runs on one device"),
    ],
)
def test_what_it_refuses(folder, changes, says):
    with pytest.raises(ConfigError, match=says):
        open_target(EngineConfig(model=str(folder), **SMALL | changes))


def test_options_that_contradict_each_other():
    with pytest.raises(ConfigError, match="device tpu needs the jax executor, but executor is cpu"):
        EngineConfig(device="tpu", executor="cpu")
    with pytest.raises(ConfigError, match="kv-dtype float8 needs the torch executor"):
        EngineConfig(executor="jax", kv_dtype="float8")


def test_a_tpu_means_jax_in_bfloat16(monkeypatch, folder):
    chip = DeviceChoice("tpu", "TPU v6 lite")
    monkeypatch.setattr(device, "_tpu", lambda _: chip)
    arch = FolderCheckpoint(folder).architecture
    chosen = choose_executor(EngineConfig(), arch)
    assert (chosen.device, chosen.executor, chosen.dtype) == ("tpu", "jax", "bfloat16")
    assert choose_executor(EngineConfig(device="cpu"), arch).executor != "jax"
    assert choose_executor(EngineConfig(executor="cpu"), arch).executor == "cpu"


def test_jax_is_not_imported_where_there_is_no_tpu(monkeypatch):
    monkeypatch.setattr(device, "find_spec", lambda _: pytest.fail("asked"))
    assert device._tpu([]) is None


@pytest.fixture(scope="module")
def target(folder, tmp_path_factory):
    progress = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(with_jax, "cache_dir", lambda: tmp_path_factory.mktemp("cache"))
        config = EngineConfig(model=str(folder), **SMALL)
        made = open_target(config, lambda *news: progress.append(news))
    made.executor.progress = progress
    yield made
    made.close()


@pytest.mark.slow
def test_start_up_tells_how_far_it_is(target):
    compiling = "compiling step sizes, kept for the next start"
    progress = [said for said in target.executor.progress if said[0] == compiling]
    assert [done for _, done, _ in progress] == [*range(progress[-1][2] + 1)]
    assert target.config.executor == "jax" and target.config.dtype == "float32"


@pytest.mark.slow
def test_tuning_compares_settings(target):
    prompts = (Prompt("1", "text", ({"role": "user", "content": "the quick brown fox"},)),)
    setting = Setting("NGRAM", 5, 4, "fixed")
    cells = halving(target, Sweep(prompts, (setting,), batches=(1,), tokens=8))
    assert {cell.setting for cell in cells} == {OFF, setting}
    assert all(cell.speed > 0 for cell in cells)
