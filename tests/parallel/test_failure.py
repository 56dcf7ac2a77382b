"""A rank that is killed, stopped or exhausted, whenever: open requests end with an error that names
it, no process is left, no port is kept. Nothing here waits for a clock.
"""

import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from queue import SimpleQueue

import numpy as np
import pytest

from forerun import child
from forerun.build.engine import make_engine
from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.tensor_parallel import TensorParallel
from forerun.client.completion import make_request
from forerun.errors import ConfigError, EngineError, ModelError, RankError
from forerun.executors.torch import group
from forerun.executors.torch.group import Waits
from forerun.executors.torch.model_runner import ModelRunner, TorchOptions
from forerun.executors.torch.parallel import processes
from forerun.executors.torch.parallel.executor import ParallelExecutor
from forerun.executors.torch.parallel.processes import Ranks
from forerun.executors.torch.parallel.start import RankStart
from forerun.options.config import EngineConfig
from tests.models import tiny
from tests.parity.driver import limits
from tests.worlds.servers import status, wait_for

SLOW = pytest.mark.slow
PATIENCE = 120.0
"""Of a test for what comes at once: it is a failure that takes so long."""


def config(folder, **changes):
    settled = {"executor": "torch", "device": "cpu", "tp_size": 2, "threads": 1, "context": 256}
    settled |= {"max_sequences": 4, "kv_tokens": 1024, "policy": "fixed"}
    return EngineConfig(model=str(folder), **settled | changes)


def over(pid):
    """Wait until a process that is no child of ours, or one that is reaped already, has ended."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], PATIENCE)[0])
    finally:
        os.close(watched)


@pytest.fixture
def served(folder):
    target = open_target(config(folder))
    engine = make_engine(target, target.config)
    engine.start()
    yield target, engine, target.executor.describe()["ranks"][0]["pid"]
    engine.shutdown()
    target.close()


def streaming(engine):
    """The news of a request that would run for long, of which the first has come."""
    news = SimpleQueue()
    request = make_request(np.arange(5, 25, dtype=np.int32), max_tokens=200, ignore_eos=True)
    engine.submit(request, news.put)
    assert news.get(timeout=PATIENCE).finish is None
    return news


def last_of(news):
    while True:
        delta = news.get(timeout=PATIENCE)
        if delta.finish is not None:
            return delta


def exhaust(pid):
    """What it allocates next is not there."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))


FAULTS = {
    "killed": (lambda pid: os.kill(pid, signal.SIGKILL), "was ended by SIGKILL"),
    "stopped": (lambda pid: os.kill(pid, signal.SIGSTOP), "was stopped by SIGSTOP"),
    "terminated": (lambda pid: os.kill(pid, signal.SIGTERM), "was ended by SIGTERM"),
    "exhausted": (exhaust, "failed: "),
}


@pytest.fixture
def afresh(monkeypatch):
    """Ranks that begin by their command line: a fork has room to allocate in from the beginning."""
    monkeypatch.setattr(processes, "subprocess", subprocess)


def test_a_stream_hears_which_rank_is_exhausted(afresh, served):
    test_a_stream_hears_which_rank_is_gone(served, "exhausted")


@pytest.mark.parametrize("fault", ["killed", "stopped", pytest.param("terminated", marks=SLOW)])
def test_a_stream_hears_which_rank_is_gone(served, fault):
    _, engine, pid = served
    does, says = FAULTS[fault]
    news = streaming(engine)
    does(pid)
    delta = last_of(news)
    assert delta.finish.value == "error"
    assert f"rank 1 of the tensor-parallel group {says}" in delta.error
    engine._thread.join(PATIENCE)
    assert over(pid) and not engine.alive
    with pytest.raises(EngineError, match=f"rank 1 .* {says}"):
        engine.submit(make_request(np.arange(3, dtype=np.int32), max_tokens=1), news.put)


@pytest.mark.slow
def test_also_while_nothing_runs(served):
    """The engine sleeps; it is woken, and gives up. `/health` says what `alive` says."""
    _, engine, pid = served
    news = streaming(engine)
    last_of(news)
    assert engine.alive
    os.kill(pid, signal.SIGKILL)
    engine._thread.join(PATIENCE)
    assert not engine.alive


