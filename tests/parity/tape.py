"""A capture without a GPU: records a program's torch operations and replays those.

As in a CUDA graph, a replay runs what was recorded on the tensors that were recorded: whatever
the host computed in between is frozen. What would make the host wait for the device, or depend
on what is on it, is an error.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAITS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default),
    *(aten.equal.default, aten.is_nonzero.default, aten._unique2.default, aten.unique_dim.default),
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


def storage(value):
    try:
        return value.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # Weights in oneDNN's own layout.
        return None


def tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class Watch(TorchDispatchMode):
    """Refuses what waits; appends everything else to `tape`, if there is one.

    before: what tensors held that were written in place, by where they lie
    """

    def __init__(self, tape=None):
        super().__init__()
        self.tape, self.before = tape, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func in INDEXING and any(t.dtype == torch.bool for t in tensors(args[1]))
        assert func not in WAITS and not by_mask, f"{func} waits for the device"
        if self.tape is not None:
            for tensor in written(func, args, kwargs or {}):
                kept = tensor.untyped_storage()
                self.before.setdefault(kept.data_ptr(), (kept, kept.clone()))
        out = func(*args, **(kwargs or {}))
        if self.tape is not None:
            self.tape.append((func, args, kwargs or {}, out))
        return out


def written(func, args, kwargs):
    """The tensors that an operation writes in place."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(args[place] if place < len(args) else kwargs.get(argument.name))


class Tape:
    """graphs.Recorder on the CPU. replays: how many programs ran from the tape.

    A slow device: what is launched is done when somebody waits for it, or for something later,
    and not a moment sooner. launched, done: how many pieces of work.
    """

    def __init__(self):
        self.captures = self.replays = self.launched = self.done = 0
        self._queue = []

    def launch(self, work):
        self.launched += 1
        self._queue.append(work)
        number = self.launched

        def wait():
            while self.done < number:
                self.done += 1
                self._queue.pop(0)()

        return wait

    def warm(self, work):
        with Watch():
            work()

    def capture(self, work):
        self.captures += 1
        tape = []
        with Watch(tape) as watch:
            work()
        for kept, before in watch.before.values():
            kept.copy_(before)  # A capture records, and does nothing.

        def replay():
            self.replays += 1
            for func, args, kwargs, out in tape:
                given = {storage(t) for t in tensors((args, kwargs))}
                again = func(*args, **kwargs)
                for old, new in zip(tensors(out), tensors(again), strict=True):
                    if storage(old) not in given:  # Neither a view nor written in place.
                        old.copy_(new)

        return replay
