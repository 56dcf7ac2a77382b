"""What is learnt outlives the engine: a fresh one drafts as the old one, for the same tenants."""

import shutil
import threading
import time

import pytest

from forerun.cache import journal as journals
from forerun.cache.folder import StoreFolder
from forerun.cache.journal import Journal
from forerun.control.policy import FixedPolicy
from forerun.drafters.native_ngram import CpuNgramDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.drafters.ngram_cache import LONGEST
from forerun.engine import learning
from forerun.engine.learning import Learnt
from forerun.engine.thread import Engine, EngineOptions
from forerun.executors import cpu
from forerun.executors.toy import ToyExecutor
from forerun.interface.grammars import NoGrammars
from tests.engine.toys import TOKENIZER, ask, full_disk, limits, run

native = pytest.mark.skipif(bool(cpu.available()), reason="no compiled core on this machine")
BOTH = pytest.mark.parametrize("kind", [NgramDrafter, pytest.param(CpuNgramDrafter, marks=native)])
LIMIT = 1 << 20


class Estimates:
    """A learner that knows a word."""

    def __init__(self, word=b""):
        self.word = word

    def learnt(self):
        return self.word

    def relearn(self, learnt):
        self.word = learnt
        return True


@pytest.fixture
def engines(tmp_path):
    """Makes engines that keep what they learn in one folder, unless it is None."""
    made = []

    def build(kind=NgramDrafter, folder=tmp_path / "kv", settings=b"here", estimates=None):
        lookup, executor = kind(4, 0.0, None, 4000), ToyExecutor(limits())
        parts = executor, lookup, FixedPolicy(4, 4), TOKENIZER, NoGrammars()
        engine = Engine(*parts, EngineOptions())
        made.append(engine)
        if folder is not None:
            store = StoreFolder(folder, LIMIT)
            kept = [Journal(store, "toy", name, LIMIT) for name in ("ngrams", "prices")]
            learners = {"n-grams": lookup.counts, "estimates": estimates or Estimates()}
            learnt = Learnt(*kept, settings, lookup.counts, learners)
            engine.restored = learnt.restore()
            engine.attach_learning(learnt, store.hash(b"tenants"))
        engine.kept = lambda: lookup.describe()["cache"]
        return engine

    yield build
    for engine in made:
        engine.shutdown()


TENANTS = {"nothing": {}, "a salt": {"cache_salt": "x"}, "a key": {"tenant": "k"}}


def generate(engine, **tenant):
    """Answers that are counted; their lengths differ, one is longer than a record."""
    for number, prompt in enumerate(("Hello", "other", "Hello you")):
        run(
            engine,
            ask(str(number), prompt, max_tokens=30 + number, stop_tokens=(), **tenant),
            check=False,
        )


def drafts(engine, prompt="Hello", **tenant):
    """What the steps of an answer verified and accepted."""
    request = ask("next", prompt, max_tokens=40, stop_tokens=(), **tenant)
    sink = run(engine, request, check=False)
    stats = sink.last("next").stats
    return stats.steps, stats.draft_tokens, stats.accepted, stats.histogram


@BOTH
@pytest.mark.parametrize("tenant", TENANTS)
def test_a_restart_drafts_the_same(engines, monkeypatch, kind, tenant):
    monkeypatch.setattr(learning, "PART", 7)
    running = engines(kind, None)
    first = engines(kind)
    for engine in (running, first):
        generate(engine, **TENANTS[tenant])
    kept = first.kept()
    first.shutdown()
    second = engines(kind)
    assert second.kept() == kept == running.kept() > 50 and second.restored[0] > 60
    expected = drafts(running, **TENANTS[tenant])
    assert drafts(second, **TENANTS[tenant]) == expected
    assert expected[0] < drafts(engines(kind, None), **TENANTS[tenant])[0]
    second.shutdown()
    third = engines(kind)  # With what the second one added.
    assert third.kept() == running.kept()
    further = drafts(running, "Hello you", **TENANTS[tenant])
    assert drafts(third, "Hello you", **TENANTS[tenant]) == further


