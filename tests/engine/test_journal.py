"""Records on disk: read in order after a restart, up to any doubt, within their share."""

import os

import pytest

from forerun.cache import journal as module
from forerun.cache.folder import StoreFolder
from forerun.cache.journal import FILES, Journal

LIMIT = 160_000  # A file holds 5,000 bytes.
RECORDS = [bytes([number]) * (100 + number) for number in range(1, 30)]


def opened(folder, fingerprint="a", kind="ngrams", limit=LIMIT, most=1 << 20):
    return Journal(StoreFolder(folder, limit), fingerprint, kind, most)


def filled(folder, records=RECORDS, **how):
    journal = opened(folder, **how)
    assert all(journal.append(record) for record in records)
    return journal


def files(folder):
    return sorted(folder.glob("*/*.ngrams"))


def size(folder):
    return sum(path.stat().st_size for path in folder.glob("*/*.*"))


def test_records_are_read_again_in_order(tmp_path):
    journal = filled(tmp_path)
    assert [*opened(tmp_path).read()] == RECORDS  # Also by another server, while it is written.
    journal.close()
    assert size(tmp_path) < 5_000
    assert [*opened(tmp_path, "b").read()] == [*opened(tmp_path, kind="prices").read()] == []
    again = filled(tmp_path, RECORDS[:2])
    again.close()
    again.close()
    assert [*opened(tmp_path).read()] == RECORDS + RECORDS[:2] and len(files(tmp_path)) == 1


def test_the_oldest_are_forgotten(tmp_path):
    records = [number.to_bytes(4, "little") * 100 for number in range(100)]
    for number in range(0, 100, 5):
        journal = opened(tmp_path)
        for record in records[number : number + 5]:
            assert journal.append(record) and size(tmp_path) <= 4 * 5_000
        if number % 10:
            journal.close()
        del journal
    left = [*opened(tmp_path).read()]
    assert left == records[-len(left) :] and 30 < len(left) < 50 and len(files(tmp_path)) == FILES
    small = opened(tmp_path, most=1_000)
    assert not small.append(bytes(300)) and not small.append(b"")


def test_the_folder_is_not_exceeded(tmp_path):
    filled(tmp_path, fingerprint="old").close()
    (tmp_path / "old" / "x.pages").write_bytes(bytes(LIMIT - 6_000))
    os.utime(tmp_path / "old" / "x.pages", ns=(1, 1))
    journal = filled(tmp_path)
    assert size(tmp_path) <= LIMIT and not (tmp_path / "old" / "x.pages").exists()
    journal.close()
    opened(tmp_path, limit=1_000)  # It holds at the start too.
    assert size(tmp_path) <= 1_000


def _flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("offset", [0, 3, 4, 104, 105, 120])
def test_what_follows_damage_is_not_read(tmp_path, offset):
    """offset: in the third record; of 103 bytes, behind 4 of its length."""
    filled(tmp_path).close()
    begin = sum(len(record) + 20 for record in RECORDS[:2])
    _flip(files(tmp_path)[0], begin + offset)
    assert [*opened(tmp_path).read()] == RECORDS[:2]
    filled(tmp_path, RECORDS[10:11]).close()  # It goes on in place of the damage.
    assert [*opened(tmp_path).read()] == RECORDS[:2] + RECORDS[10:11]


@pytest.mark.parametrize("cut", [0, 3, 60, 121, 250, 5_000])
def test_a_file_that_ends_early(tmp_path, cut):
    filled(tmp_path)
    os.truncate(files(tmp_path)[0], cut)
    read = [*opened(tmp_path).read()]
    assert read == RECORDS[: len(read)] and len(read) == {121: 1, 250: 2, 5_000: 29}.get(cut, 0)


def test_a_record_moved_elsewhere_is_none(tmp_path):
    filled(tmp_path).close()
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[121:])
    assert [*opened(tmp_path).read()] == []


def test_two_servers_in_one_folder(tmp_path):
    one, two = filled(tmp_path), filled(tmp_path, RECORDS[:5])
    assert [*opened(tmp_path).read()] == RECORDS + RECORDS[:5] and len(files(tmp_path)) == 2
    others = [filled(tmp_path, RECORDS[:1]) for _ in range(2)]
    with pytest.raises(OSError, match="4 other servers"):
        opened(tmp_path).append(b"x")
    for each in (one, two, *others):
        each.close()
    filled(tmp_path, RECORDS[:1]).close()
    assert [*opened(tmp_path).read()] == RECORDS + RECORDS[:5] + RECORDS[:1] * 3


def test_links_and_other_files_stay(tmp_path):
    opened(tmp_path / "kv")
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (tmp_path / "kv" / "a" / "f.ngrams").symlink_to(mine)
    for _ in range(6):
        filled(tmp_path / "kv").close()
    assert mine.read_text() == "mine" and (tmp_path / "kv" / "a" / "f.ngrams").is_symlink()


def test_a_full_disk(tmp_path, monkeypatch):
    journal = filled(tmp_path)

    def full(file, offset, data):
        file.seek(offset)
        file.write(data[:50])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_at", full)
    with pytest.raises(OSError, match="No space"):
        journal.append(RECORDS[0])
    journal.close()
    assert [*opened(tmp_path).read()] == RECORDS
