"""Models by hub id (`organisation/name`), downloaded and cached by huggingface_hub. For a model
that is already on this machine only that library's settings are imported.
"""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
from huggingface_hub.constants import HF_HUB_CACHE

from forerun.checkpoints.gguf.parts import part_names
from forerun.errors import DownloadError
from forerun.hub.reference import HubReference, choose_gguf, layers_for


class CachedModel(NamedTuple):
    """A model in huggingface_hub's cache. size: bytes."""

    name: str
    size: int
    path: Path


_PATTERNS = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "model.safetensors-*.safetensors",
    "ngrams.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
]
"""Files to download. Data only, never code."""
_HUB_FILE = re.compile(
    r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*/[\w.-]+\.(json|safetensors|pt)", re.A
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
ASKING = 5.0
_UNANSWERED = {"ConnectError", "ConnectTimeout", "ReadTimeout", "OfflineModeIsEnabled"}
"""Names of exceptions that mean the hub did not answer. Names, because the HTTP library that raises
them differs between versions of huggingface_hub.
"""
_SILENT = {"ConnectTimeout", "ReadTimeout"}
_PICKLED = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"]
"""Weights that are read as plain tensors (checkpoints/pickled.py), if a model has no others."""


def fetched(repository: str, cache: Path | None = None, revision: str | None = None) -> Path:
    """Return the folder of a hub model; downloads it if it is not in huggingface_hub's cache, with
    that library's progress bars.

    repository  organisation/name
    cache       the cache folder; None = from huggingface_hub's own settings
    revision    branch, tag or commit; None = main

    Downloads configuration, safetensors and tokenizer, no code. Raises DownloadError if that fails.
    """
    return _snapshot(repository, _PATTERNS, cache, revision)


def config_fetched(repository: str, revision: str | None = None) -> Path:
    """Return the folder of a hub model that contains at least config.json; downloads only that
    file. Raises DownloadError, also if the model has no such file.
    """
    folder = _snapshot(repository, ["config.json"], None, revision)
    if not (folder / "config.json").is_file():
        raise DownloadError(
            f"{repository} has no config.json on the hub; name one of its files, as "
            f"{repository}:Q4_K_M, which is fetched whole"
        )
    return folder


def fetched_pickled(
    repository: str, cache: Path | None = None, revision: str | None = None
) -> Path:
    """Return the folder as `fetched`, with pickled weights (pytorch_model*.bin), for a model that
    has no others.
    """
    return _snapshot(repository, [*_PATTERNS, *_PICKLED], cache, revision)


def draft_fetched(repository: str, revision: str | None) -> Path:
    """Return the folder of a draft on the hub, with its safetensors, or its pickled weights if it
    has no safetensors. revision: None = main. Raises DownloadError if that fails.
    """
    folder = fetched(repository, revision=revision)
    if any(folder.glob("*.safetensors")):
        return folder
    return fetched_pickled(repository, revision=revision)


def token_map_fetched(named: str) -> Path:
    """Return the path of a token map: a local file, or `organisation/name/file` on the hub, which
    is downloaded; any other text unchanged. Raises DownloadError if that fails.
    """
    repository, _, name = named.rpartition("/")
    if Path(named).exists() or _HUB_FILE.fullmatch(named) is None:
        return Path(named)
    return _snapshot(repository, [name], None, None) / name


def gguf_fetched(
    reference: HubReference, cache: Path | None = None, revision: str | None = None
) -> Path:
    """Return the path of one GGUF file of a hub model; downloads it if it is not in the cache, with
    its further parts and the separate file of its MTP layers. cache, revision: as in `fetched`. If
    the hub does not answer within ASKING seconds, only the files in the cache are considered.
    Raises DownloadError, and ModelError if there is no such file.
    """
    repository = reference.repository
    try:
        info = huggingface_hub.HfApi().model_info(repository, revision=revision, timeout=ASKING)
        names = [one.rfilename for one in info.siblings or ()]
    except Exception as error:
        folder = here(repository, cache, revision)
        if folder is None:
            raise _failure(repository, revision, error) from error
        names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
        return folder / choose_gguf(names, reference)
    name = choose_gguf(names, reference)
    layers = layers_for(names, name)
    files = [*part_names(name), *([layers] if layers else [])]
    return _snapshot(repository, files, cache, revision) / name


def check(repository: str, revision: str | None = None) -> None:
    """Check that a model exists on the hub; downloads nothing. If the hub does not answer within
    ASKING seconds, returns as if it did. Raises DownloadError if there is no such model or
    revision, or it is gated.
    """
    if any(one.name == repository for one in cached()):
        return
    try:
        huggingface_hub.HfApi().model_info(repository, revision=revision, timeout=ASKING)
    except Exception as error:
        absent = _absent(repository, revision, error)
        if absent is not None:
            raise absent from error


def cached() -> list[CachedModel]:
    """Return the models in huggingface_hub's cache, downloaded by any program, sorted by name; []
    without a cache.
    """
    try:
        repositories = huggingface_hub.scan_cache_dir().repos
    except (huggingface_hub.CacheNotFound, OSError, RuntimeError):  # Of no home.
        return []
    models = [repo for repo in repositories if repo.repo_type == "model"]
    return sorted(CachedModel(r.repo_id, r.size_on_disk, r.repo_path) for r in models)


def remove(repository: str) -> int:
    """Delete all revisions of a model from huggingface_hub's cache. Returns the bytes freed; 0 if
    it was not there.
    """
    try:
        cache = huggingface_hub.scan_cache_dir()
    except (huggingface_hub.CacheNotFound, OSError, RuntimeError):  # Of no home.
        return 0
    named = [r for r in cache.repos if r.repo_type == "model" and r.repo_id == repository]
    commits = [revision.commit_hash for repo in named for revision in repo.revisions]
    if not commits:
        return 0
    plan = cache.delete_revisions(*commits)
    plan.execute()
    return int(plan.expected_freed_size)


def _snapshot(
    repository: str, patterns: list[str], cache: Path | None, revision: str | None
) -> Path:
    """Download the files of a hub model that match these patterns, in parallel, resuming an
    interrupted download, as huggingface_hub does; compares new files with the hub's digests. If the
    hub does not answer within ASKING seconds, returns the cached files.
    """
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=repository, repo_type="model")
    blobs = (cache or Path(HF_HUB_CACHE)) / name / "blobs"
    before = set(blobs.glob("*"))
    try:
        _check_answer(repository, revision)
    except DownloadError:
        cached = here(repository, cache, revision)
        if cached is None:
            raise
        return cached
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=patterns, cache_dir=cache
        )
    except Exception as error:
        raise _failure(repository, revision, error) from error
    for blob in sorted(set(blobs.glob("*")) - before):
        _check_digest(repository, blob)
    return Path(folder)


