"""Pages on disk beside an engine on the toy: the same text after a restart, whatever disks do."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from forerun.cache import store as stores
from forerun.cache.folder import StoreFolder
from forerun.cache.store import PageStore
from forerun.engine import disk_pages
from forerun.engine.disk_states import DiskStates
from forerun.errors import EngineError
from forerun.executors.toy import ToyExecutor, ToyPages
from tests.engine.carrying import CarryingToy
from tests.engine.toys import RecordingSink, ask, finish, full_disk, limits, make, submit

LONG = "".join(chr(97 + (7 * i + i // 5) % 26) for i in range(96))
SIZE = 1 << 20


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Makes engines on the toy that keep pages in one folder; they are shut down at the end."""
    monkeypatch.setattr(disk_pages, "LEAST_SECONDS", 10.0)  # The toy reads faster than any disk.
    monkeypatch.setattr(disk_pages, "LEAST_READ", 1)
    made = []

    def build(name="none", least=40, folder=tmp_path / "kv", limit=SIZE, executor=None, **shape):
        engine = make(name, executor=executor, **shape)
        runs = engine._parts.executor
        tokens = 4 * (runs.limits.page_size + engine._core.scheduler.index.lookahead)
        print_ = f"toy-{runs.limits.page_size}-{tokens}"
        engine.attach_store(
            PageStore(StoreFolder(folder, limit), print_, tokens, runs.pages.page_bytes), least
        )
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.shutdown()


def kept(engine):
    return engine._core.scheduler.disk


def written(engine):
    """Turns until all pages are on disk."""
    deadline = time.monotonic() + 30
    while not kept(engine).idle:
        assert time.monotonic() < deadline
        engine.step_once()
        engine.check()


def answer(engine, *requests):
    """Deltas of requests that run to the end, checked against the toy's definition."""
    sink = RecordingSink()
    submit(engine, sink, *requests)
    finish(engine)
    sink.expect(*requests)
    return sink


def cached(sink, id="r", index=0):
    return sink.of(id, index)[0].cached_tokens


def restarted(engines, engine=None, **how):
    """Another engine after this one, or one that answered `LONG`; its memory knows nothing."""
    if engine is None:
        engine = engines()
        answer(engine, ask(prompt=LONG))
    written(engine)
    engine.shutdown()
    return engines(**how)


