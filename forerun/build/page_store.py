"""Opens the store of pages on disk for a loaded model, in a subfolder for this model and the way it
is computed.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.build.executor_entry import Progress
from forerun.build.memory import human
from forerun.build.registry import EXECUTORS
from forerun.cache.store import PageStore
from forerun.cache_dir import cache_dir, home_path
from forerun.checkpoints.gguf.parts import parts_of
from forerun.engine.thread import Engine
from forerun.errors import ConfigError
from forerun.interface.executor import Executor
from forerun.options.config import EngineConfig
from forerun.version import __version__

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".json")
OTHER = ("generation_config.json", "chat_template.json")
"""Files of a model that change no key and no value."""
BLOCK = 16 << 20
HASHES = "hashes.json"
"""In the cache directory: the hashes of files, which are read for them once."""


def attach_store(
    config: EngineConfig,
    executor: Executor,
    engine: Engine,
    model: str,
    files: list[Path],
    progress: Progress = lambda *_: None,
) -> str | None:
    """Attach the page store that `config` names to an engine that was not started. Returns the
    store's folder, limit and contents as text for users; None if the user wants no store.

    model  description of the network and its draft, different for different ones
    files  files or folders of their weights
    progress  called with (what, bytes done, bytes in all) while they are hashed for the first time

    Raises ConfigError if the folder cannot be used.
    """
    if config.kv_store is None:
        return None
    if executor.pages is None:
        return (
            f"not used: the {config.executor} executor cannot copy the pages of this model "
            "(recurrent layers, jax, or several devices)"
        )
    folder, content = _folder(config.kv_store), executor.pages.page_bytes
    tokens = 4 * (config.page_size + engine.lookahead)
    facts: list[str | int] = [
        *(__version__, model, config.executor, config.dtype, config.kv_dtype),
        *(config.page_size, tokens, content),
    ]
    if config.executor in EXECUTORS:
        facts.append(EXECUTORS[config.executor].arithmetic(config))
    facts += _hashes([one for path in files for one in _files(path)], progress)
    fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    store = PageStore(folder, fingerprint, tokens, content, config.kv_store_size)
    engine.attach_store(store)
    return (
        f"{folder}, at most {human(store.limit)}, now {human(store.size())}; "
        f"{len(store) * config.page_size:,} tokens of this model"
    )


def _folder(name: str) -> Path:
    """Return the store's folder. Raises ConfigError for an empty name or an unknown user's home."""
    if not name.strip():
        raise ConfigError("kv-store is empty; name a folder.")
    return home_path(name)


def _files(path: Path) -> Iterator[Path]:
    """Yield the files that a model's path stands for, in order."""
    if path.is_dir():
        yield from (
            one for one in sorted(path.iterdir()) if one.suffix in WEIGHTS and one.name not in OTHER
        )
    else:
        yield from parts_of(path)


def _hashes(files: list[Path], progress: Progress) -> list[str]:
    """Return the hash of each file; those that were read before are not read again."""
    known: dict[str, list[Any]] = {}
    place = cache_dir() / HASHES
    with suppress(OSError, ValueError):
        known = json.loads(place.read_text())
    now = {str(path.resolve()): path for path in files}
    hashes = {name: _hash(known, name, path, progress) for name, path in now.items()}
    if any(known.get(name) != entry for name, entry in hashes.items()):
        with suppress(OSError):
            new = place.with_name(f"{HASHES}.{os.getpid()}")
            place.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(known | hashes))
            new.replace(place)
    return [entry[-1] for entry in hashes.values()]


def _hash(known: Mapping[str, list[Any]], name: str, path: Path, progress: Progress) -> list[Any]:
    """Return the file's size, times and inode, by which a change shows, and then its hash."""
    about = path.stat()
    state = [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
    entry = known.get(name, [])
    if entry[:-1] == state:
        return entry
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            done += len(block)
            progress(f"hashing {path.name} for kv-store, once", done, about.st_size)
    return [*state, digest.hexdigest()]
