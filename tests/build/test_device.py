"""--device auto: a GPU where there is one that torch can use, and a line that says why."""

from dataclasses import replace

import pytest

from forerun.build import device, registry
from forerun.build.device import choose_device
from forerun.build.registry import choose_executor
from forerun.build.target import open_target
from forerun.cli import console
from forerun.errors import ConfigError
from forerun.hub.catalog import open_model
from forerun.options.config import EngineConfig


@pytest.fixture
def machine(monkeypatch):
    """A machine with these GPUs, whose torch sees so many of them; None: no torch."""
    torch = pytest.importorskip("torch")

    def made(gpus, seen):
        monkeypatch.setattr(device, "gpu_devices", lambda: gpus)
        monkeypatch.setattr(device, "find_spec", lambda _: None if seen is None else object())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")

    return made


@pytest.mark.parametrize(
    ("gpus", "seen", "changes", "expected", "why"),
    [
        ([], 0, {}, "cpu", "no NVIDIA GPU here"),
        (["/dev/nvidia0"], 1, {}, "cuda", "NVIDIA H100"),
        (["/dev/nvidia0"], 0, {}, "cpu", "sees no CUDA device"),
        (["/dev/nvidia0"], None, {}, "cpu", "torch is not installed"),
        (["/dev/nvidia0"], 1, {"executor": "cpu"}, "cpu", "the cpu executor runs on the CPU"),
        (["/dev/nvidia0"], 1, {"model": "toy"}, "cpu", "the toy runs on the CPU"),
        (["/dev/nvidia0"], 1, {"dtype": "file"}, "cpu", "compiled core"),
        (["/dev/nvidia0"], 1, {"device": "cpu"}, "cpu", "from --device"),
        ([], 0, {"device": "cuda:1"}, "cuda:1", "from --device"),
    ],
)
def test_the_choice_and_its_reason(machine, gpus, seen, changes, expected, why):
    machine(gpus, seen)
    chosen = choose_device(EngineConfig(**changes))
    assert chosen.device == expected and why in chosen.sentence()
    assert chosen.sentence().startswith(f"device {expected}: ")


@pytest.mark.model
def test_a_gpu_means_torch_in_bfloat16(machine):
    machine(["/dev/nvidia0"], 1)
    arch = open_model("smollm2-135m").architecture
    chosen = choose_executor(EngineConfig(), arch)
    assert (chosen.device, chosen.executor, chosen.dtype) == ("cuda", "torch", "bfloat16")
    machine([], 0)
    assert choose_executor(EngineConfig(), arch).device == "cpu"


def test_without_the_core_and_without_torch_one_sentence_says_both(monkeypatch):
    none = replace(registry.EXECUTORS["cpu"], refusal=lambda arch: "no C++ compiler was found")
    monkeypatch.setitem(registry.EXECUTORS, "cpu", none)
    arch = object()
    config = EngineConfig(device="cpu")
    monkeypatch.setattr(registry, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="The torch executor could run this"):
        choose_executor(config, arch)
    monkeypatch.setattr(registry, "find_spec", lambda _: object())
    with pytest.warns(UserWarning, match="using torch, which is several times slower"):
        assert choose_executor(config, arch).executor == "torch"


def test_torch_is_not_used_where_there_is_no_gpu(machine, monkeypatch):
    torch = pytest.importorskip("torch")
    machine([], 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked"))
    assert choose_device(EngineConfig()).device == "cpu"


def test_what_runs_is_resolved():
    target = open_target(EngineConfig(model="toy"))
    assert target.config.device == "cpu"
    target.close()


def test_a_gpu_that_cannot_be_used_is_reported(machine, monkeypatch):
    lines = []
    monkeypatch.setattr(console, "say", lines.append)
    machine(["/dev/nvidia0"], 0)
    target = open_target(EngineConfig(model="toy"))
    object.__setattr__(target, "device", choose_device(EngineConfig()))
    console._say_device(target)
    target.close()
    assert len(lines) == 1 and "this machine has /dev/nvidia0" in lines[0]


@pytest.mark.parametrize("device", ["cuda:-1", "cuda:", "cuda:x", "cudax", "cpu:0", ""])
def test_what_names_no_device_is_refused(device):
    with pytest.raises(ConfigError, match="must be auto, cpu, cuda, cuda:N or tpu"):
        EngineConfig(device=device)
