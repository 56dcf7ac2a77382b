"""The compiled programs of earlier starts, in a folder: a program found there is neither traced nor
lowered.

JAX's own cache is keyed by the lowered program, so a start that finds everything there still traces
and lowers it all, which takes longer than reading it. Programs from that cache are not stored here:
XLA's CPU backend serialises such a program without its functions, and it fails when it runs.
"""

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jaxlib.version
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from forerun.executors.jax.program.functions import Key
from forerun.machine import cpu_identity

log = logging.getLogger("forerun.executors.jax")

KEPT = 16
"""Settings whose programs are cached: each model, shape of drafts or version is one."""
_HIT = "/jax/compilation_cache/cache_hits"
_DIGEST = hashlib.sha256().digest_size
_VARIABLES = "XLA_FLAGS", "LIBTPU_INIT_ARGS"
_SWITCHES = "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion"


_loaded = threading.local()


def loads() -> int:
    """Return how many programs this thread has got from JAX's own cache since the first call in
    this process.
    """
    _listen()
    return getattr(_loaded, "count", 0)


@lru_cache(maxsize=1)
def _listen() -> None:
    def count_hit(event: str, **_: Any) -> None:
        if event == _HIT:
            _loaded.count = getattr(_loaded, "count", 0) + 1

    jax.monitoring.register_event_listener(count_hit)


class ProgramCache:
    """The stored programs of one setting.

    folder   of all settings; it need not exist
    about    all that the programs depend on other than their keys, this code and the machine, as
             text
    devices  that run them, in their order
    """

    def __init__(self, folder: Path, about: str, devices: Sequence[Any]) -> None:
        self._devices = devices
        client = self._devices[0].client
        here = [
            *(jax.__version__, jaxlib.version.__version__, client.platform_version, cpu_identity()),
            *(f"{device.id} {device.device_kind}" for device in self._devices),
            *(os.environ.get(name, "") for name in _VARIABLES),
            *(str(getattr(jax.config, name)) for name in _SWITCHES),
        ]
        text = "\n".join([_source(), *here, about])
        self._folder = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
        _drop_oldest(folder, self._folder)

    def load(self, key: Key, trees: tuple[Any, Any]) -> Any | None:
        """Return a program, ready to run; None if it is missing or damaged.

        trees  of its arguments and of its result (jax.tree.structure)
        """
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        digest, program = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(program).digest() != digest:
            return None
        backend = self._devices[0].client
        try:
            return deserialize_and_load(program, *trees, backend, self._devices)
        except (RuntimeError, ValueError, KeyError) as error:
            log.warning("the cached program %s is compiled again: %s", key.kind, error)
            return None

    def store(self, key: Key, program: Any) -> None:
        """Store a compiled program; one that cannot be serialised or written is skipped."""
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}")
        try:
            content = serialize(program)[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(hashlib.sha256(content).digest() + content)
            part.replace(path)
        except (OSError, ValueError, NotImplementedError) as error:
            log.info("the program %s is not cached: %s", key.kind, error)
            part.unlink(missing_ok=True)

    def _path(self, key: Key) -> Path:
        size = f"{key.size.rows}x{key.size.nodes}"
        return self._folder / f"{key.kind}-{size}-{key.width}-{key.levels}"


@lru_cache(maxsize=1)
def _source() -> str:
    """Return a digest of the package's source, on which programs depend."""
    found, root = hashlib.sha256(), Path(__file__).parents[3]
    for path in sorted(root.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _drop_oldest(folder: Path, own: Path) -> None:
    """Mark a setting as used now, and delete the least recently used ones beyond KEPT."""
    with suppress(OSError):
        own.mkdir(parents=True, exist_ok=True)
        os.utime(own)
        settings = sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime)
        for old in settings[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
