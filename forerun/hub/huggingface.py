"""Models by hub id (`organisation/name`), fetched and cached by huggingface_hub. Nothing but its
settings is imported for a model on this machine.
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
    """A model on this machine. size in bytes."""

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
"""Data only: no code is ever fetched."""
_HUB_FILE = re.compile(
    r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*/[\w.-]+\.(json|safetensors|pt)", re.A
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
ASKING = 5.0
_UNANSWERED = {"ConnectError", "ConnectTimeout", "ReadTimeout", "OfflineModeIsEnabled"}
"""Errors by name: which HTTP library raises them differs between versions of huggingface_hub."""
_SILENT = {"ConnectTimeout", "ReadTimeout"}
_PICKLED = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"]
"""Weights that are read as plain tensors (checkpoints/pickled.py), where a model has no others."""


def fetched(repository: str, cache: Path | None = None, revision: str | None = None) -> Path:
    """Return the folder of a hub model; downloads it if it is not in huggingface_hub's cache, with
    that library's progress bars.

    repository  organisation/name
    cache       where to keep it; None = where huggingface_hub's own settings say
    revision    branch, tag or commit; None = main

    Fetches configuration, safetensors and tokenizer, no code. Raises DownloadError.
    """
    return _snapshot(repository, _PATTERNS, cache, revision)


def config_fetched(repository: str, revision: str | None = None) -> Path:
    """Return the folder of a hub model, of which only config.json must exist; fetches only that.
    Raises DownloadError, also if the model has none.
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
    """Return the folder of a draft on the hub, with its safetensors, or else its pickled weights.
    revision None = main.

    Raises DownloadError.
    """
    folder = fetched(repository, revision=revision)
    if any(folder.glob("*.safetensors")):
        return folder
    return fetched_pickled(repository, revision=revision)


def token_map_fetched(named: str) -> Path:
    """Return the path of a token map: a file on this machine, or `organisation/name/file` of the
    hub, which is fetched; any other text unchanged. Raises DownloadError.
    """
    repository, _, name = named.rpartition("/")
    if Path(named).exists() or _HUB_FILE.fullmatch(named) is None:
        return Path(named)
    return _snapshot(repository, [name], None, None) / name


def gguf_fetched(
    reference: HubReference, cache: Path | None = None, revision: str | None = None
) -> Path:
    """Return the path of one GGUF file of a hub model; downloads it with its further parts, and the
    prediction layers beside it, if they are not in the cache. cache, revision: as in `fetched`. If
    the hub does not answer within ASKING seconds, the files in the cache count.

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
    wanted = [*part_names(name), *([layers] if layers else [])]
    return _snapshot(repository, wanted, cache, revision) / name


def check(repository: str, revision: str | None = None) -> None:
    """Check on the hub whether a model that is not on this machine exists; fetches nothing. If the
    hub does not answer within ASKING seconds, loading will show.

    Raises DownloadError if there is no such model or revision, or it is gated.
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
    """Return the models in huggingface_hub's cache, fetched by any program, sorted by name; none
    without a cache that this user may read.
    """
    try:
        repositories = huggingface_hub.scan_cache_dir().repos
    except (huggingface_hub.CacheNotFound, OSError):
        return []
    models = [repo for repo in repositories if repo.repo_type == "model"]
    return sorted(CachedModel(r.repo_id, r.size_on_disk, r.repo_path) for r in models)


def remove(repository: str) -> int:
    """Delete a model, all its revisions, from huggingface_hub's cache. The bytes that are free now;
    0 where it was not there.
    """
    try:
        cache = huggingface_hub.scan_cache_dir()
    except (huggingface_hub.CacheNotFound, OSError):
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
    """Fetch the files of a hub model that match these patterns, in parallel and continuing an
    interrupted download, as huggingface_hub does; compares new files with the hub's digests. Where
    the hub does not answer within ASKING seconds, the cache's files count.
    """
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=repository, repo_type="model")
    blobs = (cache or Path(HF_HUB_CACHE)) / name / "blobs"
    before = set(blobs.glob("*"))
    try:
        _check_answer(repository, revision)
    except DownloadError:
        kept = here(repository, cache, revision)
        if kept is None:
            raise
        return kept
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
    """Raise DownloadError where the hub takes a question and does not answer it within ASKING
    seconds: huggingface_hub asks such a one again for minutes.
    """
    try:
        huggingface_hub.HfApi().model_info(repository, revision=revision, timeout=ASKING)
    except Exception as error:
        if type(error).__name__ in _SILENT:
            raise _failure(repository, revision, error) from error


def _check_digest(repository: str, blob: Path) -> None:
    """Compare a large file of the cache with its name, which is the SHA-256 that the hub gives; of
    small ones it gives none. Raises DownloadError where they differ, and removes the file.
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
    """Return the folder of a hub model, if some of it is on this machine; does not contact the
    hub.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, cache_dir=cache, local_files_only=True
        )
    except (OSError, ValueError):
        return None
    return Path(folder)


def _failure(repository: str, revision: str | None, error: Exception) -> DownloadError:
    """Return the message for a failure of the hub."""
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
    """Return the message for an error of the hub that means no access to such a model."""
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
