"""`forerun doctor`: reports the hardware and packages of this machine, and which executors work."""

import argparse
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from rich.table import Table

from forerun.build.memory import human
from forerun.cache_dir import cache_dir, seen
from forerun.cli.console import emit, out
from forerun.cli.models import listed
from forerun.executors import cpu
from forerun.machine import memory_available, stamp
from forerun.version import __version__

PACKAGES = (
    "numpy",
    "tokenizers",
    "gguf",
    "llguidance",
    "starlette",
    "uvicorn",
    "torch",
    "matplotlib",
)
COMPILERS = ("c++", "g++", "clang++")


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 0, or 1 if no executor but the toy works."""
    facts = examine(with_torch=not arguments.no_torch)
    emit(arguments, facts, lambda: _show(facts))
    return 0 if facts["native_core"]["works"] or facts["torch"]["installed"] else 1


def examine(with_torch: bool) -> dict[str, Any]:
    """Return facts of this machine as JSON values: memory, compiler, compiled core, torch, caches,
    packages.

    with_torch  import torch and list CUDA devices
    """
    missing = cpu.available()
    return {
        "forerun": __version__,
        "machine": stamp() | {"memory_available_bytes": memory_available()},
        "compiler": next((path for name in COMPILERS if (path := shutil.which(name))), None),
        "native_core": {"works": missing is None, "why_not": missing},
        "torch": _torch(with_torch),
        "cache": _cache(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _torch(look: bool) -> dict[str, Any]:
    installed = find_spec("torch") is not None
    if not (installed and look):
        return {"installed": installed, "version": _version("torch")}
    import torch

    cuda = torch.cuda.is_available()
    devices = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
    )
    return {"installed": True, "version": torch.__version__, "cuda_devices": devices}


def _cache() -> dict[str, Any]:
    folder = cache_dir()
    existing = next(p for p in (folder, *folder.parents) if seen(p) is not None)
    return {
        "folder": str(folder),
        "writable": os.access(existing, os.W_OK),
        "free_bytes": shutil.disk_usage(existing).free,
        "models": {row["name"]: row["bytes"] for row in listed() if row["path"] is not None},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _show(facts: dict[str, Any]) -> None:
    machine, core, torch, cache = (
        facts[key] for key in ("machine", "native_core", "torch", "cache")
    )
    devices = ", ".join(torch.get("cuda_devices", ())) or "no CUDA device"
    models = ", ".join(f"{name} ({human(size)})" for name, size in cache["models"].items())
    lines = {
        "forerun": f"{facts['forerun']} on Python {platform.python_version()} ({sys.prefix})",
        "processor": f"{machine['cpu']}, {machine['cores']} cores usable",
        "instruction sets": " ".join(machine["features"]) or "none that matter here",
        "memory": f"{human(machine['memory_available_bytes'])} free of "
        f"{human(machine['memory_bytes'])}",
        "compiler": facts["compiler"] or "none: needed only to install the compiled core",
        "compiled core": "works" if core["works"] else core["why_not"],
        "torch": f"{torch['version']}, {devices}" if torch["installed"] else "not installed",
        "model cache": f"{cache['folder']}, {human(cache['free_bytes'])} free"
        + ("" if cache["writable"] else ", NOT WRITABLE"),
        "cached models": models or "none: forerun pull smollm2-135m",
        "packages": ", ".join(f"{k} {v}" for k, v in facts["packages"].items() if v),
    }
    table = Table(show_header=False, box=None)
    for name, text in lines.items():
        table.add_row(name, text)
    out.print(table)
