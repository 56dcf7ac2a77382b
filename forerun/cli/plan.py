"""`forerun plan`: the memory that a model would need, without loading it."""

import argparse
import math
from dataclasses import replace
from typing import Any

from rich.table import Table

from forerun.build.memory import human
from forerun.build.registry import EXECUTORS
from forerun.build.sizing import GIB, Sizing, described, sizing
from forerun.cli.console import emit_json, out, plain_warnings
from forerun.errors import ConfigError, MemoryPlanError
from forerun.machine import gpu_devices
from forerun.options.config import KV_DTYPES, NATIVE_DTYPES, EngineConfig
from forerun.options.flags import configured


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Raises MemoryPlanError if the model does not fit."""
    config = configured(EngineConfig, arguments)
    memory = arguments.device_memory
    if memory is not None and not (memory > 0 and math.isfinite(memory * GIB)):
        raise ConfigError(f"--device-memory is {memory}; it must be a number above 0.")
    if memory is not None and config.device == "auto" and _leaves_open(config):
        config = replace(config, device="cuda")  # A device's memory means a GPU's.
    if memory is not None and config.device.startswith("cuda") and config.executor == "auto":
        config = replace(config, executor="torch")  # Torch may be missing on this machine.
    if memory is None and config.device.startswith("cuda") and not gpu_devices():
        raise ConfigError(
            "this machine has no GPU: give the memory of the one to plan for with --device-memory "
            "GIB."
        )
    with plain_warnings():
        size = sizing(
            config,
            described(config),
            None if memory is None else int(memory * GIB),
        )
    if arguments.json:
        emit_json(facts(size))
    else:
        table = Table(show_header=False, box=None)
        for name, text in sentences(size).items():
            table.add_row(name, text)
        out.print(table)
    if size.plan is None:
        raise MemoryPlanError(size.refusal)
    return 0


def _leaves_open(config: EngineConfig) -> bool:
    """Return whether the configured executor and formats could also run on a GPU."""
    native = config.dtype in NATIVE_DTYPES or KV_DTYPES.get(config.kv_dtype) == "cpu"
    return config.executor in ("auto", "torch") and not native


def facts(size: Sizing) -> dict[str, Any]:
    """Return the plan as JSON values: bytes per device or of all together (see Sizing), tokens, and
    the model.
    """
    arch, config, plan = size.model.architecture, size.config, size.plan
    given_back = size.needs.windowed if plan and plan.windows else 0
    return {
        "model": size.model.name,
        "parameters": arch.parameters,
        "context": size.needs.context,
        "executor": config.executor,
        "device": config.device,
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "devices": config.tp_size,
        "weights_from_files": size.model.stored,
        "weights_bytes": size.needs.weights - size.draft,
        "draft_bytes": size.draft,
        "cache_bytes_per_1k_tokens": 1000 * (size.needs.per_token - given_back),
        "memory_bytes": size.memory,
        "fits": plan is not None,
        "scratch_bytes": plan.scratch if plan else None,
        "graph_bytes": plan.graphs if plan else None,
        "state_bytes": plan.states if plan else None,
        "cache_bytes": plan.cache if plan else None,
        "window_bytes": plan.windows if plan else None,
        "cache_tokens": plan.limits.pages * plan.limits.page_size if plan else None,
        "sequences": plan.limits.slots if plan else None,
        "checkpoints": plan.limits.checkpoints if plan else None,
    }


def sentences(size: Sizing) -> dict[str, str]:
    """Return the plan as text for users: a sentence per topic."""
    values = facts(size)
    count, together = values["devices"], EXECUTORS[values["executor"]].together
    each = f" on {count} devices together" if together else f" on each of {count} devices"
    each *= count > 1
    source = "from its files" if values["weights_from_files"] else "from its configuration alone"
    kind = "" if values["kv_dtype"] == "same" else f" in {values['kv_dtype']}"
    lines = {
        "model": f"{values['model']}, {values['parameters'] / 1e9:.2f}B parameters, made for "
        f"{values['context']:,} tokens",
        "runs on": f"executor {values['executor']}, device {values['device']}, "
        f"dtype {values['dtype']}",
        "weights": f"{human(values['weights_bytes'])}{each}, {source}",
        "draft model": human(values["draft_bytes"]) if values["draft_bytes"] else "none",
        "key/value cache": f"{human(values['cache_bytes_per_1k_tokens'])} for 1,000 tokens{kind}"
        f"{each}",
        "memory": f"{human(values['memory_bytes'])}{each}",
    }
    if not values["fits"]:
        return lines
    tokens, cache = f"{values['cache_tokens']:,} tokens", human(values["cache_bytes"])
    if size.plan is not None and size.plan.windows:
        limits = size.plan.limits
        lines["windows"] = (
            f"{human(size.plan.windows)}{each} of the cache, for the last {limits.window:,} tokens "
            f"of each sequence, {limits.window_pages * limits.page_size:,} in all"
        )
    elif size.model.architecture.widest_window:
        lines["windows"] = "layers with a window keep every page"
    if values["state_bytes"]:
        lines["recurrent states"] = (
            f"{human(values['state_bytes'])}{each}: {human(size.needs.state)} for each of "
            f"{values['sequences']} sequences, and {values['checkpoints']} checkpoints for texts "
            "with a common beginning"
        )
    return lines | {
        "scratch": f"{human(values['scratch_bytes'])}{each}, of a step's activations and logits",
        "captured rounds": f"{human(values['graph_bytes'])}{each}, of their intermediate results"
        if values["graph_bytes"]
        else "none",
        "room": f"{tokens} in a cache of {cache}{each}; {values['sequences']} sequences at once",
        "not counted": "memory of the driver (captured programs included) and of libraries",
    }
