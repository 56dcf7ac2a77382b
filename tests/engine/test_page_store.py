"""Pages on disk: found after a restart, refused at any doubt, within the limit at every moment."""

import json
import os
import shutil
from hashlib import shake_256
from types import SimpleNamespace

import numpy as np
import pytest

from forerun.cache import folder as folders
from forerun.cache import store as module
from forerun.cache.checksum import RowSums
from forerun.cache.folder import StoreFolder
from forerun.cache.store import ENTRY, HEADER, PageStore
from forerun.errors import ConfigError

TOKENS, CONTENT = 8, 100
SIZE = TOKENS + CONTENT
SLOT = ENTRY.size + SIZE


def opened(folder, fingerprint="a", limit=20_000):
    return PageStore(StoreFolder(folder, limit), fingerprint, TOKENS, CONTENT)


def read(store, *pages):
    """Contents of pages, a digest and tokens each, up to the first that is a miss."""
    into = memoryview(bytearray(len(pages) * store.record_bytes))
    return [bytes(content) for content in store.read(pages, into)]


def tokens(number):
    return number.to_bytes(TOKENS, "little")


def content(number):
    return bytes([number % 251]) * CONTENT


def chain(store, count, salt=b""):
    """(digest, tokens, content) of a text's first pages."""
    pages, parent = [], b""
    for number in range(count):
        parent = store.digest(parent, (b"" if number else salt) + tokens(number))
        pages.append((parent, tokens(number), content(number)))
    return pages


def filled(folder, count=5, **how):
    store = opened(folder, **how)
    pages = chain(store, count)
    for page in pages:
        store.write(*page)
    return store, pages


def found(folder, pages, **how):
    store = opened(folder, **how)
    return [read(store, (digest, key)) == [text] for digest, key, text in pages]


def segments(folder):
    return sorted(folder.glob("*/*.pages"))


def size(folder):
    return sum(path.stat().st_size for path in segments(folder))


