"""CUDA's rules of capturing, held by a recorder without a device (tape.py)."""

import gc

import pytest
import torch

from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.captured.graphs import CapturedPrograms
from forerun.executors.torch.triton import kernels
from tests.models import tiny
from tests.parity.driver import Driver, Row, limits
from tests.parity.tape import FakeCuda, Tape, on_tape
from tests.parity.test_torch_captured import SAMPLINGS


class Work:
    """A matrix product; or a tensor that outlives the program, as the levels a draft head grew."""

    def __init__(self, keeps=False):
        self.x, self.out = torch.ones(3, 3), torch.zeros(3, 3)
        self.keeps, self.kept = keeps, {}

    def __call__(self, size):
        result = self.x + size
        if self.keeps:
            self.kept[size] = result
        self.out.copy_(self.x @ self.x if not self.keeps else result)


def captured(programs, *sizes):
    for size in sizes:
        for _ in range(2):
            programs[size]()


@pytest.mark.parametrize("keeps", [True, False])
def test_what_outlives_its_graphs_overlaps_nothing(keeps):
    """A tensor of the program, or a workspace that a product in a capture took."""
    work = Work(keeps)
    programs = CapturedPrograms(work, Tape())
    captured(programs, 1, 2)
    programs.forget()
    captured(programs, 1, 2)
    assert programs.captured == (1, 2)


def test_no_recorder_takes_anothers_workspace():
    cuda = FakeCuda()
    captured(CapturedPrograms(Work(), Tape(cuda=cuda)), 1)
    captured(CapturedPrograms(Work(), Tape(cuda=cuda)), 1)


def test_the_second_device_is_as_good_as_the_first():
    work, cuda = Work(), FakeCuda(home=1)
    assert cuda.current_device() == 0
    programs = CapturedPrograms(work, Tape(torch.device("cuda", 1), cuda))
    captured(programs, 1)
    work.x.fill_(2.0)
    programs[1]()
    assert work.out[0, 0] == 12.0
    assert cuda.current_device() == 0


def test_no_graph_is_destroyed_while_it_may_run():
    tape = Tape()
    programs = CapturedPrograms(Work(), tape)
    captured(programs, 1)

    def work():
        programs[1]()

    wait = tape.launch(work)
    programs.forget()
    gc.collect()
    captured(programs, 1)
    wait()


def test_no_graph_is_destroyed_during_a_capture():
    """As seen on an H100: an engine that was closed is collected while the next one captures."""
    cuda, before = FakeCuda(), gc.get_threshold()
    gc.set_threshold(1_000_000)  # Nothing is collected before the capture.
    try:
        gone = CapturedPrograms(lambda size: torch.ones(2).add_(size), Tape(cuda=cuda))
        captured(gone, 1)
        gone.itself = gone

        def work(size):
            gc.set_threshold(1)
            boxes = [[] for _ in range(3000)]
            torch.ones(2).add_(len(boxes))

        tape = Tape(cuda=cuda)
        del gone
        tape.capture(lambda: work(1))
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)


def test_streams_of_a_recorder_are_its_own():
    """Warm-ups and captures of one recorder run on one stream, which is no other recorder's."""
    cuda, streams = FakeCuda(), []
    for _ in range(2):
        mine = []
        captured(
            CapturedPrograms(
                lambda size, to=mine: to.append(cuda.current_stream()), Tape(cuda=cuda)
            ),
            1,
        )
        assert mine[0] is mine[1]
        streams.append(mine[0])
    assert streams[0] is not streams[1]


def test_a_head_that_comes_after_the_first_capture(checkpoint, monkeypatch):
    """Loading a head asks for features: what start-up captured is forgotten, then captured anew."""
    on_tape(monkeypatch, Tape())
    small = limits(tiny.VOCAB, context=128, pages=40, slots=1)
    made = TorchExecutor(checkpoint("qwen3"), small).capture()

    def decode():
        with Driver(made) as driver:
            driver.open(0, [5, 6], SAMPLINGS[0])
            for _ in range(4):
                driver.step([Row(0)])
            return driver.sequences[0].tokens

    tokens = decode()
    made.request_aux_hidden_states((1,))
    assert decode() == tokens
    assert made.describe()["captured"]


def test_kernels_are_launched_on_their_own_device(monkeypatch):
    cuda = FakeCuda(home=1)
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    launch = kernels.guarded(torch.device("cuda", 1), lambda more: cuda.current_device() + more)
    assert launch(5) == launch(more=5) == 6
    assert cuda.current_device() == 0


def test_programs_do_the_work_once_per_call():
    runs, log = [], []

    class Kept:
        def warm(self, work):
            log.append("warm")
            work()

        def capture(self, work):
            log.append("capture")
            return work

    programs = CapturedPrograms(runs.append, Kept())
    for size in (1, 2, 1, 1, 2, 1):
        programs[size]()
    assert runs == [1, 2, 1, 1, 2, 1]
    assert log == ["warm", "warm", "capture", "capture"]
    assert programs.captured == (1, 2)
