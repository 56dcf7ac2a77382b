"""Chooses the target's device, with the reason: a GPU if torch can use one."""

from dataclasses import dataclass
from importlib.util import find_spec

from forerun.machine import gpu_devices, tpu_devices
from forerun.options.config import KV_DTYPES, NATIVE_DTYPES, EngineConfig


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device for --device, and the reason.

    device  cpu, cuda, cuda:N or tpu
    why     the reason, as a clause for the start line
    gpu     whether this machine seems to have a GPU
    """

    device: str
    why: str
    gpu: bool = False

    def sentence(self) -> str:
        """Return one line for the start: the device and the reason."""
        return f"device {self.device}: {self.why}"


def choose_device(config: EngineConfig) -> DeviceChoice:
    """Return the device of a configuration, with "auto" decided by this machine's devices. Imports
    torch only if there is a GPU, jax only if there is a TPU. Raises nothing: if torch cannot use a
    GPU, the CPU is chosen.
    """
    if config.device != "auto":
        return DeviceChoice(config.device, "from --device")
    if config.toy or config.executor in ("cpu", "toy"):
        runs = "toy" if config.toy else f"{config.executor} executor"
        return DeviceChoice("cpu", f"the {runs} runs on the CPU")
    tpu = _tpu(tpu_devices()) if config.executor in ("auto", "jax") else None
    if tpu is not None:
        return tpu
    if config.executor == "jax":
        return DeviceChoice("cpu", "jax finds no TPU here")
    native = f"dtype {config.dtype}" if config.dtype in NATIVE_DTYPES else ""
    if KV_DTYPES.get(config.kv_dtype) == "cpu":
        native = f"kv-dtype {config.kv_dtype}"
    if native and config.executor != "torch":
        return DeviceChoice("cpu", f"{native} needs the compiled core")
    return _gpu(gpu_devices())


def cuda_devices() -> int:
    """Return the number of CUDA devices that torch can use here; 0 without a GPU or torch."""
    if not gpu_devices() or find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _tpu(devices: list[str]) -> DeviceChoice | None:
    """Return the choice of a TPU if jax can use one; else None."""
    if not devices or find_spec("jax") is None:
        return None
    import jax

    if jax.default_backend() != "tpu":
        return None
    return DeviceChoice("tpu", jax.devices()[0].device_kind)


def _gpu(devices: list[str]) -> DeviceChoice:
    """Return the choice of the machine's first GPU if torch can use it, else of the CPU with the
    reason.
    """
    if not devices:
        return DeviceChoice("cpu", "no NVIDIA GPU here")
    if find_spec("torch") is None:
        why = "there is a GPU, but torch is not installed (pip install 'forerun[torch]')"
        return DeviceChoice("cpu", why, gpu=True)
    import torch

    if not torch.cuda.is_available():
        why = (
            f"this machine has {devices[0]}, but torch {torch.__version__} sees no CUDA device: it "
            "may be a build for CPUs, or the driver may be too old for it"
        )
        return DeviceChoice("cpu", why, gpu=True)
    return DeviceChoice("cuda", torch.cuda.get_device_name(), gpu=True)
