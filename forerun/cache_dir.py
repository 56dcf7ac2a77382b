"""Paths of users: their homes, the folder for models, and its lock between processes."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from forerun.errors import ConfigError, DownloadError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_POLL_SECONDS = 0.2
_CHOICE = {"win32": "LOCALAPPDATA", "darwin": "HOME"}.get(sys.platform, "XDG_CACHE_HOME")


def home() -> Path:
    """Return the user's home; one that does not exist for a user without (a number that the machine
    does not know, as containers run under, and no HOME).
    """
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def cache_dir() -> Path:
    """Return the user's cache directory for Forerun, by the platform's rules (XDG_CACHE_HOME on
    Linux). It need not exist; nothing is created.
    """
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home() / "Library" / "Caches"
    else:
        given = os.environ.get("XDG_CACHE_HOME", "")
        base = Path(given) if Path(given).is_absolute() else home() / ".cache"
    return base / "forerun"


def home_path(text: str) -> Path:
    """Return the path, `~` and `~user` replaced. Raises ConfigError if that user has no home."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"the path {text[:200]!r} names the home of a user that this machine does not know; "
            "write the path out"
        ) from error


def seen(path: Path) -> os.stat_result | None:
    """Return what the system says of a path; None if there is nothing, or this user may not look
    there.
    """
    try:
        return path.stat()
    except OSError:
        return None


def make_room(folder: Path, size: int) -> None:
    """Create `folder`. Raises DownloadError if that fails or its disk has fewer than `size` bytes
    free.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise unwritable(folder, error) from error
    if free < size:
        raise DownloadError(
            f"{folder} has {free / 1e6:.0f} MB free and {size / 1e6:.0f} MB are needed; "
            f"make room or choose another cache directory ({_CHOICE})"
        )


def write_cached(path: Path, content: bytes, files: int) -> None:
    """Write a file of the cache atomically, creating its folder, and delete the oldest files with
    the same suffix beyond `files`. Raises OSError if one cannot be written or deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_bytes(content)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    old = sorted(path.parent.glob(f"*{path.suffix}"), key=lambda one: one.stat().st_mtime_ns)
    for one in old[:-files]:
        one.unlink(missing_ok=True)


def unwritable(folder: Path, error: OSError) -> DownloadError:
    """Return the error that the cache directory `folder` cannot be written; does not raise it."""
    return DownloadError(
        f"the cache directory {folder} cannot be written ({error.strerror or error}); "
        f"make it writable or choose another ({_CHOICE})"
    )


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created and stays; a context manager that
    blocks.

    waiting  called a few times a second while another process holds it

    The system releases the lock when its process ends. Raises DownloadError if the file cannot be
    created or locked.
    """
    try:
        file = path.open("a+b")
    except OSError as error:
        raise unwritable(path.parent, error) from error
    with file:
        while not _locked(file):
            waiting()
            time.sleep(_POLL_SECONDS)
        yield


def _locked(file: IO[bytes]) -> bool:
    try:
        return try_lock(file)
    except OSError as error:
        raise DownloadError(f"{file.name} cannot be locked: {error}") from error


if sys.platform == "win32":

    def try_lock(file: IO[bytes]) -> bool:
        """Lock the open file until it is closed; False if another process has it."""
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:

    def try_lock(file: IO[bytes]) -> bool:
        """Lock the open file until it is closed; False if it is locked already, by another process
        or this one. Raises OSError if its file system has no locks.
        """
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
