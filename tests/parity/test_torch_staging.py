"""Weights through pinned memory and several streams give what plain copies give, on a device that
does nothing before it is waited for.
"""

from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.executors.torch.decoder import weights as module
from forerun.executors.torch.decoder.layers import Linear
from forerun.executors.torch.decoder.staging import CudaLane, Staging
from forerun.executors.torch.decoder.weights import Weights
from tests.models import tiny

CPU = torch.device("cpu")


class LateLane:
    """A Lane whose copies are done when somebody waits for them: a buffer that is filled too early,
    or weights that are used too early, are wrong for certain. device: the copies that it waits for.
    """

    def __init__(self, device):
        self.device, self.waiting, self.joined = device, [], True
        self.held = torch.empty(0, dtype=torch.uint8)

    def begin(self):
        self.joined = False

    def buffer(self, size):
        assert not self.joined, "sent without a begin"
        self.run()
        if len(self.held) < size:
            self.held = torch.empty(size, dtype=torch.uint8)
        self.held.fill_(255)  # What it held before is gone.
        return self.held[:size]

    def send(self, out, held):
        self.waiting.append(lambda: out.copy_(held))

    def end(self):
        self.joined = True
        self.device.append(self.run)

    def run(self):
        for copy in self.waiting:
            copy()
        self.waiting = []


@pytest.fixture(scope="module", params=["F32", "F16", "BF16", "Q8_0", "folder BF16"])
def stored(request, tmp_path_factory):
    folder, hf = tmp_path_factory.mktemp("staged"), tiny.model("llama")
    if request.param.startswith("folder"):
        return FolderCheckpoint(tiny.save_folder(hf, folder, dtype=torch.bfloat16))
    return GgufCheckpoint(tiny.write_gguf(hf, folder / "x.gguf", request.param))


def matrices(checkpoint, dtype, lanes):
    device = []
    made = [kind(device) for kind in lanes]
    weights = Weights(checkpoint, CPU, dtype, Linear)
    weights._staging = Staging(made) if made else None
    names = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]
    result = {name: weights.matrix(name) for name in names}
    for run in device:
        run()
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lanes", [1, 3])
def test_staged_weights_are_those_of_plain_copies(stored, dtype, lanes, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 1000)  # A few rows.
    expected = matrices(stored, dtype, [])
    actual = matrices(stored, dtype, [LateLane] * lanes)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_what_a_thread_raises_is_raised():
    class FailingLane(LateLane):
        def buffer(self, size):
            raise MemoryError("no pinned memory")

    with pytest.raises(MemoryError, match="pinned"):
        rows = np.zeros((2, 8), np.uint8)
        Staging([FailingLane([])]).copy([(torch.empty(2, 2), rows, torch.float32)])


class Calls:
    """torch.cuda's names of what a lane calls, noted in order; nothing is done."""

    def __init__(self):
        self.recorded = []

    def current_stream(self, device):
        return self._stream("current")

    def Stream(self):
        return self._stream("lane")

    def Event(self):
        calls = self

        class Event:
            def synchronize(self):
                calls.recorded.append("synchronize")

            def record(self, stream):
                calls.recorded.append(f"record on {stream.name}")

        return Event()

    def device(self, device):
        return nullcontext()

    @contextmanager
    def stream(self, stream):
        self.recorded.append(f"in {stream.name}")
        yield
        self.recorded.append("out")

    def _stream(self, name):
        calls = self

        class Stream:
            def __init__(self):
                self.name = name

            def wait_stream(self, other):
                calls.recorded.append(f"{self.name} waits for {other.name}")

        return Stream()


def test_what_a_lane_asks_of_cuda(monkeypatch):
    calls = Calls()
    monkeypatch.setattr(CudaLane, "cuda", calls)
    monkeypatch.setattr(CudaLane, "pinned", lambda self, size: torch.empty(size, dtype=torch.uint8))
    lane, out = CudaLane(CPU), torch.empty(2, 3)
    rows = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    Staging([lane]).copy([(out, rows.view(torch.uint8).numpy(), torch.bfloat16)])
    assert torch.equal(out, rows.float())
    assert calls.recorded == [
        "lane waits for current",
        "synchronize",
        "in lane",
        "record on lane",
        "out",
        "current waits for lane",
    ]
