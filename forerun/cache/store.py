"""Pages on disk: what full pages of the key/value cache hold, found again by their tokens after a
restart. No arrays and no threads; engine/disk_pages.py reads and writes beside serving.

    PATH/store.json        format and secret of the folder
    PATH/lock              held while a segment is made or deleted
    PATH/<fingerprint>/    pages that only an engine with the same fingerprint can read
        <name>.pages       a segment: a header, a table of entries, as many records

Entries have one size, and so have records (a page's tokens, then its content). A record is written
before its entry, so what a killed process leaves is an entry of zeros: a table is read up to its
first entry that is not whole. No entry that was read is ever changed. A segment takes its full size
when it is made and is cut to what it holds when it is closed, so the sum of file sizes never
exceeds the limit. Its writer holds a lock on it: several servers can use one folder.

A page's digest covers its tokens, its salt and all pages before it, under the folder's secret. It
only finds a record: checksum and tokens decide. Any doubt is a miss.
"""

import json
import logging
import os
import shutil
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO

from forerun.cache_dir import try_lock
from forerun.errors import ConfigError

log = logging.getLogger("forerun.cache")

FORMAT = 1
HEADER = struct.Struct("<8sQ16s")
"""MAGIC, the number of entries, a checksum of these two."""
ENTRY = struct.Struct("<16s16s16s")
"""A record's digest, its checksum, a checksum of these two."""
MAGIC = b"FRPAGES1"
SEGMENT_BYTES = 256 << 20
DEFAULT_BYTES = 10 * 10**9
LOCK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where a record is, and its checksum."""

    path: Path
    offset: int
    checksum: bytes


class PageStore:
    """The pages of one fingerprint, in a folder that other servers and models may use too.

    folder       made if it is missing
    fingerprint  a file name, of all that decides a page's content beside its tokens
    tokens       of a record, in bytes
    content      of a record, in bytes
    limit        most bytes of all files of the folder; None: DEFAULT_BYTES, or a quarter of what is
                 free on the disk without them
    corrupt      damaged records that were met
    deleted      segments that were deleted to keep within the limit

    For one thread. Raises ConfigError if the folder cannot be used or the limit is too small;
    methods raise OSError if the disk fails.
    """

    def __init__(
        self, folder: Path, fingerprint: str, tokens: int, content: int, limit: int | None = None
    ) -> None:
        self._root, self._folder = folder, folder / fingerprint
        self._tokens, self._record = tokens, tokens + content
        self._places: dict[bytes, RecordPlace] = {}
        self._file: IO[bytes] | None = None
        self._used = self.corrupt = self.deleted = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                self._secret = _secret(folder)
                free = shutil.disk_usage(folder).free + self.size()
                self.limit = limit or min(DEFAULT_BYTES, free // 4)
                slot = ENTRY.size + self._record
                most = min(SEGMENT_BYTES, self.limit // 4) - HEADER.size
                self._capacity = max(most // slot, 1)
                self._segment = HEADER.size + self._capacity * slot
                if 4 * (HEADER.size + slot) > self.limit:
                    raise ConfigError(
                        f"kv-store-size is {self.limit:,} bytes, but a page of this model takes "
                        f"{slot:,}; make it {8 * slot:,} at least."
                    )
                self._make_room(0)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for path in sorted(self._folder.glob("*.pages")):
                self._read_table(path)
        except OSError as error:
            raise ConfigError(
                f"kv-store {folder} cannot be used ({error.strerror or error}); make it writable "
                "or name another folder."
            ) from error

    def __len__(self) -> int:
        """Return the number of pages that can be found."""
        return len(self._places)

    def __contains__(self, digest: bytes) -> bool:
        """Return whether a page with this digest can be found; its record may prove damaged."""
        return digest in self._places

    def size(self) -> int:
        """Return the bytes of all segments of the folder, of every fingerprint."""
        return sum(size for _, size, _ in self._segments())

    def digest(self, parent: bytes, key: bytes) -> bytes:
        """Return the digest of a page behind the page `parent` (b"": a text's first page).

        key  its tokens as int32 bytes; behind the salt for a text's first page
        """
        return self._hash(parent + key)

    def read(self, digest: bytes, tokens: bytes) -> bytes | None:
        """Return the content of the page with this digest and these tokens; None if its record is
        gone, damaged or of other tokens: then it is not found again.
        """
        place = self._places.get(digest)
        if place is None:
            return None
        record = b""
        with suppress(FileNotFoundError), place.path.open("rb") as file:
            file.seek(place.offset)
            record = file.read(self._record)
            if hasattr(os, "posix_fadvise"):  # Weights shall stay in memory instead.
                where = file.fileno(), place.offset, self._record
                os.posix_fadvise(*where, os.POSIX_FADV_DONTNEED)
        if self._hash(digest + record) == place.checksum and record.startswith(tokens):
            return record[self._tokens :]
        del self._places[digest]
        if record:
            self.corrupt += 1
            log.warning("kv-store: a damaged page in %s is not used", place.path)
        return None

    def touch(self, digests: Iterable[bytes]) -> None:
        """Mark the segments of these pages as used now: the least recently used goes first."""
        for path in {self._places[each].path for each in digests if each in self._places}:
            with suppress(FileNotFoundError):
                os.utime(path)

    def write(self, digest: bytes, tokens: bytes, content: bytes) -> None:
        """Append a page; deletes the least recently used segments if it needs their room. Raises
        OSError if there is none or the disk fails: the page is not found then.
        """
        record = tokens + content
        assert len(record) == self._record, "a record of another size"
        if self._file is None:
            self._open_segment()
        assert self._file is not None
        offset, checksum = self._offset(self._used), self._hash(digest + record)
        _write(self._file, offset, record)
        entry = digest + checksum
        _write(self._file, HEADER.size + self._used * ENTRY.size, entry + self._hash(entry))
        self._places[digest] = RecordPlace(Path(self._file.name), offset, checksum)
        self._used += 1
        if self._used == self._capacity:
            self.close()

    def close(self) -> None:
        """Cut the open segment to what it holds, and release it. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.truncate(self._offset(self._used))

    def _offset(self, number: int) -> int:
        return HEADER.size + self._capacity * ENTRY.size + number * self._record

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, key=self._secret, digest_size=16).digest()

    def _read_table(self, path: Path) -> tuple[int, int]:
        """Learn the places of a segment's records. Returns how many entries its table has, 0 for a
        damaged header, and how many of them are whole.
        """
        with suppress(FileNotFoundError), path.open("rb") as file:
            header, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
            capacity = int.from_bytes(header[8:16], "little")
            offset = HEADER.size + capacity * ENTRY.size
            if header != self._header(capacity) or offset > size:
                return 0, 0
            table = file.read(capacity * ENTRY.size)
            for number, (digest, checksum, own) in enumerate(ENTRY.iter_unpack(table)):
                end = offset + self._record
                if own != self._hash(digest + checksum) or end > size:
                    return capacity, number
                self._places[digest] = RecordPlace(path, offset, checksum)
                offset = end
            return capacity, capacity
        return 0, 0

    def _header(self, capacity: int) -> bytes:
        facts = MAGIC + capacity.to_bytes(8, "little")
        return facts + self._hash(facts)

    # --- segments --------------------------------------------------------------------------

    def _open_segment(self) -> None:
        """Open a segment that has room and no writer, or make one. Raises OSError."""
        with self._locked():
            file, used = self._with_room()
            if file is None:
                self._make_room(self._segment)
                name = f"{time.time_ns():x}-{os.getpid():x}.pages"
                file = (self._folder / name).open("x+b", buffering=0)
                try_lock(file)
                _write(file, 0, self._header(self._capacity))
            file.truncate(self._segment)
            self._file, self._used = file, used

    def _with_room(self) -> tuple[IO[bytes] | None, int]:
        """Return a segment of this capacity that has room and no writer, locked, and how many
        records it has; None if there is none. Raises OSError.
        """
        for path in self._folder.glob("*.pages"):
            capacity, used = self._read_table(path)
            if capacity == self._capacity > used and (file := _own(path)) is not None:
                self._make_room(self._segment, path)
                return file, self._read_table(path)[1]
        return None, 0

    def _segments(self) -> Iterator[tuple[Path, int, int]]:
        """Yield (path, bytes, when it was used last) of every segment of the folder, of all
        fingerprints. Other files, and links, are none.
        """
        for path in self._root.glob("*/*.pages"):
            with suppress(FileNotFoundError):
                about = path.lstat()
                if stat.S_ISREG(about.st_mode) and not path.parent.is_symlink():
                    yield path, about.st_size, about.st_mtime_ns

    def _make_room(self, size: int, keep: Path | None = None) -> None:
        """Delete segments until `size` more bytes fit the limit, the least recently used first;
        `keep` counts for nothing. Raises OSError if other servers write to the rest.
        """
        found = [each for each in self._segments() if each[0] != keep]
        total = sum(bytes for _, bytes, _ in found) + size
        for path, bytes, _ in sorted(found, key=lambda each: each[2]):
            if total <= self.limit:
                return
            if (file := _own(path)) is None:
                continue
            with file:
                path.unlink()
            total -= bytes
            self.deleted += 1
            for digest in [d for d, place in self._places.items() if place.path == path]:
                del self._places[digest]
            log.info("kv-store: %s was deleted to keep within %d bytes", path, self.limit)
        if size and total > self.limit:
            raise OSError(f"its {self.limit:,} bytes are full of segments that others write to")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock. Raises OSError if it is not free within LOCK_SECONDS."""
        with (self._root / "lock").open("a+b") as file:
            deadline = time.monotonic() + LOCK_SECONDS
            while not try_lock(file):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another server has held its lock for {LOCK_SECONDS:.0f} s")
                time.sleep(0.01)
            yield


def _write(file: IO[bytes], offset: int, data: bytes) -> None:
    """Write all of `data`, or raise OSError."""
    file.seek(offset)
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _own(path: Path) -> IO[bytes] | None:
    """Return a segment, open and locked; None if it is gone or another server writes to it."""
    try:
        file = path.open("r+b", buffering=0)
    except OSError:
        return None
    if try_lock(file):
        return file
    file.close()
    return None


def _secret(folder: Path) -> bytes:
    """Return the folder's secret; makes it a store if it is empty. Raises ConfigError if it is
    something else, damaged, or of a newer version; OSError if it cannot be written.
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
