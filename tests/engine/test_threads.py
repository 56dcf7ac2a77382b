"""The engine on its own thread, used from others."""

import threading
import time

import pytest

from forerun.engine.request import Finish
from forerun.errors import BusyError, EngineError, RequestError
from forerun.executors.toy import ToyExecutor
from tests.engine.toys import RecordingSink, ask, limits, make


class Gate(ToyExecutor):
    """Every step waits for a permit; `inside` is set while one waits."""

    def __init__(self, permits):
        super().__init__(limits())
        self.permits, self.inside = threading.Semaphore(permits), threading.Event()

    def begin(self, plan, trees, masks=None):
        self.inside.set()
        self.permits.acquire()
        self.inside.clear()
        return super().begin(plan, trees, masks)

    def open_up(self):
        """No step waits any more."""
        self.permits.release(1_000_000)


@pytest.fixture
def started():
    engines = []

    def start(*args, gate=None, **shape):
        engine = make(*args, executor=gate, **shape)
        engines.append((engine, gate))
        engine.start()
        return engine

    yield start
    for engine, gate in engines:
        if gate:
            gate.open_up()
        engine.shutdown()
        assert not engine.alive


def wait_for(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def test_idle_costs_nothing(started, monkeypatch):
    """Its thread goes to sleep without a time at which it wakes up."""
    monkeypatch.setattr("forerun.engine.core.QUIET", 0.0)
    asleep, waits = threading.Event(), threading.Condition.wait

    def wait(condition, seconds=None):
        if threading.current_thread().name == "forerun-engine" and seconds is None:
            asleep.set()
        return waits(condition, seconds)

    engine = started()
    sink = RecordingSink()
    engine.submit(ask(), sink)
    assert_idle_soon(engine)
    monkeypatch.setattr(threading.Condition, "wait", wait)
    engine.submit(ask("1"), sink)
    wait_for(lambda: ("1", 0) in sink.ended)
    assert asleep.wait(300)
    engine.submit(ask("2"), sink)
    wait_for(lambda: ("2", 0) in sink.ended)


def assert_idle_soon(engine):
    wait_for(lambda: engine.stats().load.running == 0 and engine.stats().steps > 0)


def test_drain_gives_up_in_time_and_refuses_newcomers(started):
    gate = Gate(permits=2)
    engine = started(gate=gate)
    sink = RecordingSink()
    engine.submit(ask(max_tokens=150), sink)
    wait_for(lambda: len(sink.deltas) == 2)
    assert not engine.drain(0.05)  # Whatever it waits for, nothing goes on meanwhile.
    with pytest.raises(BusyError, match="shutting down"):
        engine.submit(ask("2"), sink)
    threading.Thread(target=lambda: (wait_for(lambda: not engine.alive), gate.open_up())).start()
    engine.shutdown()
    assert sink.last().finish == Finish.ABORT
    assert engine.drain(0)


def test_a_sink_may_submit(started):
    """A batch client continues from the sink, on the engine's thread."""
    engine = started()
    sink = RecordingSink()

    def chain(delta):
        sink(delta)
        if delta.finish and int(delta.request) < 5:
            engine.submit(ask(str(int(delta.request) + 1)), chain)

    engine.submit(ask("1"), chain)
    wait_for(lambda: ("5", 0) in sink.ended)


def test_a_leak_stops_the_engine(started):
    """An engine that lost a page is not trusted any more, and says so."""
    engine = started()
    engine._core.scheduler.index.take(1)
    sink = RecordingSink()
    engine.submit(ask(), sink)
    wait_for(lambda: not engine.alive)
    sink.expect(ask())
    with pytest.raises(EngineError, match="leaked"):
        engine.submit(ask("2"), sink)


def test_an_id_is_free_as_soon_as_its_last_delta_comes(started):
    """Asked again in that very moment, on the engine's own thread."""
    engine, finished = started(), []

    def relay(delta):
        if delta.finish is None:
            return
        if len(finished) < 20:
            engine.submit(ask(max_tokens=3), relay)
        finished.append(delta.finish)

    engine.submit(ask(max_tokens=3), relay)
    wait_for(lambda: len(finished) == 21, 30)
    assert set(finished) == {Finish.LENGTH} and engine.drain(30)
    engine.check()


def test_all_is_reported_when_nothing_is_left_to_drain(started):
    engine, deltas = started(), []

    def slow(delta):
        if delta.finish is not None:
            time.sleep(0.05)
        deltas.append(delta)

    engine.submit(ask(max_tokens=3), slow)
    assert engine.drain(30) and deltas[-1].finish is not None


def test_a_sink_that_fails_at_its_end_frees_no_other_request(started):
    gate, sink = Gate(permits=3), RecordingSink()
    engine = started(gate=gate)

    def relay(delta):
        if delta.finish is not None:
            engine.submit(ask(max_tokens=150), sink)
            raise ValueError("a sink that fails")

    engine.submit(ask(max_tokens=2), relay)
    wait_for(lambda: sink.deltas, 30)
    with pytest.raises(RequestError, match="is running"):
        engine.submit(ask(), sink)
    engine.abort("r")
    gate.open_up()
    assert engine.drain(30) and sink.ended == {("r", 0)}
