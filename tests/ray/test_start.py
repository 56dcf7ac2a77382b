"""What is said where replicas cannot be started."""

import re

import pytest

pytest.importorskip("ray")

from forerun.build.device import DeviceChoice
from forerun.errors import ConfigError, EngineError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.ray import local


def test_a_cluster_that_does_not_start_is_a_sentence(monkeypatch):
    def busy(**_):
        raise Exception("The current node timed out during startup.\nThis could happen because")

    monkeypatch.setattr(local.ray, "init", busy)
    with pytest.raises(EngineError, match=r"\(The current node timed out during startup\); it may"):
        local._start()


class Gpus:
    """A machine with so many, where Ray must not be started."""

    def __init__(self, monkeypatch, count):
        monkeypatch.setattr(local, "_start", None)
        monkeypatch.setattr(local, "cuda_devices", lambda: count)


@pytest.mark.parametrize(
    ("there", "count", "options", "says"),
    [
        (0, 2, {}, "replicas is 2, and each takes 1 GPU, but torch sees no CUDA device here; "
         "leave --device out to run on the CPU."),
        (1, 2, {}, "each takes 1 GPU, but torch sees 1 CUDA device here; lower --replicas to 1."),
        (3, 2, {"tp_size": 2}, "each takes 2 GPUs, but torch sees 3 CUDA devices here; lower "
         "--replicas to 1."),
        (2, 2, {"tp_size": 4}, "each takes 4 GPUs, but torch sees 2 CUDA devices here; lower "
         "--tp-size."),
        (2, 2, {"device": "cuda:1"}, "device is cuda:1, but Ray gives each replica GPUs of its "
         "own, numbered from 0; use --device cuda."),
    ],
)  # fmt: skip
def test_more_replicas_than_gpus(monkeypatch, there, count, options, says):
    Gpus(monkeypatch, there)
    config = EngineConfig(**{"model": "target", "device": "cuda"} | options)
    with pytest.raises(ConfigError, match=re.escape(says) + "$"):
        local.run(config, ServeSettings(port=0), count, None)


def test_each_replica_takes_its_gpus(monkeypatch):
    """Also without a named device: Ray hides GPUs from processes that reserve none."""
    Gpus(monkeypatch, 4)
    monkeypatch.setattr(local, "choose_device", lambda config: DeviceChoice("cuda", "one is there"))
    config, each = local.on_devices(EngineConfig(model="target", tp_size=2), 2)
    assert (config.device, each) == ("cuda", 2)


def test_a_process_that_died_is_reported():
    said = "A replica failed to start with exception. Retrying. Error:\nActorDiedError()"
    assert local.fault(said).startswith("A replica's process died while it loaded its model")