def test_pages_are_found_again(tmp_path):
    store, pages = filled(tmp_path / "new" / "folder")
    assert read(store, *(page[:2] for page in pages)) == [page[2] for page in pages]
    store.close()
    folder = tmp_path / "new" / "folder"
    assert all(found(folder, pages))
    assert found(folder, pages, fingerprint="b") == [False] * 5
    again = opened(folder)
    assert len(again) == 5 and pages[0][0] in again
    salted = chain(again, 2, b"salt")
    assert salted[1][0] not in again  # All pages behind another salt's first are others, too.
    assert not read(again, (pages[0][0], tokens(1)))  # The digest finds it, its tokens differ.
    assert (folder / "store.json").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_killed_writer_leaves_what_was_whole(tmp_path):
    _store, pages = filled(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # As it is on disk, not closed.
    assert all(found(tmp_path / "b", pages))
    (segment,) = segments(tmp_path / "b")
    table = HEADER.size + 4 * ENTRY.size
    with segment.open("r+b") as file:  # The last entry was not written.
        file.seek(table)
        file.write(bytes(ENTRY.size))
    assert found(tmp_path / "b", pages) == [True] * 4 + [False]
    later = opened(tmp_path / "b")
    later.write(*pages[4])
    later.close()
    assert all(found(tmp_path / "b", pages)) and len(segments(tmp_path / "b")) == 1


@pytest.mark.parametrize("cut", [1, SIZE, 3 * SIZE])
def test_a_segment_that_was_cut_is_logged_once(tmp_path, caplog, cut):
    _store, pages = filled(tmp_path / "a")
    _store.close()
    (segment,) = segments(tmp_path / "a")
    os.truncate(segment, segment.stat().st_size - cut)
    with caplog.at_level("WARNING"):
        later = opened(tmp_path / "a")
        assert len(later) == 5 - -(-cut // SIZE)
        later.write(*pages[4])
        later.close()
    assert [each for each in caplog.messages if "is damaged after" in each] == [
        f"kv-store: {segment} is damaged after {5 - -(-cut // SIZE)} records"
    ]
    caplog.clear()
    shutil.rmtree(tmp_path / "a")
    whole, _ = filled(tmp_path / "a")
    whole.close()
    opened(tmp_path / "a")
    assert not caplog.messages


def _flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


ENTRIES = HEADER.size + ENTRY.size  # The second entry.
CAPACITY = (20_000 // 4 - HEADER.size) // SLOT
RECORDS = HEADER.size + CAPACITY * ENTRY.size + SIZE  # The second record.


@pytest.mark.parametrize(
    ("offset", "left"),
    [
        *[(at, ()) for at in (0, 8, 15, 16, HEADER.size - 1)],
        *[(ENTRIES + at, (0,)) for at in (0, 15, 16, 31, 32, 47)],
        *[(RECORDS + at, (0, 2, 3, 4)) for at in (0, TOKENS - 1, TOKENS, TOKENS + CONTENT - 1)],
    ],
)
def test_a_damaged_byte_is_a_miss(tmp_path, offset, left):
    store, pages = filled(tmp_path)
    store.close()
    _flip(segments(tmp_path)[0], offset)
    assert found(tmp_path, pages) == [number in left for number in range(5)]
    store = opened(tmp_path)
    for page in pages:
        assert read(store, page[:2]) in ([page[2]], [])
        if page[0] not in store:
            store.write(*page)
    assert store.corrupt == (1 if left == (0, 2, 3, 4) else 0)
    assert all(read(store, page[:2]) == [page[2]] for page in pages)


def test_a_damaged_page_among_others_that_are_read_with_it(tmp_path):
    store, pages = filled(tmp_path, 7)
    _flip(segments(tmp_path)[0], RECORDS + SIZE - 1)
    keys = [page[:2] for page in pages]
    assert read(store, *keys) == [pages[0][2]] and pages[1][0] not in store
    assert read(store, *keys[2:]) == [page[2] for page in pages[2:]] and store.corrupt == 1
    store.write(*pages[1])  # Behind the others: three runs of records.
    assert read(store, *keys) == [page[2] for page in pages]


@pytest.mark.parametrize("size", [1, 4, 2047, 2048, 2049, 128 * 2048 + 4, 300 * 2048])
def test_row_sums(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    sums = RowSums(b"secret")
    key = np.frombuffer(shake_256(b"rows of records" + b"secret").digest(2048), "<u4").tolist()
    filled = data + bytes(-size % 2048)
    for row in {0, len(filled) // 2048 - 1}:
        x = np.frombuffer(filled[2048 * row :][:2048], "<u4").tolist()
        mixed = [(a + k) % 2**32 for a, k in zip(x, key, strict=True)]
        total = sum(a * b for a, b in zip(mixed[:256], mixed[256:], strict=True)) % 2**64
        assert sums(data)[8 * row :][:8] == total.to_bytes(8, "little")
    assert len(sums(data)) == len(filled) // 256
    assert sums(b"x" + data)[:8] == sums(memoryview(b"xx" + data)[1:])[:8]  # At any address.
    assert sums(data) != RowSums(b"other")(data)
    for place in {0, size // 2, size - 1}:
        changed = bytearray(data)
        changed[place] ^= 128
        assert sums(changed) != sums(data)


def test_a_segment_of_another_format_is_not_read_and_makes_room(tmp_path):
    store, _pages = filled(tmp_path)
    store.close()
    (old,) = segments(tmp_path)
    facts = b"FRPAGES1" + old.read_bytes()[8:16]  # As an older version wrote it.
    with old.open("r+b") as file:
        file.write(facts + store.folder.hash(facts))
    os.utime(old, (0, 0))
    again = opened(tmp_path)
    assert not len(again)
    for page in chain(again, 200):
        again.write(*page)
    assert not old.exists() and all(found(tmp_path, chain(again, 200)[-40:]))


def test_the_limit_holds_at_every_moment(tmp_path):
    filled(tmp_path, fingerprint="other", limit=10_000)[0].close()
    store = opened(tmp_path, limit=10_000)
    pages = chain(store, 200)
    for page in pages:
        store.write(*page)
        assert size(tmp_path) <= 10_000
        assert read(store, page[:2]) == [page[2]]
    assert store.folder.deleted > 5 and not segments(tmp_path / "other")
    assert store.folder.size() == size(tmp_path) > 7_000
    store.close()
    smaller = opened(tmp_path, limit=5_000)
    assert 0 < size(tmp_path) <= 5_000 and smaller.folder.deleted
    left = found(tmp_path, pages, limit=5_000)
    assert left == sorted(left) and left[-1]  # The oldest went.


def test_what_is_used_stays(tmp_path):
    store = opened(tmp_path, limit=10_000)
    pages = chain(store, 200)
    for number, page in enumerate(pages):
        store.write(*page)
        if not number % 5:
            store.touch([pages[0][0]])
    assert read(store, pages[0][:2]) == [pages[0][2]] and pages[30][0] not in store


def test_two_servers_in_one_folder(tmp_path):
    one, pages = filled(tmp_path)
    two = opened(tmp_path)
    assert all(read(two, page[:2]) == [page[2]] for page in pages)
    more = chain(two, 8)[5:]
    for page in more:
        two.write(*page)
    assert len(segments(tmp_path)) == 2  # Each has its own.
    many = [(os.urandom(16), tokens(9), content(9)) for _ in range(300)]
    for page in many:
        two.write(*page)  # The limit is both's; a segment that is written to stays.
        assert size(tmp_path) <= 20_000
    assert read(one, pages[0][:2]) == [pages[0][2]]
    one.close()
    for page in many:
        two.write(os.urandom(16), *page[1:])
    assert not read(one, pages[0][:2]) and pages[0][0] not in one  # The other deleted it.


def test_segments_of_others_fill_the_folder(tmp_path):
    held = [filled(tmp_path, 1, limit=10_000)[0] for _ in range(4)]
    store = opened(tmp_path, limit=10_000)
    with pytest.raises(OSError, match="full of files"):
        store.write(*chain(store, 2)[1])
    held[0].close()
    store.write(*chain(store, 2)[1])
    assert size(tmp_path) <= 10_000


def test_nothing_else_is_ever_deleted(tmp_path):
    folder, other = tmp_path / "store", tmp_path / "elsewhere"
    filled(folder, limit=10_000)[0].close()
    other.mkdir()
    (other / "x.pages").write_bytes(bytes(9_000))
    (folder / "link").symlink_to(other)
    (folder / "a" / "link.pages").symlink_to(other / "x.pages")
    (folder / "a" / "notes.txt").write_text("mine")
    store = opened(folder, limit=10_000)
    for page in chain(store, 200):
        store.write(*page)
    assert (other / "x.pages").exists() and (folder / "link").is_symlink()
    assert (folder / "a" / "link.pages").is_symlink() and (folder / "a" / "notes.txt").exists()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_full_disk(tmp_path, monkeypatch, failing):
    store, pages = filled(tmp_path)
    write, calls = module.write_at, []

    def full(file, offset, data):
        calls.append(offset)
        if len(calls) == failing:
            write(file, offset, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(file, offset, data)

    monkeypatch.setattr(module, "write_at", full)
    page = chain(store, 6)[5]
    with pytest.raises(OSError, match="No space"):
        store.write(*page)
    assert page[0] not in store
    store.close()
    assert found(tmp_path, [*pages, page]) == [True] * 5 + [False]


def test_folders_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv-store .*file cannot be used .*name another folder"):
        opened(tmp_path / "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="holds other files"):
        opened(tmp_path / "mine")
    with pytest.raises(
        ConfigError, match=r"600 bytes \(kv-store-size\).*takes 156; set kv-store-size"
    ):
        opened(tmp_path / "small", limit=600)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2400))
    with pytest.raises(ConfigError, match=r"600 bytes \(a quarter of what is free on its disk\)"):
        opened(tmp_path / "full", limit=None)
    opened(tmp_path / "newer")
    about = tmp_path / "newer" / "store.json"
    facts = json.loads(about.read_text())
    about.write_text(json.dumps(facts | {"format": 2}))
    with pytest.raises(ConfigError, match=r"newer Forerun \(format 2, this one reads 1\)"):
        opened(tmp_path / "newer")
    about.write_text("{")
    with pytest.raises(ConfigError, match=r"store\.json is damaged"):
        opened(tmp_path / "newer")
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.02)
    with (tmp_path / "small" / "lock").open("a") as file:
        assert folders.try_lock(file)
        with pytest.raises(ConfigError, match="held its lock"):
            opened(tmp_path / "small")


def test_the_default_limit_is_a_quarter_of_the_disk_or_less(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: free._replace(free=8_000_000))
    assert opened(tmp_path, limit=None).folder.limit == 2_000_000
    filled(tmp_path)[0].close()
    own = size(tmp_path)
    assert own and opened(tmp_path, limit=None).folder.limit == (8_000_000 + own) // 4
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: free._replace(free=10**12))
    assert opened(tmp_path, limit=None).folder.limit == 10**10