@pytest.mark.parametrize(
    ("tenant", "other"),
    [("nothing", "a salt"), ("a salt", "nothing"), ("a salt", "a key"), ("a key", "nothing")],
)
def test_only_the_same_tenant_gets_them(engines, tenant, other):
    first = engines()
    generate(first, **TENANTS[tenant])
    first.shutdown()
    second = engines()
    assert second.kept()
    assert drafts(second, **TENANTS[other]) == drafts(engines(folder=None), **TENANTS[other])


def test_tenants_of_another_folder_are_others(engines, tmp_path):
    """A file that was copied shows nothing, since checksums and tenants are of the secret."""
    first = engines()
    generate(first, cache_salt="x")
    first.shutdown()
    engines(folder=tmp_path / "other").shutdown()
    for path in (tmp_path / "kv" / "toy").iterdir():
        shutil.copy(path, tmp_path / "other" / "toy")
    assert engines(folder=tmp_path / "other").restored == (0, set())


def written(engine, count):
    deadline = time.monotonic() + 30
    while sum(engine.describe()["kept"].values()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return engine.describe()["kept"]


def test_a_killed_server_leaves_all_that_ended(engines, tmp_path):
    first = engines()
    generate(first)
    written(first, 3)
    shutil.copytree(tmp_path / "kv", tmp_path / "copy")  # As it is on disk, not closed.
    assert engines(folder=tmp_path / "copy").kept() == first.kept()


def test_estimates_are_written_now_and_then(engines, monkeypatch, tmp_path):
    monkeypatch.setattr(learning, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(learning, "LEAST_WAIT", 0.001)
    estimates = Estimates(b"one")
    first = engines(estimates=estimates)
    estimates.word = b"two"
    deadline = time.monotonic() + 30
    while not first.describe()["kept"]["written"]:
        assert time.monotonic() < deadline
        first.step_once()
    shutil.copytree(tmp_path / "kv", tmp_path / "copy")
    second = engines(folder=tmp_path / "copy", estimates=(later := Estimates()))
    assert later.word == b"two" and "estimates" in second.restored[1]


def test_estimates_of_other_settings_are_not_used(engines):
    estimates = Estimates()
    first = engines(estimates=estimates)
    generate(first)
    estimates.word = b"one"
    first.shutdown()
    other = Estimates(b"own")
    second = engines(settings=b"there", estimates=other)
    assert second.restored[1] == set() and other.word == b"own" and second.restored[0]
    other.word = b"two"
    second.shutdown()
    back = Estimates()
    engines(estimates=back)
    assert back.word == b"one"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_ends_writing_only(engines, monkeypatch, failing):
    write = journals.write_at
    monkeypatch.setattr(journals, "write_at", full_disk(write, failing))
    first = engines()
    generate(first)
    kept = written(first, 3)
    assert kept["written"] == failing
    request = ask("right", stop_tokens=())
    run(first, request).expect(request)
    first.shutdown()
    monkeypatch.setattr(journals, "write_at", write)
    assert bool(engines().kept()) == bool(failing)


def test_a_disk_that_stalls_holds_nothing_up(engines, monkeypatch):
    monkeypatch.setattr(learning, "QUEUED", 2)
    monkeypatch.setattr(learning, "CLOSE_SECONDS", 0.01)
    blocked = threading.Event()
    monkeypatch.setattr(Journal, "append", lambda *_: blocked.wait(30))
    first = engines()
    for _ in range(3):
        generate(first)
    assert first.describe()["kept"]["dropped"] >= 5
    first.shutdown()
    blocked.set()


def test_contexts_are_as_long_as_what_is_counted():
    assert learning.CONTEXT == LONGEST


@BOTH
def test_without_capacity_nothing_is_counted(kind):
    lookup = kind(4, 0.0, None, 0)
    lookup.counts.counted = lambda *_: pytest.fail("nothing was counted")
    engine = Engine(
        *(ToyExecutor(limits()), lookup, FixedPolicy(4, 4), TOKENIZER, NoGrammars()),
        EngineOptions(),
    )
    generate(engine)
    engine.shutdown()
