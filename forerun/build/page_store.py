"""Opens the store on disk for a loaded model: of pages, and of what its engine learned, in a
subfolder for this model and the way it is computed.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forerun.build.executor_entry import Progress
from forerun.build.memory import human
from forerun.build.registry import EXECUTORS
from forerun.cache.folder import StoreFolder
from forerun.cache.journal import Journal
from forerun.cache.store import PageStore
from forerun.cache_dir import cache_dir, home_path
from forerun.checkpoints.gguf.parts import parts_of
from forerun.control.adaptive import AdaptivePolicy
from forerun.control.learnt import PolicyLearner
from forerun.control.policy import Policy
from forerun.drafters.combined import CombinedDrafter
from forerun.engine.disk_states import DiskRecords, DiskStates, DiskWindows
from forerun.engine.learning import Learnt
from forerun.engine.thread import Engine
from forerun.errors import ConfigError
from forerun.interface.drafter import Drafter, TableDrafter
from forerun.interface.executor import Executor
from forerun.interface.learner import AnswerCounts, Learner
from forerun.machine import cores, stamp
from forerun.options.config import EngineConfig
from forerun.version import __version__

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".json")
OTHER = ("generation_config.json", "chat_template.json")
"""Files of a model that do not affect keys and values."""
OTHER_SETTINGS = {
    *("model", "revision", "chat_template", "sampling_defaults", "kv_store", "kv_store_size"),
    "sampling_override",
    *("context", "kv_tokens", "mem_fraction_static", "max_waiting"),
}
"""Fields of EngineConfig that do not affect costs, or follow from the free memory."""
ANSWER_BYTES, ESTIMATE_BYTES = 2 << 20, 1 << 20
"""Most bytes of a model's counted answers (half a million tokens), and of its estimates. (Counting
a million tokens again takes the core a second.)
"""
BLOCK = 16 << 20
HASHES = "hashes.json"
"""File in the cache directory with the hashes of files, so that each is read for its hash only
once.
"""


@dataclass(frozen=True, slots=True)
class Learns:
    """The parts of an engine that learn while serving, as in engine.learning.Learnt."""

    counts: AnswerCounts | None
    learners: Mapping[str, Learner]


def learns(policy: Policy, drafter: Drafter, lookup: TableDrafter) -> Learns:
    """Return the parts of an engine's policy and drafter that learn.

    lookup  the n-gram drafter, whether it takes part or not
    """
    learners: dict[str, Learner] = {}
    if isinstance(policy, AdaptivePolicy):
        learners["policy"] = PolicyLearner(policy)
    merged = isinstance(drafter, CombinedDrafter)
    if isinstance(drafter, CombinedDrafter):
        learners["merged"] = drafter.calibration
    if not merged and drafter is not lookup:
        return Learns(None, learners)
    return Learns(lookup.counts, {**learners, "n-grams": lookup.counts})


def attach_store(
    config: EngineConfig,
    executor: Executor,
    engine: Engine,
    learning: Learns,
    model: str,
    files: Iterable[Path],
    progress: Progress | None = None,
) -> str | None:
    """Attach the store that `config` names to an engine that was not started: of its pages, and of
    what it learns; restores what was learned before. Returns the store's folder, limit and contents
    as text for users; None if no store is configured.

    model  description of the network and its draft, different for different ones
    files  files or folders of their weights
    progress  called with (what, bytes done, bytes in all) while they are hashed for the first time

    Raises ConfigError if the folder cannot be used.
    """
    if config.kv_store is None:
        return None
    folder = StoreFolder(_folder(config.kv_store), config.kv_store_size)
    content = executor.pages.page_bytes if executor.pages is not None else 0
    tokens = 4 * (config.page_size + engine.lookahead)
    facts: list[str | int] = [
        *(__version__, model, config.executor, config.dtype, config.kv_dtype),
        *(config.page_size, tokens, content),
    ]
    if config.executor in EXECUTORS:
        facts.append(EXECUTORS[config.executor].arithmetic(config))
    paths = [one for path in files for one in _files(path)]
    facts += _hashes(paths, progress or (lambda *_: None))
    fingerprint = _digest(facts).hex()
    about = [f"no pages: the {config.executor} executor cannot copy them (jax, or several devices)"]
    if executor.pages is not None:
        store = PageStore(folder, fingerprint, tokens, content)
        beside: DiskRecords | None = None
        open_store = partial(PageStore, folder, fingerprint, tokens)
        if (states := executor.state_contents) is not None:
            beside = DiskStates(open_store(states.state_bytes, "states"), states, config.page_size)
        elif (windows := executor.window_contents) is not None:
            size = windows.window_page_bytes
            beside = DiskWindows(open_store(size, "windows"), windows, config.page_size)
        engine.attach_store(store, beside=beside)
        about = [f"{len(store) * config.page_size:,} tokens of this model"]
    learnt = Learnt(
        answers=Journal(folder, fingerprint, "ngrams", ANSWER_BYTES),
        estimates=Journal(folder, fingerprint, "prices", ESTIMATE_BYTES),
        settings=_digest([_settings(config), stamp()["cpu"], stamp()["features"], cores()]),
        counts=learning.counts,
        learners=learning.learners,
    )
    counted, known = learnt.restore()
    engine.attach_learning(learnt, folder.hash(b"tenants"))
    about += [f"n-grams of {counted:,} tokens of answers"] * (counted > 0)
    about += ["learnt costs of steps"] * ("policy" in known)
    where = f"{folder.root}, at most {human(folder.limit)}, now {human(folder.size())}"
    return f"{where}; {', '.join(about)}"


def _digest(facts: list[Any]) -> bytes:
    return hashlib.sha256(json.dumps(facts).encode()).digest()[:16]


def _settings(config: EngineConfig) -> dict[str, Any]:
    """Return the fields of a resolved configuration that affect costs and acceptance, and some that
    may.
    """
    return {name: value for name, value in asdict(config).items() if name not in OTHER_SETTINGS}


def _folder(name: str) -> Path:
    """Return the store's folder. Raises ConfigError for an empty name or an unknown user's home."""
    if not name.strip():
        raise ConfigError("kv-store is empty; name a folder.")
    return home_path(name)


def _files(path: Path) -> Iterator[Path]:
    """Yield the files at a model's path, in order."""
    if path.is_dir():
        yield from (
            one for one in sorted(path.iterdir()) if one.suffix in WEIGHTS and one.name not in OTHER
        )
    else:
        yield from parts_of(path)


def _hashes(files: list[Path], progress: Progress) -> list[str]:
    """Return the hash of each file; known hashes are not computed again."""
    known: dict[str, list[Any]] = {}
    place = cache_dir() / HASHES
    with suppress(OSError, ValueError):
        known = json.loads(place.read_text())
    now = {str(path.resolve()): path for path in files}
    hashes = {name: _hash(known, name, path, progress) for name, path in now.items()}
    if any(known.get(name) != entry for name, entry in hashes.items()):
        new = place.with_name(f"{HASHES}.{os.getpid()}")
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                new.write_text(json.dumps(known | hashes))
                new.replace(place)
            finally:
                new.unlink(missing_ok=True)
    return [entry[-1] for entry in hashes.values()]


def _hash(known: Mapping[str, list[Any]], name: str, path: Path, progress: Progress) -> list[Any]:
    """Return the file's size, times and inode, which show a change, followed by its hash."""
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
