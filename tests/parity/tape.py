"""A capture without a GPU: torch operations are recorded and replayed under CUDA's own rules.

As in a CUDA graph, a replay runs what was recorded on the tensors that were recorded: whatever
the host computed in between is frozen. What would make the host wait for the device, or depend
on what is on it, is an error.

`FakeCuda` stands for torch.cuda under graphs.CudaRecorder and holds it to what breaks on a GPU:

    pools       capturing into a pool whose graphs are all gone while tensors in it live is
                torch's assertion `it->second->use_count > 0` (CUDACachingAllocator.cpp)
    streams     what is launched on another stream than the capturing one is no part of the graph
    workspaces  a stream's first product allocates one that stays: within a capture it lies in that
                capture's pool, and dies with it for later captures on that stream
    devices     kernels are launched on the current device, wherever their tensors are
    graphs      none is destroyed while it may still run, or during somebody's capture
"""

import re
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from typing import NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.executors.torch import TorchExecutor, executor, model_runner
from forerun.executors.torch.captured.graphs import CudaRecorder
from tests.parity.heads import opened
from tests.references.kernels import REFERENCE_KERNELS

aten = torch.ops.aten
WAITS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default),
    *(aten.equal.default, aten.is_nonzero.default, aten._unique2.default, aten.unique_dim.default),
    aten.bincount.default,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
PRODUCTS = re.compile(r"(aten|mkldnn)::(mm|bmm|addmm|baddbmm|linear|_linear_pointwise|_scaled_mm)$")
"""Operations for which cuBLAS takes a workspace."""


def storage(value):
    try:
        return value.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # Weights in oneDNN's own layout.
        return None


