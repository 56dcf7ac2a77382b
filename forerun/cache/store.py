"""Stores full pages of the key/value cache on disk, to be found by their tokens after a restart. No
arrays and no threads; engine/disk_pages.py reads and writes while the server runs. The pages'
contents in sliding-window layers, and recurrent states after them, are stored in the same way, each
under the digest of its page or its last page.

A segment (`<name>.pages` and others, folder.py) is a header, a table of entries, and as many
records. Entries have one size, and so have records (a page's tokens, then its content). A record is
written before its entry, so a killed process leaves an entry of zeros: a table is read up to its
first invalid entry. An entry that was read is never changed.

A page's digest covers its tokens, its salt and all pages before it, with the folder's secret. It
only locates a record: checksum and tokens decide whether it is the right one; in doubt it is
missing. A segment of another format is not read, and is deleted when its room is needed.
"""

import logging
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from forerun.cache.checksum import RowSums
from forerun.cache.folder import StoreFolder, owned, read_at, usable, write_at
from forerun.errors import ConfigError

log = logging.getLogger("forerun.cache")

HEADER = struct.Struct("<8sQ16s")
"""MAGIC, the number of entries, a checksum of these two."""
ENTRY = struct.Struct("<16s16s16s")
"""A record's digest, its checksum, a checksum of these two."""
MAGIC = b"FRPAGES2"
SEGMENT_BYTES = 256 << 20
_WHAT = {"pages": "a page", "states": "a recurrent state", "windows": "a window's part of a page"}


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """The location of a record, and its checksum."""

    path: Path
    offset: int
    checksum: bytes

    def follows(self, other: "RecordPlace", size: int) -> bool:
        """Return whether this record comes directly after `other`, in the same file, with records
        of `size` bytes.
        """
        return self.path == other.path and self.offset == other.offset + size


