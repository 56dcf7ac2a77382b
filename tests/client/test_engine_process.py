"""An engine in a process of its own, without a server."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue

import numpy as np
import pytest

from forerun import child
from forerun.client import engine_process, engine_start, messages
from forerun.client.completion import make_request
from forerun.client.engine_process import EngineCommand, EngineProcess
from forerun.client.engine_start import EngineProgram, EngineStart
from forerun.client.engine_worker import FAILED, SERVER_GONE, Outbox, _Worker
from forerun.constrain.grammar import Grammar
from forerun.engine.request import Delta, Finish, SpeculationStats
from forerun.engine.trace import DraftRow, StepTrace
from forerun.errors import (
    BusyError,
    ContextError,
    EngineError,
    EngineLostError,
    ModelError,
    RequestError,
)
from forerun.interface.plan import TokenLogprobs
from forerun.options.config import EngineConfig
from forerun.speculative.tree import DraftSource
from forerun.types import RequestId
from tests.cli.toys import toy_loaded
from tests.forked import ForkServer
from tests.worlds.servers import alive, status, wait_for

TOY = EngineConfig(model="toy")
HI = np.array([72, 105], np.int32)


@pytest.fixture(scope="module", autouse=True)
def forks():
    """Engines are forks of a process that has imported what they import; servers' are not
    (tests/cli/test_serve_command.py).
    """
    with pytest.MonkeyPatch.context() as patch, ForkServer("tests.worlds.toy_engine") as nursery:
        patch.setattr(engine_start, "subprocess", nursery.subprocess())
        yield


def command(config=TOY, **options):
    program = EngineProgram((sys.executable, "-m", "tests.worlds.toy_engine"), options)
    return EngineCommand(program, config)


class RecordingSink:
    """A Sink that remembers; `ended` is set by the last delta, or an error."""

    def __init__(self):
        self.text, self.error, self.ended = "", None, asyncio.Event()

    def put(self, deltas):
        for delta in deltas:
            self.text += delta.text
            if delta.finish is not None:
                self.ended.set()

    def fail(self, error):
        self.error = error
        self.ended.set()


def test_requests_for_a_loading_model_get_its_progress():
    """Once for each sentence that says something else."""

    async def run():
        sentences = []
        loading = [["reading", 1, 1000], ["reading", 2, 1000], ["reading", 500, 1000], ["b", 0, 0]]
        engine, _ = await EngineProcess.open(command(loading=loading), sentences.append)
        await engine.close()
        return sentences

    assert asyncio.run(run()) == ["reading, 0 %", "reading, 50 %", "b"]


def test_what_crosses_comes_out_as_it_went_in():
    request = make_request(
        HI, (257,), seed=2**64 - 1, logit_bias=((3, -100.0),), stop=("a", "b"), n=3, logprobs=2
    )
    crossed = messages.to_engine(messages.encode(messages.Submit(request))).request
    assert crossed.prompt.tolist() == request.prompt.tolist() and crossed.prompt.dtype == np.int32
    assert crossed.sampling == request.sampling
    assert (crossed.stopping, crossed.n) == (request.stopping, 3)
    row = DraftRow([5, 6], [-1, 0], [1, 2], [0.5, 0.25], [DraftSource.NGRAM] * 2, [0, 1])
    delta = Delta(
        RequestId("one"),
        1,
        "h\u00e9",
        (1, 2),
        (TokenLogprobs(1, -0.1, ((1, -0.1), (7, -2.5))),),
        (TokenLogprobs(2, float("-inf")),),
        Finish.STOP,
        257,
        SpeculationStats(3, 4, 2, (1, 2), "why"),
        16,
        trace=(StepTrace(0, 0, (1, 2), row, 0, 4, "why", 1.5),),
    )
    sent = messages.Deltas([delta], messages.Condition(True, "off", 1.0))
    assert messages.from_engine(messages.encode(sent)) == sent


@pytest.mark.parametrize(
    "error",
    [
        ContextError("too long", "prompt", 5, 6, 7),
        BusyError("wait"),
        RequestError("no", "seed"),
        ModelError("bad"),
        EngineError("gone"),
        ImportError("no torch", name="torch"),
    ],
)
def test_an_error_comes_out_as_it_went_in(error):
    crossed = messages.Problem.of(error).error()
    assert type(crossed) is type(error) and str(crossed) == str(error)
    assert vars(crossed) == vars(error)


def test_a_request_an_abort_a_grammar_and_the_end():
    async def scenario():
        engine, ready = await EngineProcess.open(command(delay=0.001))
        assert ready.name == "toy" and engine.alive and engine.fault is None
        sink = RecordingSink()
        engine.submit(make_request(HI, max_tokens=5), sink)
        await sink.ended.wait()
        assert sink.text == "djell"
        gone, request = RecordingSink(), make_request(HI, max_tokens=3000)
        engine.submit(request, gone)
        engine.abort(request.id)
        await gone.ended.wait()
        constraint = await engine.compile(Grammar.regex("(ab){3}", "regex"), "me")
        held = RecordingSink()
        engine.submit(make_request(HI, (257,), max_tokens=20, grammar=constraint), held)
        await held.ended.wait()
        assert held.text == "ababab"
        with pytest.raises(RequestError, match="regex") as error:
            await engine.compile(Grammar.regex("(ab", "regex"), "me")
        assert error.value.field == "regex"
        refused = RecordingSink()
        engine.submit(make_request(HI, max_tokens=10**6), refused)
        await refused.ended.wait()
        assert isinstance(refused.error, ContextError) and refused.error.requested == 10**6
        stats = await engine.stats()
        assert stats.finished[Finish.ABORT] == 1 and stats.load.pages_held == 0
        running = RecordingSink()
        engine.submit(make_request(HI, max_tokens=3000), running)
        await engine.close()
        assert running.ended.is_set() and not engine.alive and engine.loss is None

    asyncio.run(scenario())


def test_a_process_that_was_begun_before_is_the_first_ones():
    """Opened again after it was closed, the model is another."""

    async def scenario():
        plain = command()
        begun = EngineStart(plain.program.command)
        begun.send(messages.encode(messages.Start(TOY, plain.program.options)))
        start = replace(plain, begun=begun)
        for index in range(2):
            engine, ready = await EngineProcess.open(start)
            assert ready.name == "toy" and (engine.pid == begun.process.pid) == (index == 0)
            await engine.close()
        begun.discard()

    asyncio.run(scenario())


def test_a_process_that_is_not_taken_is_killed():
    begun = EngineStart((sys.executable, "-c", "input()"))
    begun.discard()
    assert begun.process.returncode is not None
    begun.discard()
    begun.send(b"no process reads it")


def test_a_process_whose_server_goes_before_it_says_anything_ends_quietly(capfd):
    begun = EngineStart(command().program.command)
    begun.connection.close()
    assert begun.process.wait() == SERVER_GONE
    assert not capfd.readouterr().err


def test_what_cannot_be_loaded_is_the_same_error_here():
    with pytest.raises(ModelError, match="no such model"):
        asyncio.run(EngineProcess.open(command(load_error="no such model")))


def test_a_process_that_ends_is_an_error_of_waiting_requests():
    async def scenario():
        engine, _ = await EngineProcess.open(command(delay=0.01))
        sink = RecordingSink()
        engine.submit(make_request(HI, max_tokens=3000), sink)
        engine._process.kill()
        await sink.ended.wait()
        assert isinstance(sink.error, EngineLostError) and engine.lost.is_set()
        assert not engine.alive and (await engine.stats()).load.running == 0
        with pytest.raises(EngineLostError, match="SIGKILL"):
            engine.submit(make_request(HI, max_tokens=3), sink)
        with pytest.raises(EngineLostError):
            await engine.compile(Grammar.regex("a", "regex"), "me")
        await engine.close()

    asyncio.run(scenario())


SHARED = EngineConfig(model="a folder", tp_size=2)
"""Of a model that other processes share, as the server knows it: what runs is the toy."""


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_process_that_shares_its_model_may_be_stopped_for_a_moment_only(monkeypatch, goes_on):
    """Others wait for it within a step. If it never goes on, an error comes."""
    if goes_on:
        monkeypatch.setattr(child, "STOPPED_SECONDS", 3600.0)

    async def scenario():
        engine, _ = await EngineProcess.open(command(SHARED, delay=0.01))
        sink = RecordingSink()
        engine.submit(make_request(HI, max_tokens=200 if goes_on else 3000), sink)
        os.kill(engine.pid, signal.SIGSTOP)
        if goes_on:
            assert await asyncio.to_thread(wait_for, lambda: status(engine.pid)[0] == "T")
            os.kill(engine.pid, signal.SIGCONT)
        await sink.ended.wait()
        if goes_on:
            assert sink.error is None and engine.loss is None and sink.text
        else:
            assert isinstance(sink.error, EngineLostError) and engine.lost.is_set()
            assert "was stopped by SIGSTOP, while others share its model" in str(sink.error)
        await engine.close()
        assert not alive(engine.pid)

    asyncio.run(scenario())


def test_an_engine_that_does_not_answer_is_as_it_was_last(monkeypatch):
    """It is busy, or what it says lies behind much else. No request is refused for that."""

    async def scenario():
        engine, _ = await EngineProcess.open(command())
        known = await engine.stats(), await engine.describe()
        os.kill(engine.pid, signal.SIGSTOP)
        monkeypatch.setattr(engine_process, "ASK_SECONDS", 0.0)
        assert (await engine.stats(), await engine.describe()) == known
        assert known[1]["drafter"]
        os.kill(engine.pid, signal.SIGCONT)
        await engine.close()

    asyncio.run(scenario())


def test_an_engine_that_is_slow_to_describe_itself_is_opened(monkeypatch):
    monkeypatch.setattr(engine_process, "ASK_SECONDS", 0.0)

    async def scenario():
        engine, _ = await EngineProcess.open(command())
        assert engine.last_stats.load.running == 0 and (await engine.describe())["drafter"]
        await engine.close()

    asyncio.run(scenario())


def test_a_thread_that_others_wait_for_ends_the_process_with_it():
    """For want of memory, say, which the thread itself may not survive."""
    script = """