def test_rank_0_that_fails_in_a_step_ends_the_others(served, monkeypatch):
    """They wait for it in the middle of a pass."""
    _, engine, pid = served

    def no_memory(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr(ModelRunner, "run", no_memory)
    news = SimpleQueue()
    engine.submit(make_request(np.arange(5, dtype=np.int32), max_tokens=5), news.put)
    assert "rank 0 failed: out of memory" in last_of(news).error
    engine._thread.join(PATIENCE)
    assert over(pid) and not engine.alive


class NeverDone:
    """A wait that is never over."""

    def wait(self, patience):
        raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return False


class LossyGroup:
    """A rank's group: it sends, and loses what it receives."""

    def __init__(self, group):
        self.group = group

    def allgather(self, *what):
        self.group.allgather(*what).wait()
        return NeverDone()


def test_results_without_a_receiver_are_not_waited_for(served, monkeypatch):
    """Rank 1 has what it waits for and is at the next sum; rank 0 gets nothing, and no error."""
    target, engine, pid = served
    monkeypatch.setattr(target.executor.shared, "_group", LossyGroup(target.executor.shared._group))
    news = SimpleQueue()
    engine.submit(make_request(np.arange(5, dtype=np.int32), max_tokens=5), news.put)
    error = last_of(news).error
    assert "all 2 ranks of the tensor-parallel group wait for each other" in error
    # Rank 1 is one sum further.
    entered = [int(count) for count in re.findall(r"\d+(?=[,\]])", error)]
    assert entered[1] == entered[0] + 1
    engine._thread.join(PATIENCE)
    assert over(pid) and not engine.alive


class StuckGroup:
    """A group whose end waits for what it sends to a rank that is gone."""

    def __init__(self, gone):
        self.gone = gone

    def __del__(self):
        assert self.gone.wait(PATIENCE)


def test_a_group_whose_end_waits_blocks_nothing(monkeypatch):
    monkeypatch.setattr(group, "END_SECONDS", 0.01)
    gone = threading.Event()
    ranks = group.Group.__new__(group.Group)
    ranks._on_cpu, ranks._group, others = True, StuckGroup(gone), {*threading.enumerate()}
    ranks.close()
    ranks.close()
    ends = [one for one in threading.enumerate() if one.name == "forerun-gloo-end"]
    ends = [one for one in ends if one not in others]
    assert ends and not gone.is_set()
    gone.set()
    for end in ends:
        end.join(PATIENCE)
        assert not end.is_alive()


class Work:
    """A collective whose first wait is over just before it is done."""

    def __init__(self, fault=None):
        self.fault, self.done = fault, False

    def wait(self, timeout=None):
        if timeout is not None and not self.done:
            self.done = True
            raise RuntimeError("Operation timed out!")
        if self.fault:
            raise RuntimeError(self.fault)

    def is_completed(self):
        return self.done


def test_what_is_done_behind_the_last_look_is_done():
    """On a loaded machine a rank was given up for it, and with it the engine."""
    assert group._done(Work())
    with pytest.raises(RuntimeError, match="closed by peer"):
        group._done(Work("Connection closed by peer"))


def test_ranks_of_which_one_is_at_work_are_not_silent(tmp_path):
    """However long that takes: looks are only counted while all of them wait."""
    with (tmp_path / "shared").open("wb+") as file:
        file.write(bytes(Waits.size_of(TensorParallel(0, 3))))
        file.flush()
        ranks = [Waits(file.fileno(), TensorParallel(rank, 3)) for rank in range(3)]

    def looks(count, looking=range(3)):
        counts = []
        for _ in range(count):
            counts.append(ranks[0].silent())
            for rank in looking:
                ranks[rank].look()
        return counts

    ranks[0].enter()
    ranks[1].enter()
    assert looks(100) == [0] * 100
    ranks[2].enter()
    assert looks(3) == [0, 1, 2]
    ranks[1].leave()
    assert looks(2) == [0, 0]
    ranks[1].enter()
    assert looks(2) == [0, 1]
    # One has what it waited for, and is at the next already.
    ranks[2].leave()
    ranks[2].enter()
    assert looks(2) == [0, 1]
    # One gets no processor, and may have what it waits for.
    assert looks(100, looking=(0, 1))[1:] == [2] * 99
    assert looks(3) == [2, 3, 4]


def test_a_step_that_hangs_keeps_no_news(served, monkeypatch):
    """On GPUs a step may hang where a rank is gone: listeners get an error without the engine."""
    target, engine, pid = served
    inside, go_on, news = threading.Event(), threading.Event(), SimpleQueue()

    def hangs(*_):
        inside.set()
        go_on.wait()
        raise RuntimeError

    engine.on_rank_lost(news.put)
    monkeypatch.setattr(target.executor, "run", hangs)
    engine.submit(make_request(np.arange(5, dtype=np.int32), max_tokens=5), SimpleQueue().put)
    inside.wait()
    os.kill(pid, signal.SIGKILL)
    assert "rank 1 of the tensor-parallel group was ended by SIGKILL" in news.get(timeout=PATIENCE)
    go_on.set()
    engine._thread.join(PATIENCE)


def test_a_rank_that_goes_on_is_not_lost(served, monkeypatch):
    """Stopped and let go on: a stream hears no more of it than that it waited."""
    _, engine, pid = served
    monkeypatch.setattr(child, "STOPPED_SECONDS", 10 * PATIENCE)
    news = streaming(engine)
    os.kill(pid, signal.SIGSTOP)
    assert wait_for(lambda: status(pid)[0] == "T")
    os.kill(pid, signal.SIGCONT)
    assert last_of(news).finish.value == "length"
    assert engine.alive


def test_what_is_closed_leaves_nothing(folder):
    target = open_target(config(folder))
    pid, port = target.executor.describe()["ranks"][0]["pid"], target.executor.port
    with socket.create_connection(("127.0.0.1", port)):
        pass
    target.close()
    target.close()
    assert over(pid)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


ALONE = """
import sys, time
from forerun.build.target import open_target
from forerun.options.config import EngineConfig
target = open_target(EngineConfig(model=sys.argv[1], executor="torch", device="cpu", tp_size=2,
                                  threads=1, policy="fixed", kv_tokens=1024, context=256))
print(*(rank["pid"] for rank in target.executor.describe()["ranks"]), flush=True)
time.sleep(1000)
"""


def test_no_rank_outlives_rank_0(folder):
    command = [sys.executable, "-c", ALONE, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        os.kill(pid, signal.SIGSTOP) if sys.platform == "linux" else None
        process.kill()
        assert over(pid)


# --- before the first step ---------------------------------------------------------------------


def start(folder, rank=1):
    tp = TensorParallel(rank, 2)
    return RankStart(tp, str(folder), limits(tiny.VOCAB), TorchOptions(), 1, 1)


def command(script):
    head = (
        "import sys, time\n"
        "from multiprocessing.connection import Connection\n"
        "from forerun.executors.torch.parallel.channel import Channel, RankMessage\n"
        "channel = Channel(Connection(int(sys.argv[1])))\n"
    )
    return sys.executable, "-c", head + script


SLEEPS = (sys.executable, "-c", "import time; time.sleep(1000)")


def test_a_rank_that_never_comes_up(folder):
    ranks = Ranks([start(folder)], SLEEPS)
    pid = ranks.pids[0]
    with pytest.raises(RankError, match=r"rank 1 did not come up within 0\.2 seconds"):
        ranks.answers("here", 0.2)
    ranks.close()
    assert over(pid)


def test_a_rank_that_is_killed_while_it_loads(folder):
    ranks = Ranks([start(folder)], SLEEPS)
    os.kill(ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 .* was ended by SIGKILL"):
        ranks.answers("here")
    ranks.close()


def test_what_a_rank_fails_with_is_raised_here(folder):
    script = """channel.receive()
channel.send(RankMessage("failed", {"error": "ModelError", "message": "no such file"}))
"""
    ranks = Ranks([start(folder)], command(script))
    with pytest.raises(ModelError, match=r"rank 1 .* failed: no such file"):
        ranks.answers("here")
    ranks.close()


@pytest.mark.parametrize(
    "what", ["weights", *(pytest.param(other, marks=SLOW) for other in ("torch", "flags"))]
)
def test_ranks_that_differ_are_refused(folder, monkeypatch, what):
    monkeypatch.setattr(processes, "END_SECONDS", 0.1)  # It sleeps, whatever it receives.
    script = f"""facts = dict(channel.receive().facts)
from forerun.executors.torch.parallel.start import RankStart
said = RankStart.of(facts).identity() | {{{what!r}: "another"}}
channel.send(RankMessage("here", said))
time.sleep(1000)
"""
    room = limits(tiny.VOCAB)
    with pytest.raises(ConfigError, match=f"rank 1 is not like rank 0: it has {what} another"):
        ParallelExecutor(
            *(FolderCheckpoint(folder), room, TorchOptions(), TensorParallel(0, 2)),
            1,
            command(script),
        )


def test_a_program_that_is_not_there(folder):
    with pytest.raises(EngineError, match="rank 1 cannot be started"):
        Ranks([start(folder)], ("/no/such/program",))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tp_size": 3}, "tp-size is 3, but its 4 attention heads .* by 1 or 2 or 4.$"),
        ({"executor": "cpu"}, "the cpu executor runs on one device; use --executor jax or"),
    ],
)
def test_what_cannot_be_shared_is_said_before_anything_starts(folder, changes, says, monkeypatch):
    monkeypatch.setattr(processes, "RankProcess", None)
    with pytest.raises(ConfigError, match=says):
        open_target(config(folder, **changes))


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda", "tp-size is 4, but torch sees 2 CUDA devices here; lower it to 2 or less.$"),
        ("cuda:1", "2 CUDA devices here, of which 1 come before cuda:1; lower it to 1 or less.$"),
    ],
)
def test_more_ranks_than_devices(folder, monkeypatch, device, says):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(processes, "RankProcess", None)
    with pytest.raises(ConfigError, match=says):
        open_target(config(folder, device=device, tp_size=4, dtype="float32"))
