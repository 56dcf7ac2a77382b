"""Chooses an executor from a table. A new one needs a line here."""

import warnings
from dataclasses import replace
from importlib.util import find_spec

from forerun.build import with_cpu, with_jax, with_torch
from forerun.build.device import choose_device
from forerun.build.executor_entry import ExecutorEntry
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.quantised_matrices import has_quantised_matrices
from forerun.errors import ConfigError
from forerun.networks.arch import Architecture
from forerun.options.config import KV_DTYPES, EngineConfig

EXECUTORS = {entry.name: entry for entry in (with_jax.ENTRY, with_cpu.ENTRY, with_torch.ENTRY)}
"""Executors by name, in the order in which "auto" tries them. The toy is not among them: it has its
own model.
"""


def choose_executor(
    config: EngineConfig, arch: Architecture, checkpoint: Checkpoint | None = None
) -> EngineConfig:
    """Return a copy with "auto" replaced in device, executor and dtype. Warns if the best executor
    cannot run `arch` and a slower one is chosen.

    checkpoint  decides whether dtype "auto" keeps the file's own format; None: it does not

    Raises ConfigError if the executor cannot divide a model over --tp-size devices, or torch is
    needed and not installed.
    """
    config = replace(config, device=choose_device(config).device)
    entry = _suiting(config, arch) if config.executor == "auto" else EXECUTORS[config.executor]
    if config.tp_size > 1 and not entry.shards:
        able = " or ".join(f"--executor {each.name}" for each in EXECUTORS.values() if each.shards)
        raise ConfigError(
            f"tp-size is {config.tp_size}, but the {entry.name} executor runs on one device; use "
            f"{able}."
        )
    if entry.name != KV_DTYPES.get(config.kv_dtype, entry.name):
        raise ConfigError(
            f"kv-dtype is {config.kv_dtype}, but the model runs on the {entry.title}, which has no "
            "such cache: leave kv-dtype out."
        )
    dtype = config.dtype
    if dtype == "auto":
        dtype = entry.dtype or ("float32" if config.device == "cpu" else "bfloat16")
        if (
            dtype == "bfloat16"
            and entry.keeps
            and checkpoint is not None
            and has_quantised_matrices(checkpoint)
        ):
            dtype = "file"
    return replace(config, executor=entry.name, dtype=dtype)


def _suiting(config: EngineConfig, arch: Architecture) -> ExecutorEntry:
    """Return the first executor that suits the configuration and can run `arch`. Raises
    ConfigError, with the reasons against the others, if that is torch and torch is not installed.
    """
    able = [each for each in EXECUTORS.values() if each.shards or config.tp_size == 1]
    *better, last = (entry for entry in able if entry.unsuited(config) is None)
    if not better and last.name == "torch" and find_spec("torch") is None:
        why = with_cpu.ENTRY.unsuited(config) or f"tp-size is {config.tp_size}"
        raise ConfigError(
            f"{why}: only the torch executor can do that, and torch is not installed. Leave the "
            "option out, or: pip install 'forerun[torch]' (`make tools` in a checkout)."
        )
    for entry in better:
        reason = entry.refusal(arch)
        if reason is None:
            return entry
        if last.name == "torch" and find_spec("torch") is None:
            raise ConfigError(
                f"The {entry.title} cannot be used: {reason}. The torch executor could run this "
                "model, several times slower, but torch is not installed: pip install "
                "'forerun[torch]', or `make tools` in a checkout."
            )
        warnings.warn(
            f"The {entry.title} is not used ({reason}); using {last.name}, which is several times "
            "slower.",
            stacklevel=4,
        )
    return last