import threading
from forerun.client.engine_worker import _failed
threading.excepthook = _failed

def no_memory():
    raise MemoryError

for name in NAMES:
    thread = threading.Thread(target=no_memory, name=name)
    thread.start()
    thread.join()
"""
    names = {0: ["another"], FAILED: ["another", "forerun-send"]}
    for code, each in names.items():
        line = [sys.executable, "-c", script.replace("NAMES", str(each))]
        assert subprocess.run(line, check=False, capture_output=True).returncode == code


def test_messages_to_a_server_that_does_not_read_wait_in_order():
    """The thread that puts them goes on at once; what there is room for arrives without another."""
    ours, theirs = socket.socketpair()
    news = [Delta(RequestId("one"), 0, "a" * 1000 * index) for index in range(100)]
    with ours, theirs:
        outbox, server = Outbox(theirs.fileno()), Connection(os.dup(ours.fileno()))
        for delta in news:
            outbox.put(messages.Deltas([delta], messages.Condition()))
        assert messages.from_engine(server.recv_bytes()).deltas == news[:1]
        outbox.close()
        sending = threading.Thread(target=outbox.flush, args=(60.0,))
        sending.start()
        heard = [messages.from_engine(server.recv_bytes()).deltas[0] for _ in news[1:]]
        sending.join()
        assert heard == news[1:] and not outbox.flush(0.0)
        outbox.put(messages.Deltas([], messages.Condition()))
        assert messages.from_engine(server.recv_bytes()).deltas == []
        server.close()
    outbox.put(messages.Deltas([], messages.Condition()))  # The server is gone: nothing to do.


def test_frames_are_read_in_whatever_pieces_they_come():
    """Deltas that came together are one delivery: a server that was behind has less to write."""
    sent = [Delta(RequestId("one"), 0, text) for text in ("a", "b", "c")]
    data = b"".join(messages.frame(messages.Deltas([d], messages.Condition())) for d in sent)
    data += messages.frame(messages.Loading("x", 1, 2))

    async def heard(size):
        found = []
        connection = engine_process._Connection(found.append)
        for at in range(0, len(data), size):
            connection.data_received(data[at : at + size])
        return found

    for size in (1, 3, 70, len(data)):
        found = asyncio.run(heard(size))
        *deltas, last = [message for messages in found for message in messages]
        assert [message.deltas for message in deltas] == [[one] for one in sent]
        assert last.sentence() == "x, 50 %"
        assert size < len(data) or len(found) == 1


def test_a_grammar_of_no_sequence_is_forgotten():
    with toy_loaded() as loaded:
        worker = _Worker(None, SimpleQueue())
        worker._loaded = loaded
        worker._do(messages.Compile(7, Grammar.regex("a+", "regex"), "me"))
        assert isinstance(worker._outbox.get(), messages.Compiled)
        assert list(worker._grammars) == [7]
        worker._do(messages.Forget(7))
        assert worker._grammars == {}


def test_what_was_not_foreseen_is_an_answer_and_ends_nothing(monkeypatch):
    """The thread that hears the server ends the process where it raises."""

    def fault(*_):
        raise RuntimeError("dictionary changed size during iteration")

    with toy_loaded() as loaded:
        worker = _Worker(None, SimpleQueue())
        worker._loaded = loaded
        monkeypatch.setattr(loaded.engine, "describe", fault)
        monkeypatch.setattr(loaded.engine, "submit", fault)
        worker._do(messages.Describe(5))
        worker._do(messages.Submit(make_request(np.array([72], np.int32), max_tokens=1)))
        failed, refused = worker._outbox.get(), worker._outbox.get()
    assert isinstance(failed, messages.Failed) and failed.call == 5
    assert isinstance(refused, messages.Refused)
    for each in (failed, refused):
        assert isinstance(each.problem.error(), EngineError)
        assert "changed size" in str(each.problem.error())


def test_a_discarded_engine_start_ends_in_silence(tmp_path):
    """Else it warns of a server that has ended, beside the server's own reason."""
    connected = tmp_path / "connected"
    program = (
        "import socket, sys; end = socket.socket(fileno=int(sys.argv[1])); end.send(b'x'); "
        f"end.recv(1); open({str(connected)!r}, 'w').close()"
    )
    for _ in range(5):
        begun = EngineStart((sys.executable, "-c", program))
        assert begun.connection.recv(1) == b"x"
        begun.discard()
        assert begun.process.returncode == -signal.SIGKILL and not connected.exists()
