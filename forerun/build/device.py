"""Where the target runs, and why: a GPU is used where there is one that torch can use."""

from dataclasses import dataclass
from importlib.util import find_spec

from forerun.config import EngineConfig
from forerun.errors import ConfigError
from forerun.machine import gpu_devices


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What --device means here.

    device  cpu, cuda or cuda:N
    why     a clause for the line that is printed at start
    gpu     whether this machine seems to have one
    """

    device: str
    why: str
    gpu: bool = False

    def sentence(self) -> str:
        """One line for the start."""
        return f"device {self.device}: {self.why}"


def choose_device(config: EngineConfig) -> DeviceChoice:
    """The device of a configuration, "auto" decided. Imports torch only where there is a GPU."""
    if config.device != "auto":
        return DeviceChoice(config.device, "as --device says")
    if config.toy or config.executor in ("cpu", "toy"):
        runs = "toy" if config.toy else f"{config.executor} executor"
        return DeviceChoice("cpu", f"the {runs} runs there")
    if config.dtype == "file":
        return DeviceChoice("cpu", "dtype file is the native core's")
    return _gpu(gpu_devices())


def _gpu(found: list[str]) -> DeviceChoice:
    """The first of the machine's GPUs where torch can use one, else the CPU and why."""
    if not found:
        return DeviceChoice("cpu", "no NVIDIA GPU here")
    if find_spec("torch") is None:
        why = "there is a GPU, but torch is not installed (pip install 'forerun[torch]')"
        return DeviceChoice("cpu", why, gpu=True)
    import torch

    if not torch.cuda.is_available():
        why = (
            f"{found[0]} is there, but torch {torch.__version__} sees no CUDA device: it may be a "
            "build for CPUs, or the driver may be older than it needs"
        )
        return DeviceChoice("cpu", why, gpu=True)
    return DeviceChoice("cuda", torch.cuda.get_device_name(), gpu=True)


def device_memory(device: str) -> int:
    """Bytes that are free on a torch device. Raises ConfigError where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, but torch sees no CUDA device here.")
    return int(torch.cuda.mem_get_info(device)[0])
