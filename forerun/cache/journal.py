"""Saves what an engine learned: records that are appended to files and read at the next start. No
threads; engine/learning.py writes while the server runs.

A file consists of records: length, payload, checksum. The checksum also covers the record's place
in the file, and needs the folder's secret. A file is read up to its first incomplete record, which
is where a killed writer stopped, or damage: in doubt a record is missing. When all files of a kind
have used their share of the folder, the oldest is deleted.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from forerun.cache.folder import StoreFolder, owned, usable, write_at

FILES = 4
"""Files among which the records of a kind are divided; a quarter of them is deleted at a time."""
SHARE = 8
"""The records of a kind take at most this fraction of the folder's limit: one eighth."""
_LENGTH, _CHECKSUM = 4, 16


class Journal:
    """The records of one kind and fingerprint, in a folder that other servers may use too.

    kind   the files' suffix, one of folder.KINDS
    max_bytes  for the records of all servers, within the folder's limit

    For one thread. Raises ConfigError if the folder cannot be used; methods raise OSError if the
    disk fails.
    """

    def __init__(self, folder: StoreFolder, fingerprint: str, kind: str, max_bytes: int) -> None:
        self._folder, self._fingerprint, self._kind = folder, fingerprint, kind
        self._size = min(max_bytes, folder.limit // SHARE) // FILES
        self._file: IO[bytes] | None = None
        self._used = 0
        with usable(folder.root), folder.locked():
            folder.make_room(0)
            (folder.root / fingerprint).mkdir(mode=0o700, exist_ok=True)

    def read(self) -> Iterator[bytes]:
        """Yield all payloads, the oldest first."""
        for path in self._paths():
            with suppress(FileNotFoundError):
                for payload, _ in self._records(path.read_bytes()):
                    yield payload

    def append(self, payload: bytes) -> bool:
        """Append a record. Returns False, and writes nothing, if it is empty or larger than a file.
        Raises OSError if there is no room or the disk fails: the record is then missing.
        """
        length = len(payload).to_bytes(_LENGTH, "little")
        size = _LENGTH + len(payload) + _CHECKSUM
        if size > self._size or not payload:
            return False
        if self._file is not None and self._used + size > self._size:
            self.close()
        if self._file is None:
            self._open(size)
        assert self._file is not None
        write_at(self._file, self._used, length + payload + self._checksum(self._used, payload))
        self._used += size
        return True

    def close(self) -> None:
        """Truncate the open file to its contents, and close it. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.truncate(self._used)

    def _paths(self) -> list[Path]:
        """Return the files, the oldest first: their names begin with the time. Links are left
        out.
        """
        found = (self._folder.root / self._fingerprint).glob(f"*.{self._kind}")
        return sorted(path for path in found if path.is_file() and not path.is_symlink())

    def _records(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield (payload, end of its record) up to the first record that is incomplete or
        damaged.
        """
        begin = 0
        while begin + _LENGTH + _CHECKSUM < len(data):
            length = int.from_bytes(data[begin : begin + _LENGTH], "little")
            end = begin + _LENGTH + length
            payload = data[begin + _LENGTH : end]
            checksum = data[end : end + _CHECKSUM]
            if not length or checksum != self._checksum(begin, payload):
                return
            begin = end + _CHECKSUM
            yield payload, begin

    def _checksum(self, begin: int, payload: bytes) -> bytes:
        return self._folder.hash(b"record" + begin.to_bytes(8, "little") + payload)

    def _open(self, size: int) -> None:
        """Continue the newest file if it has room for `size` bytes and no writer, or create one.
        Raises OSError if the disk refuses, or other servers write all FILES files.
        """
        with self._folder.locked():
            paths = self._paths()
            self._file = owned(paths[-1]) if paths else None
            if self._file is not None:
                ends = [end for _, end in self._records(self._file.read())]
                self._used = ends[-1] if ends else 0
                if self._used + size <= self._size:
                    self._folder.make_room(self._size, paths[-1])
                    self._file.truncate(self._used)  # Nothing is left of a record that was torn.
                    self._file.truncate(self._size)
                    return
                self._file.close()
            self._file = None
            left = len(paths)
            for path in paths:
                left -= left >= FILES and self._folder.delete(path)
            if left >= FILES:
                raise OSError(f"{FILES} other servers write what they learn")
            self._file, self._used = self._folder.new(self._fingerprint, self._kind, self._size), 0