class PageStore:
    """The stored pages of one fingerprint, in a folder that other servers and models may use too.

    folder       the folder and its limit
    fingerprint  a file name; covers everything besides the tokens that a page's content depends on
    tokens       bytes of tokens per record
    content      bytes of content per record
    kind         of its files, as in folder.KINDS
    corrupt      number of damaged records found so far

    For one thread. Raises ConfigError if the folder cannot be used or its limit is too small;
    methods raise OSError if the disk fails.
    """

    def __init__(
        self,
        folder: StoreFolder,
        fingerprint: str,
        tokens: int,
        content: int,
        kind: str = "pages",
    ) -> None:
        self.folder, self._fingerprint, self._kind = folder, fingerprint, kind
        self._tokens, self._record = tokens, tokens + content
        self._sums = RowSums(folder.secret)
        self._places: dict[bytes, RecordPlace] = {}
        self._damaged = set[Path]()
        self._file: IO[bytes] | None = None
        self._used = self.corrupt = 0
        slot = ENTRY.size + self._record
        self._capacity = max((min(SEGMENT_BYTES, folder.limit // 4) - HEADER.size) // slot, 1)
        self._segment = HEADER.size + self._capacity * slot
        if 4 * (HEADER.size + slot) > folder.limit:
            raise ConfigError(
                f"kv-store {folder.root} may take {folder.limit:,} bytes ({folder.chosen}), but "
                f"{_WHAT[kind]} of this model takes {slot:,}; set kv-store-size to "
                f"{8 * slot:,} at least, on a disk with that much room."
            )
        with usable(folder.root):
            with folder.locked():
                folder.make_room(0)
            self._own.mkdir(mode=0o700, exist_ok=True)
            for path in sorted(self._own.glob(f"*.{kind}")):
                self._read_table(path)

    def __len__(self) -> int:
        """Return the number of pages that can be found."""
        return len(self._places)

    def __contains__(self, digest: bytes) -> bool:
        """Return whether a page with this digest is in the index; its record may turn out to be
        damaged.
        """
        return digest in self._places

    @property
    def _own(self) -> Path:
        return self.folder.root / self._fingerprint

    def digest(self, parent: bytes, key: bytes) -> bytes:
        """Return the digest of a page after the page `parent` (b"": a text's first page).

        key  its tokens as int32 bytes; for a text's first page, after the salt
        """
        return self.folder.hash(parent + key)

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return self._record

    def read(self, pages: Sequence[tuple[bytes, bytes]], into: memoryview) -> list[memoryview]:
        """Read pages, given as (digest, tokens), up to the first whose record is gone, damaged or
        of other tokens. A bad record is removed from the index.

        into  buffer for the records, one after another

        Returns the pages' contents, as views of `into`.
        """
        contents: list[memoryview] = []
        while run := self._run(pages[len(contents) :]):
            rest = into[len(contents) * self._record :][: len(run) * self._record]
            there = self._read_records(run[0], rest)
            for place, (digest, tokens) in zip(run, pages[len(contents) :], strict=False):
                key, content = rest[: self._tokens], rest[self._tokens : self._record]
                sound = there >= self._record and key == tokens
                if not sound or self._checksum(digest, tokens, content) != place.checksum:
                    del self._places[digest]
                    if there > 0:
                        self.corrupt += 1
                        log.warning("kv-store: a damaged page in %s is not used", place.path)
                    return contents
                contents.append(content)
                rest, there = rest[self._record :], there - self._record
        return contents

    def touch(self, digests: Iterable[bytes]) -> None:
        """Mark the segments of these pages as used now: the least recently used segment is deleted
        first.
        """
        for path in {self._places[each].path for each in digests if each in self._places}:
            with suppress(FileNotFoundError):
                os.utime(path)

    def write(self, digest: bytes, tokens: bytes, content: bytes) -> None:
        """Append a page, deleting the least recently used segments if it needs their room. Raises
        OSError if there is no room or the disk fails: the page is then missing.
        """
        record = tokens + content
        assert len(record) == self._record, "a record of another size"
        if self._file is None:
            self._open_segment()
        assert self._file is not None
        offset, checksum = self._offset(self._used), self._checksum(digest, tokens, content)
        write_at(self._file, offset, record)
        entry = digest + checksum
        write_at(self._file, HEADER.size + self._used * ENTRY.size, entry + self.folder.hash(entry))
        self._places[digest] = RecordPlace(Path(self._file.name), offset, checksum)
        self._used += 1
        if self._used == self._capacity:
            self.close()

    def close(self) -> None:
        """Truncate the open segment to its contents, and close it. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.truncate(self._offset(self._used))

    def _run(self, pages: Sequence[tuple[bytes, bytes]]) -> list[RecordPlace]:
        """Return the places of the first of these pages, as long as their records follow each other
        in one file.
        """
        run: list[RecordPlace] = []
        for digest, _ in pages:
            place = self._places.get(digest)
            if place is None or (run and not place.follows(run[-1], self._record)):
                break
            run.append(place)
        return run

    def _read_records(self, first: RecordPlace, into: memoryview) -> int:
        """Read records from the first one on. Returns how many bytes there were."""
        with suppress(FileNotFoundError), first.path.open("rb", buffering=0) as file:
            there = read_at(file, first.offset, into)
            if hasattr(os, "posix_fadvise"):  # Weights shall stay in memory instead.
                where = file.fileno(), first.offset, len(into)
                os.posix_fadvise(*where, os.POSIX_FADV_DONTNEED)
            return there
        return 0

    def _checksum(self, digest: bytes, tokens: bytes, content: bytes | memoryview) -> bytes:
        return self.folder.hash(digest + tokens + self._sums(content))

    def _offset(self, number: int) -> int:
        return HEADER.size + self._capacity * ENTRY.size + number * self._record

    def _read_table(self, path: Path) -> tuple[int, int]:
        """Read the places of a segment's records into the index. Returns how many entries its table
        has, 0 for a damaged header, and how many of them are valid.
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
                if own != self.folder.hash(digest + checksum) or end > size:
                    if any(own) and path not in self._damaged:  # A killed writer leaves zeros.
                        self._damaged.add(path)
                        log.warning("kv-store: %s is damaged after %d records", path, number)
                    return capacity, number
                self._places[digest] = RecordPlace(path, offset, checksum)
                offset = end
            return capacity, capacity
        return 0, 0

    def _header(self, capacity: int) -> bytes:
        facts = MAGIC + capacity.to_bytes(8, "little")
        return facts + self.folder.hash(facts)

    # --- segments --------------------------------------------------------------------------

    def _open_segment(self) -> None:
        """Open a segment that has room and no writer, or create one. Raises OSError if the disk
        refuses.
        """
        with self.folder.locked():
            file, used = self._with_room()
            if file is None:
                file = self.folder.new(self._fingerprint, self._kind, self._segment)
                write_at(file, 0, self._header(self._capacity))
            file.truncate(self._segment)
            self._file, self._used = file, used
        paths = {place.path for place in self._places.values()}
        if gone := {path for path in paths if not path.exists()}:
            self._places = {d: each for d, each in self._places.items() if each.path not in gone}

    def _with_room(self) -> tuple[IO[bytes] | None, int]:
        """Return a segment of this capacity that has room and no writer, locked, and how many
        records it has; None if there is none. Raises OSError if the disk refuses.
        """
        for path in self._own.glob(f"*.{self._kind}"):
            capacity, used = self._read_table(path)
            if capacity == self._capacity > used and (file := owned(path)) is not None:
                self.folder.make_room(self._segment, path)
                return file, self._read_table(path)[1]
        return None, 0