def _check_answer(repository: str, revision: str | None) -> None:
    """Raise DownloadError if the hub accepts a connection but does not answer within ASKING
    seconds, since huggingface_hub would retry for minutes.
    """
    try:
        huggingface_hub.HfApi().model_info(repository, revision=revision, timeout=ASKING)
    except Exception as error:
        if type(error).__name__ in _SILENT:
            raise _failure(repository, revision, error) from error


def _check_digest(repository: str, blob: Path) -> None:
    """Compare a large cached file with its file name, which is the SHA-256 that the hub reports;
    for small files the hub reports none. If they differ, deletes the file and raises DownloadError.
    """
    if _SHA256.fullmatch(blob.name) is None:
        return
    with blob.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != blob.name:
        blob.unlink()
        raise DownloadError(
            f"a file of {repository} does not have the checksum that the hub gives ({digest}, not "
            f"{blob.name}); it was removed, try again"
        )


def here(repository: str, cache: Path | None = None, revision: str | None = None) -> Path | None:
    """Return the folder of a hub model if some of its files are on this machine; does not contact
    the hub.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, cache_dir=cache, local_files_only=True
        )
    except (OSError, ValueError):
        return None
    return Path(folder)


def _failure(repository: str, revision: str | None, error: Exception) -> DownloadError:
    """Return the exception to raise for an error of huggingface_hub."""
    from huggingface_hub.errors import EntryNotFoundError

    absent = _absent(repository, revision, error)
    if absent is not None:
        return absent
    if type(error).__name__ in _UNANSWERED or isinstance(error, EntryNotFoundError):
        return DownloadError(
            f"{repository} is not on this machine and the hub cannot be reached; connect to the "
            "network, or download the folder elsewhere and give its path"
        )
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DownloadError(f"{repository} was not fetched: {reason}")


def _absent(repository: str, revision: str | None, error: Exception) -> DownloadError | None:
    """Return the exception if the hub's error means that the model does not exist or is not
    accessible; else None.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return DownloadError(
            f"{repository} is gated: accept its terms on the hub, then log in with `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return DownloadError(f"the hub has no model {repository}, or it is private")
    if isinstance(error, RevisionNotFoundError):
        return DownloadError(f"{repository} has no revision {revision!r} on the hub")
    return None
