"""Models by hub id (`organisation/name`), fetched and cached by huggingface_hub."""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from forerun.errors import DownloadError

_PATTERNS = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "ngrams.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]
"""Data only: no code and no pickle is ever fetched."""


def fetched(repository: str, cache: Path | None = None, revision: str | None = None) -> Path:
    """The folder of a hub model, downloaded if it is not in huggingface_hub's cache yet.

    cache     where to keep it; None = where huggingface_hub's own settings say
    revision  branch, tag or commit; None = main
    Raises DownloadError.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=_PATTERNS, cache_dir=cache
        )
    except GatedRepoError as error:
        raise DownloadError(
            f"{repository} is gated: accept its terms on the hub, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise DownloadError(f"the hub has no model {repository}, or it is private") from error
    except RevisionNotFoundError as error:
        raise DownloadError(f"{repository} has no revision {revision!r} on the hub") from error
    except (LocalEntryNotFoundError, EntryNotFoundError) as error:
        raise DownloadError(
            f"{repository} is not on this machine and the hub cannot be reached; connect to the "
            "network, or download the folder elsewhere and give its path"
        ) from error
    except Exception as error:  # its HTTP library, hence its errors, differ between versions
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DownloadError(f"{repository} was not fetched: {reason}") from error
    return Path(folder)
