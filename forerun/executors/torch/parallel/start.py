"""The start message of a rank, and its answer, with which rank 0 checks that all ranks have the
same weights and versions.
"""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.checkpoints.gguf.parts import parts_of
from forerun.checkpoints.tensor_parallel import TensorParallel
from forerun.executors.torch.model_runner import TorchOptions
from forerun.interface.executor import ExecutorLimits
from forerun.version import __version__

HEAD, SAMPLE, SAMPLES = 1 << 20, 1 << 12, 64
"""A file's digest covers its first HEAD bytes and SAMPLES samples of SAMPLE bytes."""

WEIGHTS = {".safetensors", ".gguf", ".json", ".bin"}
"""Suffixes of the files that make up a model."""


@dataclass(frozen=True, slots=True)
class RankStart:
    """The configuration of a rank, as JSON values.

    path     the checkpoint's file or folder
    threads  compute threads; None = torch's own choice
    port     of the ranks' rendezvous store on 127.0.0.1
    """

    tp: TensorParallel
    path: str
    limits: ExecutorLimits
    options: TorchOptions
    threads: int | None
    port: int

    def facts(self) -> dict[str, Any]:
        """Return JSON values from which `of` restores this object."""
        return asdict(self)

    @staticmethod
    def of(facts: Any) -> "RankStart":
        """Return the start with these `facts`. Raises KeyError or TypeError for others."""
        limits = facts["limits"] | {"row_nodes": tuple(facts["limits"]["row_nodes"])}
        return RankStart(
            TensorParallel(**facts["tp"]),
            facts["path"],
            ExecutorLimits(**limits),
            TorchOptions(**facts["options"]),
            facts["threads"],
            facts["port"],
        )

    def identity(self) -> dict[str, str]:
        """Return the values that must be equal on every rank, by name: versions, a digest of its
        flags, and one of the model's files.
        """
        own = {"rank", "device"}
        flags = {"limits": asdict(self.limits), "options": asdict(self.options), "path": self.path}
        flags["tp"] = {k: v for k, v in asdict(self.tp).items() if k not in own}
        flags["options"] = {k: v for k, v in asdict(self.options).items() if k not in own}
        return {
            "Python": sys.version.split()[0],
            "forerun": __version__,
            "numpy": np.__version__,
            "torch": torch.__version__,
            "flags": hashlib.sha256(json.dumps(flags).encode()).hexdigest()[:16],
            "weights": digest(Path(self.path)),
        }


def digest(path: Path) -> str:
    """Return a digest of a checkpoint's files as 16 hex digits: their names, sizes, headers, and
    samples of the rest. Takes milliseconds for a model of any size. Raises OSError if one cannot
    be read.
    """
    files = (
        parts_of(path)
        if path.is_file()
        else sorted(p for p in path.iterdir() if p.suffix in WEIGHTS)
    )
    found = hashlib.sha256()
    for each in files:
        size = each.stat().st_size
        found.update(f"{each.name} {size}\n".encode())
        with each.open("rb") as file:
            found.update(file.read(HEAD))
            for number in range(1, SAMPLES + 1 if size > HEAD else 1):
                file.seek(max(0, size * number // SAMPLES - SAMPLE))
                found.update(file.read(SAMPLE))
    return found.hexdigest()[:16]


def difference(own: dict[str, str], other: dict[str, str]) -> str | None:
    """Return the difference between two ranks, as a clause; None if there is none."""
    for what, value in own.items():
        if other.get(what) != value:
            return f"it has {what} {other.get(what)}, rank 0 has {value}"
    return None
