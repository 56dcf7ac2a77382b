"""`forerun plan`: what a model would need, before anything of it is loaded."""

import argparse
import math
from dataclasses import replace
from typing import Any

from rich.table import Table

from forerun.build.memory import human
from forerun.build.sizing import GIB, Sizing, described, sizing
from forerun.cli.console import emit_json, out, plain_warnings
from forerun.errors import ConfigError, MemoryPlanError
from forerun.machine import gpu_devices
from forerun.options.config import NATIVE_DTYPES, EngineConfig
from forerun.options.flags import configured


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Ends as MemoryPlanError does where the model does not fit."""
    config = configured(EngineConfig, arguments)
    memory = arguments.device_memory
    if memory is not None and not (memory > 0 and math.isfinite(memory)):
        raise ConfigError(f"--device-memory is {memory}; it must be a number above 0.")
    if memory is not None and config.device == "auto" and _leaves_open(config):
        config = replace(config, device="cuda")  # What a device has is said of a GPU.
    if memory is None and config.device.startswith("cuda") and not gpu_devices():
        raise ConfigError("no GPU is here: say what a device has with --device-memory GIB.")
    with plain_warnings():
        found = sizing(
            config,
            described(config, arguments.model_shape),
            None if memory is None else int(memory * GIB),
        )
    if arguments.json:
        emit_json(facts(found))
    else:
        table = Table(show_header=False, box=None)
        for name, text in sentences(found).items():
            table.add_row(name, text)
        out.print(table)
    if found.plan is None:
        raise MemoryPlanError(found.refusal)
    return 0


def _leaves_open(config: EngineConfig) -> bool:
    """Whether the executor and the numbers are those of a GPU too."""
    return config.executor in ("auto", "torch") and config.dtype not in NATIVE_DTYPES


def facts(found: Sizing) -> dict[str, Any]:
    """The plan as JSON values: bytes of each device, tokens, and what the model is."""
    arch, config, plan = found.model.architecture, found.config, found.plan
    return {
        "model": found.model.name,
        "parameters": arch.parameters,
        "context": found.needs.context,
        "executor": config.executor,
        "device": config.device,
        "dtype": config.dtype,
        "devices": config.tp_size,
        "weights_from_files": found.model.stored,
        "weights_bytes": found.needs.weights - found.draft,
        "draft_bytes": found.draft,
        "cache_bytes_per_1k_tokens": 1000 * found.needs.per_token,
        "memory_bytes": found.memory,
        "fits": plan is not None,
        "scratch_bytes": plan.scratch if plan else None,
        "graph_bytes": plan.graphs if plan else None,
        "state_bytes": plan.states if plan else None,
        "cache_bytes": plan.cache if plan else None,
        "cache_tokens": plan.limits.pages * plan.limits.page_size if plan else None,
        "sequences": plan.limits.slots if plan else None,
        "checkpoints": plan.limits.checkpoints if plan else None,
    }


def sentences(found: Sizing) -> dict[str, str]:
    """The plan for people, a line by name."""
    told = facts(found)
    each = f" on each of {told['devices']} devices" if told["devices"] > 1 else ""
    source = (
        "as stored in its files" if told["weights_from_files"] else "from its configuration alone"
    )
    lines = {
        "model": f"{told['model']}, {told['parameters'] / 1e9:.2f}B parameters, made for "
        f"{told['context']:,} tokens",
        "runs on": f"{told['executor']}, {told['device']}, {told['dtype']}",
        "weights": f"{human(told['weights_bytes'])}{each}, {source}",
        "draft model": human(told["draft_bytes"]) if told["draft_bytes"] else "none",
        "key/value cache": f"{human(told['cache_bytes_per_1k_tokens'])} for 1,000 tokens{each}",
        "memory": f"{human(told['memory_bytes'])}{each}",
    }
    if not told["fits"]:
        return lines
    tokens, cache = f"{told['cache_tokens']:,} tokens", human(told["cache_bytes"])
    if told["state_bytes"]:
        lines["recurrent states"] = (
            f"{human(told['state_bytes'])}{each}: {human(found.needs.state)} for each of "
            f"{told['sequences']} sequences, and {told['checkpoints']} checkpoints for texts with "
            "a common beginning"
        )
    return lines | {
        "scratch": f"{human(told['scratch_bytes'])}{each}, of a step's activations and logits",
        "captured rounds": f"{human(told['graph_bytes'])}{each}, of their intermediate results"
        if told["graph_bytes"]
        else "none",
        "room": f"{tokens} in a cache of {cache}{each}; {told['sequences']} sequences at once",
        "not counted": "memory of the driver (captured programs included) and of libraries",
    }
