"""What a captured round reads and writes: tensors whose places never change, one set per size."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.executors.torch.geometry import tile_nodes, tiles_of
from forerun.spec.accept import NOTHING
from forerun.spec.draft import full_size
from forerun.types import AnyArray


class Size(NamedTuple):
    """R rows of N nodes, both powers of two, after which full trees of guesses are grown,
    `levels` deep; no levels: none are.
    """

    rows: int
    nodes: int
    levels: int = 0
    width: int = 0

    @property
    def total(self) -> int:
        """Nodes of all rows."""
        return self.rows * self.nodes

    @property
    def guesses(self) -> int:
        """Nodes of a tree that is grown."""
        return full_size(self.width, self.levels)


class Facts:
    """What one size's program reads, in one tensor that the host overwrites with one copy.

    All int32, each part contiguous. Of rows, [R]: kv_len, count (nodes), low and high halves of
    the seed, output position of the root, temperature's bits, decided, and home, where the
    drafting keeps a row's state; -1 = it does not follow the row. Of nodes, [R*N]: tokens,
    parents and depth within the row; turns [2,R*N]. Of pages: table [R,W].
    """

    def __init__(self, size: Size, width: int, device: torch.device) -> None:
        rows, total = size.rows, size.total
        of_rows = ("kv_len", "count", "low", "high", "position", "heat", "decided", "home")
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(of_rows, (rows,)),
            **dict.fromkeys(("tokens", "parents", "depth"), (total,)),
            "turns": (2, total),
            "table": (rows, width),
        }
        count = sum(int(np.prod(shape)) for shape in shapes.values())
        pinned = device.type == "cuda"
        self._host = torch.zeros(count, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(count, dtype=torch.int32, device=device)
        self._nodes = size.nodes
        self.host: dict[str, AnyArray] = {}
        self.there: dict[str, Tensor] = {}
        begin = 0
        for name, shape in shapes.items():
            end = begin + int(np.prod(shape))
            self.host[name] = self._host[begin:end].view(shape).numpy()
            self.there[name] = self._device[begin:end].view(shape)
            begin = end

    def blank(self) -> None:
        """Rows without a node; what stands in their places sees itself alone."""
        host = self.host
        for name in ("kv_len", "count", "heat", "decided", "tokens", "depth", "table"):
            host[name][...] = 0
        host["parents"][:] = NOTHING
        host["home"][:] = -1
        host["turns"][0] = np.tile(np.arange(self._nodes), len(host["count"])) + 2 * self._nodes
        host["turns"][1] = host["turns"][0] + 1

    def send(self) -> None:
        """Copy to the device; the host may not write again before the round's result is here."""
        self._device.copy_(self._host, non_blocking=True)


class Sized:
    """The fixed tensors of one size.

    record  int32[R*N + 3*R*K] what comes back, in one copy: the choices of nodes, then tokens,
            parents and values' bits of the trees
    """

    def __init__(self, size: Size, width: int, share: int, device: torch.device) -> None:
        self.facts = Facts(size, width, device)
        start = np.arange(size.rows + 1, dtype=np.int32) * size.nodes
        self.tile = tile_nodes(size.nodes, share)
        self.start = torch.from_numpy(start).to(device)
        self.tiles = torch.from_numpy(tiles_of(start, self.tile)).to(device)
        self.row = torch.arange(size.total, device=device) // size.nodes
        count = size.total + 3 * size.rows * size.guesses
        self.record = torch.zeros(count, dtype=torch.int32, device=device)
        self.result = torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")