def tensors(values):
    """Of what an operation takes or gives: tensors, and lists, tuples and dictionaries of them."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    result = []
    for value in values:
        if isinstance(value, torch.Tensor):
            result.append(value)
        elif isinstance(value, (list, tuple, dict)):
            result += tensors(value)
    return result


class Rules(NamedTuple):
    """What holds for an operation whenever it is launched.

    waits    for the device; indexes: does so where it is given a mask
    product  one for which cuBLAS takes a workspace
    writes   places and names of the arguments that it writes in place
    """

    waits: bool
    indexes: bool
    product: bool
    writes: tuple[tuple[int, str], ...]

    def written(self, args, kwargs):
        """The tensors that the operation writes in place."""
        result = []
        for place, name in self.writes:
            result += tensors(args[place] if place < len(args) else kwargs.get(name))
        return result


@cache
def rules(func):
    """Of an operation, read at each of some hundred thousand launches."""
    writes = tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    product = PRODUCTS.match(func._schema.name) is not None
    return Rules(func in WAITS, func in INDEXING, product, writes)


class Watch(TorchDispatchMode):
    """Refuses what waits; tells `cuda` of every launch; appends all that computes or writes to
    `tape`, if there is one, with the tensors that it made and their places among the results.

    before: what tensors held that were written in place, by where they lie
    """

    def __init__(self, tape=None, cuda=None):
        super().__init__()
        self.tape, self.cuda, self.before = tape, cuda, {}

    def launched(self, func, types, args=(), kwargs=None):
        kwargs, known = kwargs or {}, rules(func)
        by_mask = known.indexes and any(t.dtype == torch.bool for t in tensors(args[1]))
        assert not (known.waits or by_mask), f"{func} waits for the device"
        if self.tape is None:
            if self.cuda is not None:
                self.cuda.launches(known.product)
            return func(*args, **kwargs)
        for tensor in known.written(args, kwargs):
            kept = tensor.untyped_storage()
            if kept.data_ptr() not in self.before:
                self.before[kept.data_ptr()] = kept, kept.clone()
        if self.cuda is not None:
            self.cuda.launches(known.product)
        out = func(*args, **kwargs)
        outs, given = tensors(out), {storage(tensor) for tensor in tensors((args, kwargs))}
        # Neither a view nor written in place.
        made = [(place, t) for place, t in enumerate(outs) if storage(t) not in given]
        # A view that was taken stays one: there is nothing to replay.
        if made or not outs or known.written(args, kwargs):
            alone = made[0][1] if made and isinstance(out, torch.Tensor) else None
            self.tape.append((func, args, kwargs, alone, made))
        if self.cuda is not None:
            self.cuda.allocates(tensor for _, tensor in made)
        return out


# Not in the class, where torch puts a guard against its compiler around it that costs as much.
Watch.__torch_dispatch__ = Watch.launched


@dataclass(eq=False)
class Pool:
    """A graph memory pool.

    captured  whether it ever was captured into
    graphs    that were captured into it and live: torch's use count
    tensors   storages that were allocated in it
    lost      a library's workspace lies in it: that memory is never given back
    """

    captured: bool = False
    graphs: int = 0
    tensors: list = field(default_factory=list)
    lost: bool = False

    def begin(self):
        if self.captured and not self.graphs:
            alive = self.lost or any(not reference.expired() for reference in self.tensors)
            assert not alive, "use_count > 0: the pool's graphs are gone, tensors in it are not"
            self.tensors.clear()
        self.captured = True
        self.graphs += 1

    def end(self):
        self.graphs -= 1


@dataclass(eq=False)
class Stream:
    """device: index. workspace: what its library took; None before its first product."""

    device: int
    workspace: str | Pool | None = None

    def wait_stream(self, other):
        assert self.device == other.device, "a stream of another device"


class Graph:
    """torch.cuda.CUDAGraph: a tape, replayed."""

    def __init__(self, cuda):
        self._cuda, self.tape = cuda, None

    def replay(self):
        self._cuda.replays += 1
        for func, args, kwargs, alone, made in self.tape:
            again = func(*args, **kwargs)
            if alone is not None:
                alone.copy_(again)
            elif made:
                outs = tensors(again)
                for place, old in made:
                    old.copy_(outs[place])


class FakeCuda:
    """What CudaRecorder uses of torch.cuda. home: the device that all tensors are on.

    unfinished  called when a graph dies: how many launched pieces of work are not done
    settle      called at every synchronisation: does them
    faults      what broke where nothing can be raised; the next launch raises it
    captures, replays  how many there were
    """

    def __init__(self, home=0):
        self.home, self._now = home, 0
        self._streams, self._shared = {}, None
        self._capturing = None
        self._numbers = count()
        self.captures = self.replays = 0
        self.unfinished = lambda: 0
        self.settle = lambda: None
        self.CUDAGraph = partial(Graph, self)
        self.faults = []

    # --- torch.cuda ------------------------------------------------------------------------

    def current_device(self):
        return self._now

    @contextmanager
    def device(self, device):
        before, self._now = self._now, torch.device(device).index
        try:
            yield
        finally:
            self._now = before

    def Stream(self, device=None):
        return Stream(self._now if device is None else torch.device(device).index)

    def current_stream(self, device=None):
        index = self._now if device is None else torch.device(device).index
        if index not in self._streams:
            self._streams[index] = Stream(index)
        return self._streams[index]

    @contextmanager
    def stream(self, stream):
        before = self.current_stream(torch.device("cuda", stream.device))
        with self.device(torch.device("cuda", stream.device)):
            self._streams[stream.device] = stream
            try:
                yield
            finally:
                self._streams[stream.device] = before

    def graph_pool_handle(self):
        return Pool()

    def synchronize(self, device=None):
        self.settle()

    @contextmanager
    def graph(self, graph, pool, stream=None, capture_error_mode="global"):
        if stream is None:
            self._shared = stream = self._shared or self.Stream()
        with self.stream(stream):
            pool.begin()
            weakref.finalize(graph, self._destroyed, pool)
            self.captures += 1
            self._capturing, graph.tape = (stream, pool), []
            try:
                with Watch(graph.tape, self) as watch:
                    yield
            finally:
                self._capturing = None
                for kept, before in watch.before.values():
                    kept.copy_(before)  # A capture records, and does nothing.

    # --- the rules -------------------------------------------------------------------------

    def _destroyed(self, pool):
        pool.end()
        if self._capturing is not None:
            self.faults.append("a graph was destroyed during a capture")
        if self.unfinished():
            self.faults.append("a graph was destroyed while it ran")

    def launches(self, product):
        """An operation is launched, or a product: on the stream that is current on the current
        device.
        """
        assert not self.faults, self.faults
        assert self._now == self.home, "a kernel is launched on another device than its tensors'"
        stream = self.current_stream()
        if self._capturing is not None:
            assert stream is self._capturing[0], "launched on a stream that is not captured"
        if not product:
            return
        pool = self._capturing[1] if self._capturing is not None else None
        if stream.workspace is None:
            stream.workspace = pool or "heap"
            if pool is not None:
                pool.lost = True
        alien = isinstance(stream.workspace, Pool) and stream.workspace is not pool
        assert not alien, "the stream's workspace lies in a pool of other graphs"

    def allocates(self, made):
        """Tensors are allocated: while capturing, in its pool."""
        if self._capturing is not None:
            _, pool = self._capturing
            for tensor in made:
                if storage(tensor) is not None:
                    pool.tensors.append(StorageWeakRef(tensor.untyped_storage()))


class Tape(CudaRecorder):
    """CudaRecorder on the CPU, under the rules of a `FakeCuda`.

    A slow device: what is launched is done when somebody waits for it, or for something later,
    and not a moment sooner. launched, done: how many pieces of work.
    """

    def __init__(self, device=None, cuda=None):
        self.cuda = cuda or FakeCuda()
        self.launched = self.done = 0
        self._queue = []
        # A synchronisation waits for all; what dies before that may be running.
        self.cuda.settle = self._settle
        self.cuda.unfinished = lambda: self.launched - self.done
        super().__init__(device or torch.device("cuda", self.cuda.home))

    @property
    def captures(self):
        return self.cuda.captures

    @property
    def replays(self):
        """How many programs ran from the tape."""
        return self.cuda.replays

    def launch(self, work):
        self.launched += 1
        self._queue.append(work)
        number = self.launched

        def wait():
            while self.done < number:
                self._next()

        return wait

    def _next(self):
        work = self._queue.pop(0)
        with self.cuda.device(self._device):
            work()
        self.done += 1

    def _settle(self):
        while self.done < self.launched:
            self._next()

    def warm(self, work):
        def watched():
            with Watch(cuda=self.cuda):
                work()

        super().warm(watched)


def on_tape(patch, tape=None, kernels=REFERENCE_KERNELS, warm=True):
    """Torch executors that are made while `patch` holds (a MonkeyPatch) run rounds, as on a device:
    on this tape, or one each, with these kernels. warm: what is declared is captured at once.
    """
    patch.setattr(model_runner, "kernels_for", lambda device: kernels)
    patch.setattr(executor, "recorder", lambda device: tape or Tape())
    if not warm:
        patch.setattr(TorchExecutor, "warm_up", lambda *_: None)


def taped(folder, dense_head, tape=None, overlap=False, **changes):
    """A target and its head with rounds that a tape captures when they come up, none before.
    overlap: whether they can go on from each other; engines that do so say so.
    """
    with pytest.MonkeyPatch.context() as patch:
        on_tape(patch, tape, warm=False)
        target = opened(folder, dense_head, overlap=overlap, **changes)
        return replace(target, config=replace(target.config, overlap=False))
