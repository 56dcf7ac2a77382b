"""Converts pickled weights to safetensors in the cache: once, in a process of its own."""

import hashlib
import logging
import sys
from pathlib import Path

from forerun.cache_dir import cache_dir, locked, make_room, unwritable
from forerun.checkpoints.mapped import TensorFile
from forerun.checkpoints.shard import MAPS, read_shard
from forerun.errors import ModelError, reason_of
from forerun.sandbox import SandboxProcess

_MODULE = "forerun.checkpoints.unpickle_worker"
_SECONDS, _BYTES_PER_SECOND = 60.0, 20 << 20
"""Limit of processor time: a fixed part in seconds, and bytes per second, a tenth of a slow disk's
rate.
"""
_SPARE = 16 << 20
_ADVICE = (
    "Only tensors are read from a pickle, and nothing in it is run; save the weights as "
    "safetensors instead"
)

log = logging.getLogger("forerun.checkpoints")


def read_pickled(path: Path) -> TensorFile:
    """Read the tensors of an archive saved by torch, bits unchanged. They are in `converted/` of
    the cache, under a name made of the file's path, size and time; conversions of an older file at
    that path are deleted. Raises ModelError if the archive has anything besides tensors, is
    damaged, or the cache cannot be written.
    """
    folder = cache_dir() / "converted"
    try:
        real = path.resolve(strict=True)
        about = real.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {reason_of(error)}") from error
    place = hashlib.sha256(str(real).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    target = folder / f"{place}-{about.st_size:x}-{about.st_mtime_ns:x}.safetensors"
    if not target.is_file():
        make_room(folder, about.st_size + _SPARE)
        with locked(folder / f"{place}.lock", lambda: None):
            if not target.is_file():
                _convert(path, about.st_size, target)
            for old in set(folder.glob(f"{place}-*.safetensors")) - {target}:
                old.unlink(missing_ok=True)
    return read_shard(target, MAPS)


def _convert(path: Path, size: int, target: Path) -> None:
    log.info("converting %s to safetensors, once: %.0f MB", path, size / 1e6)
    part = target.with_suffix(".part")
    command = (sys.executable, "-m", _MODULE, str(size))
    child = SandboxProcess(command, _SECONDS + size / _BYTES_PER_SECOND)
    try:
        answer = child.ask({"source": str(path), "target": str(part)})
        if answer is None:
            why = (
                child.fault.words(child.seconds)
                if child.fault
                else "the conversion process ended without a result"
            )
            raise ModelError(f"{path} was not converted: {why}")
        if "refused" in answer:
            raise ModelError(f"{answer['refused']}. {_ADVICE}")
        if "unwritable" in answer:
            raise ModelError(f"{part} cannot be written: {answer['unwritable']}")
        part.replace(target)
    except OSError as error:
        raise unwritable(target.parent, error) from error
    finally:
        child.close()
        part.unlink(missing_ok=True)
