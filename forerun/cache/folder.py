"""The folder in which engines store pages and estimates; its size never exceeds a limit.

    PATH/store.json        format and secret of the folder
    PATH/lock              held while a file is made or deleted
    PATH/<fingerprint>/    what only an engine with the same fingerprint can read
        <name>.pages       keys and values, <name>.windows those of sliding-window layers,
                           <name>.states recurrent states (store.py)
        <name>.ngrams      tokens of answers that were counted, <name>.prices what steps cost
                           (journal.py)

A file is created at its full size and truncated to its contents when it is closed, so the sum of
file sizes never exceeds the limit. Its writer holds a lock on it: several servers can use one
folder. Other files, and links, are never deleted.
"""

import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO

from forerun.cache_dir import try_lock
from forerun.errors import ConfigError

log = logging.getLogger("forerun.cache")

FORMAT = 1
DEFAULT_BYTES = 10 * 10**9
LOCK_SECONDS = 10.0
KINDS = ("pages", "states", "windows", "ngrams", "prices")


class StoreFolder:
    """A folder that servers and models share.

    root     created if it is missing
    limit    most bytes of all files; None: DEFAULT_BYTES, or a quarter of the disk's free space
             and these files' if that is less
    chosen   what decided the limit, for messages
    secret   of the folder, random
    deleted  files that were deleted to keep within the limit

    Raises ConfigError if the folder cannot be used; methods raise OSError if the disk fails.
    """

    def __init__(self, root: Path, limit: int | None = None) -> None:
        self.root, self.deleted = root, 0
        with usable(root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.locked():
                self.secret = _secret(root)
                free = shutil.disk_usage(root).free + self.size()
                self.limit = limit or min(DEFAULT_BYTES, free // 4)
        self.chosen = "kv-store-size" if limit else "a quarter of what is free on its disk"

    def size(self) -> int:
        """Return the bytes of all files, of every fingerprint."""
        return sum(size for _, size, _ in self._files())

    def hash(self, data: bytes) -> bytes:
        """Return a checksum of 16 bytes that cannot be computed without the folder's secret."""
        return blake2b(data, key=self.secret, digest_size=16).digest()

    def new(self, fingerprint: str, kind: str, size: int) -> IO[bytes]:
        """Create a file of `size` bytes and return it, open and locked. The caller holds the
        folder's lock. Raises OSError if there is no room.
        """
        self.make_room(size)
        path = self.root / fingerprint / f"{time.time_ns():x}-{os.getpid():x}.{kind}"
        file = path.open("x+b", buffering=0)
        try_lock(file)
        file.truncate(size)
        return file

    def make_room(self, size: int, keep: Path | None = None) -> None:
        """Delete the least recently used files until `size` more bytes fit the limit; `keep` is
        neither counted nor deleted. The caller holds the folder's lock. Raises OSError if other
        servers write to the files that are left.
        """
        found = [each for each in self._files() if each[0] != keep]
        total = sum(bytes for _, bytes, _ in found) + size
        for path, bytes, _ in sorted(found, key=lambda each: each[2]):
            if total <= self.limit:
                return
            if self.delete(path):
                total -= bytes
                log.info("kv-store: %s was deleted to keep within %d bytes", path, self.limit)
        if size and total > self.limit:
            raise OSError(f"its {self.limit:,} bytes are full of files that others write to")

    def delete(self, path: Path) -> bool:
        """Delete a file. The caller holds the folder's lock. Returns False if another server writes
        to it.
        """
        if (file := owned(path)) is None:
            return False
        with file:
            path.unlink()
        self.deleted += 1
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock. Raises OSError if it is not free within LOCK_SECONDS."""
        with (self.root / "lock").open("a+b") as file:
            deadline = time.monotonic() + LOCK_SECONDS
            while not try_lock(file):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another server has held its lock for {LOCK_SECONDS:.0f} s")
                time.sleep(0.01)
            yield

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        """Yield (path, bytes, when it was used last) of every file that counts."""
        for kind in KINDS:
            for path in self.root.glob(f"*/*.{kind}"):
                with suppress(FileNotFoundError):
                    about = path.lstat()
                    if stat.S_ISREG(about.st_mode) and not path.parent.is_symlink():
                        yield path, about.st_size, about.st_mtime_ns


def write_at(file: IO[bytes], offset: int, data: bytes) -> None:
    """Write all of `data` at byte `offset`, or raise OSError."""
    file.seek(offset)
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def read_at(file: IO[bytes], offset: int, into: memoryview) -> int:
    """Read bytes from `offset` on into `into`. Returns how many there were, fewer at the end of the
    file. Raises OSError if reading fails.
    """
    file.seek(offset)
    done = 0
    while done < len(into) and (count := file.readinto(into[done:])):  # type: ignore[attr-defined]
        done += count
    return done


def owned(path: Path) -> IO[bytes] | None:
    """Open and lock a file. Returns None if it is gone or another server writes to it."""
    try:
        file = path.open("r+b", buffering=0)
    except OSError:
        return None
    if try_lock(file):
        return file
    file.close()
    return None


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Convert an OSError of the block to a ConfigError that the folder cannot be used."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"kv-store {folder} cannot be used ({error.strerror or error}); make it writable "
            "or name another folder."
        ) from error


def _secret(folder: Path) -> bytes:
    """Return the folder's secret; creates it in an empty folder. Raises ConfigError if the folder
    holds other files, is damaged, or was made by a newer version; OSError if it cannot be written.
    """
    about = folder / "store.json"
    if not about.exists():
        if any(path.name not in ("lock", "store.json.new") for path in folder.iterdir()):
            raise ConfigError(f"kv-store {folder} holds other files; name an empty or new folder.")
        new = folder / "store.json.new"
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"format": FORMAT, "secret": os.urandom(32).hex()}, file)
        new.replace(about)
    try:
        facts = json.loads(about.read_text())
        version, secret = int(facts["format"]), bytes.fromhex(facts["secret"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"kv-store: {about} is damaged; delete the folder or name another."
        ) from error
    if version > FORMAT or len(secret) > 64:
        raise ConfigError(
            f"kv-store {folder} was made by a newer Forerun (format {version}, this one reads "
            f"{FORMAT}); name another folder."
        )
    return secret