@pytest.mark.parametrize("name", ["none", "ngram", "oracle", "adversary", "erratic"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_same_text_after_a_restart(engines, name, page_size):
    shape = {"name": name, "page_size": page_size, "pages": 512 // page_size}
    first = engines(**shape)
    before = answer(first, ask(prompt=LONG))
    assert cached(before) == 0 and first.stats().store.misses == {"absent": 1}
    second = restarted(engines, first, **shape)
    after = answer(second, ask(prompt=LONG))
    assert after.tokens() == before.tokens()
    assert cached(after) == 95  # One runs again; the rest of its page is copied.
    stats = second.stats().store
    assert stats.hits == 1 and stats.tokens == 96 and not stats.misses
    assert answer(second, ask(prompt=LONG)).tokens() == before.tokens()
    assert second.stats().store.hits == 1  # Now it is in memory.


@pytest.mark.parametrize("name", ["none", "ngram", "oracle", "erratic"])
def test_rounds_that_overlap(engines, name):
    """Pages come and go while a round runs."""

    def overlapping():
        return {"name": name, "executor": CarryingToy(limits(pages=128)), "overlap": True}

    first = engines(**overlapping())
    answer(first, ask("1", LONG), ask("2", LONG[::-1]))
    second = restarted(engines, first, **overlapping())
    sink, short = RecordingSink(), ask("0", "short", max_tokens=60, stop_tokens=())
    second.submit(short, sink)
    for _ in range(4):
        second.step_once()
    late = answer(second, ask("1", LONG), ask("2", LONG[::-1]))
    sink.expect(short)
    assert cached(late, "1") == cached(late, "2") == 95
    assert second.stats().store.hits == 2


def test_salts_do_not_share(engines):
    first = engines()
    answer(first, ask(prompt=LONG, cache_salt="mine"))
    second = restarted(engines, first, pages=256)
    sink = answer(
        second,
        ask("none", LONG),
        ask("other", LONG, cache_salt="yours"),
        ask("mine", LONG, cache_salt="mine"),
    )
    assert [cached(sink, id) for id in ("none", "other", "mine")] == [0, 0, 95]


def test_short_prompts_are_written_when_they_come_again(engines):
    first = engines(least=1000)
    answer(first, ask(prompt=LONG))
    written(first)
    assert len(kept(first).store) == 0
    answer(first, ask(prompt=LONG[:50] + "others"))
    written(first)
    assert len(kept(first).store) == 12
    second = restarted(engines, first, least=1000)
    assert cached(answer(second, ask(prompt=LONG))) == 48


def test_shutdown_writes_what_waits_and_what_runs(engines):
    engine = engines()
    engine.start()
    sink = RecordingSink()
    engine.submit(ask(prompt=LONG, max_tokens=90, stop_tokens=()), sink)
    deadline = time.monotonic() + 30
    while not sink.deltas:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    engine.shutdown()
    assert len(kept(engine).store) == 24
    assert cached(answer(engines(), ask(prompt=LONG))) == 95


def damage(folder, every=97):
    for path in folder.glob("*/*.pages"):
        data = bytearray(path.read_bytes())
        data[::every] = bytes(byte ^ 1 for byte in data[::every])
        path.write_bytes(data)


@pytest.mark.parametrize("every", [97, 1500, 4000])
def test_damaged_records_are_misses(engines, tmp_path, every):
    first = engines()
    answer(first, ask(prompt=LONG))
    written(first)
    first.shutdown()
    damage(tmp_path / "kv", every)
    second = engines()
    assert cached(answer(second, ask(prompt=LONG))) < 92
    third = restarted(engines, second)
    assert cached(answer(third, ask(prompt=LONG))) == 95  # It was written again.


@pytest.mark.parametrize("bytes_before_a_step", [1, 150, 10**6])
def test_a_record_damaged_while_serving(engines, tmp_path, monkeypatch, bytes_before_a_step):
    monkeypatch.setattr(disk_pages, "READ_BYTES", bytes_before_a_step)
    second = restarted(engines)
    (path,) = (tmp_path / "kv").glob("*/*.pages")
    data = path.read_bytes()
    path.write_bytes(data[:-200] + bytes([data[-200] ^ 1]) + data[-199:])
    sink = answer(second, ask(prompt=LONG))
    stats = second.stats().store
    assert 0 < cached(sink) < 92 and stats.misses == {"corrupt": 1} and stats.hits == 1


@pytest.mark.parametrize("failing", [0, 1, 7, 20])
def test_a_full_disk_ends_writing_only(engines, monkeypatch, failing):
    write = stores.write_at
    first = engines()
    monkeypatch.setattr(stores, "write_at", full_disk(write, failing))
    answer(first, ask(prompt=LONG))
    written(first)
    assert first.stats().store.dropped > 0
    answer(first, ask(prompt=LONG[::-1]))
    written(first)
    monkeypatch.setattr(stores, "write_at", write)
    second = restarted(engines, first)
    assert cached(answer(second, ask(prompt=LONG))) == max(failing - 1, 0) // 2 * 4


def test_a_disk_that_cannot_be_read(engines, monkeypatch):
    second = restarted(engines)

    def broken(self, pages, into):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(PageStore, "read", broken)
    assert cached(answer(second, ask(prompt=LONG))) == 0
    assert second.stats().store.misses == {"failed": 1}


def test_a_stalling_disk_delays_no_longer_than_reading_the_prompt(engines, monkeypatch):
    second = restarted(engines)
    monkeypatch.setattr(disk_pages, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(disk_pages, "LEAST_SECONDS", 0.05)
    go, read = threading.Event(), PageStore.read
    parts = iter(range(100))

    def stalling(self, pages, into):
        if next(parts) == 0:
            go.wait(30)
        return read(self, pages, into)

    monkeypatch.setattr(PageStore, "read", stalling)
    sink = answer(second, ask("a", LONG))
    assert cached(sink, "a") == 0 and second.stats().store.misses == {"late": 1}
    second.forget_prefixes()
    sink = answer(second, ask("b", LONG))  # It does not wait for a disk that is known to stall.
    assert cached(sink, "b") == 0 and second.stats().store.misses == {"late": 2}
    go.set()
    written(second)
    second.forget_prefixes()
    monkeypatch.setattr(disk_pages, "LEAST_SECONDS", 10.0)
    assert cached(answer(second, ask("c", LONG)), "c") == 95


class Forgetful:
    """A state after 92 tokens, until it is forgotten."""

    state_bytes, places = 4, (92,)

    def state_lengths(self, tokens, salt=b""):
        return [place for place in self.places if place <= len(tokens)]

    def read_state(self, tokens, salt=b""):
        return b"data"


def test_a_state_alone_may_take_as_long_as_its_prompt(tmp_path):
    executor = ToyExecutor(limits())
    executor.state_contents = states = Forgetful()
    engine = make(executor=executor)
    stores = [
        PageStore(StoreFolder(tmp_path / "kv", SIZE), "toy", 16, size, kind)
        for size, kind in ((executor.pages.page_bytes, "pages"), (states.state_bytes, "states"))
    ]
    engine.attach_store(stores[0], 40, DiskStates(stores[1], states, 4))
    answer(engine, ask(prompt=LONG))
    written(engine)
    states.places = ()
    kept(engine)._pace.tokens_per_ms = 0.001
    text, table = np.array(list(LONG.encode()), np.int32), SimpleNamespace(salt=b"")
    began = time.monotonic()
    reading = kept(engine)._find(SimpleNamespace(tokens=text, total=len(text), table=table))
    engine.shutdown()
    assert len(reading.keys) == 23 and reading.deadline - began >= 92.0


def test_aborted_while_it_waits(engines, monkeypatch):
    second = restarted(engines)
    monkeypatch.setattr(disk_pages, "READ_BYTES", 1)
    go, read = threading.Event(), PageStore.read
    monkeypatch.setattr(PageStore, "read", lambda *of: (go.wait(30), read(*of))[1])
    sink = RecordingSink()
    second.submit(ask(prompt=LONG), sink)
    second.step_once()
    assert kept(second).reading and not sink.deltas
    second.abort("r")
    second.step_once()
    second.check()
    assert not kept(second).reading and second.stats().load.pages_held == 0
    go.set()
    written(second)


class RefusingPages(ToyPages):
    def write_page(self, page, content):
        raise EngineError("no")


def test_an_executor_that_refuses_a_page(engines):
    first = engines()
    answer(first, ask(prompt=LONG))
    executor = ToyExecutor(limits())
    executor.pages = RefusingPages(executor.pages.keys, executor.pages.values)
    second = restarted(engines, first, executor=executor)
    assert cached(answer(second, ask("a", LONG)), "a") == 0
    assert cached(answer(second, ask("b", LONG)), "b") == 95  # From memory; the store is off.


def test_many_requests_on_a_shared_prefix(engines):
    second = restarted(engines, pages=256, slots=4)
    sink = answer(second, *[ask(str(i), LONG + str(i), max_tokens=5) for i in range(12)])
    counts = [cached(sink, str(i)) for i in range(12)]
    assert counts == [96] * 10 + [97] * 2  # The last two begin as the second does.
    assert second.stats().store.hits == 1


def test_the_size_stays_within_the_limit(engines, tmp_path):
    engine = engines(limit=12_000, context=192, pages=128)
    random = np.random.default_rng(0)
    for number in range(12):
        answer(engine, ask(str(number), random.integers(1, 250, 100), max_tokens=2))
        written(engine)
        assert sum(p.stat().st_size for p in (tmp_path / "kv").glob("*/*.pages")) <= 12_000
    assert kept(engine).store.folder.deleted
