"""LoRA adapters in torch: low-rank products in addition to a decoder's own, for the rows that use
them. A step runs an adapter's products on all its rows, at the row counts that preserve bits
(layers.py), and adds the result only in rows with that adapter: so the bits of a row are
independent of others.
"""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.checkpoints.adapter import LoraAdapter, LowRank
from forerun.executors.torch.decoder.layers import FeedForward, Linear, Product
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints


class RowAdapters:
    """The adapters of the current step.

    active  (number of an adapter, bool[M,1] whether a row uses it)
    """

    def __init__(self) -> None:
        self.active: list[tuple[int, Tensor]] = []
        self._step: list[tuple[int, Tensor]] = []

    def begin(
        self, adapters: Ints | None, trees: TreeBatch, rows: int, device: torch.device
    ) -> None:
        """Begin a step of `rows` rows, including padding, whose trees have adapters int32[B]; None:
        none has any.
        """
        self.active = self._step = []
        if adapters is None:
            return
        nodes = np.full(rows, -1, np.int32)
        nodes[: len(trees.tokens)] = np.repeat(adapters, np.diff(trees.start))
        for number in np.unique(adapters[adapters >= 0]).tolist():
            mask = torch.from_numpy(nodes == number).to(device)
            self._step.append((number, mask[:, None]))
        self.select_all()

    def select(self, rows: Tensor, count: int) -> None:
        """Restrict products to `count` rows: these rows of the step, int64[n], and padding."""
        self.active = [
            (number, F.pad(mask[rows], (0, 0, 0, count - len(rows)))) for number, mask in self._step
        ]

    def select_all(self) -> None:
        """Undo `select`: products read all rows of the step."""
        self.active = self._step


class AdaptedProduct:
    """A matrix product with the contributions of adapters to some of its columns.

    linears  the products of adapters
    """

    def __init__(
        self, base: Product, rows: RowAdapters, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape, self.linears = base.shape, list[Linear]()
        self._base, self._rows, self._device, self._dtype = base, rows, device, dtype
        self._parts: dict[int, list[tuple[slice, Linear, Linear]]] = {}

    def add(self, number: int, columns: slice, one: LowRank) -> None:
        """Add adapter `number`'s contribution to these columns."""
        down, up = (
            Linear(torch.from_numpy(np.array(each)).to(self._device, self._dtype))
            for each in (one.down, one.up)
        )
        self._parts.setdefault(number, []).append((columns, down, up))
        self.linears += [down, up]

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M,N] for x [M,K]."""
        y = self._base(x)
        for number, mask in self._rows.active:
            for columns, down, up in self._parts.get(number, ()):
                part = y[:, columns]
                y[:, columns] = torch.where(mask, part + up(down(x)), part)
        return y


class Adapting:
    """Wraps products of a decoder whose matrices some adapter changes.

    rows     the adapters of the current step's rows
    linears  the products of adapters created so far
    """

    def __init__(
        self,
        adapters: tuple[LoraAdapter, ...],
        rows: RowAdapters,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._adapters, self.rows, self._how = adapters, rows, (device, dtype)
        self.linears: list[Linear] = []

    def __call__(self, product: Product, parts: list[tuple[str, int]]) -> Product:
        """Return the product of these matrices, (canonical name, rows), stacked by rows, with the
        contributions of adapters.
        """
        found, begin = AdaptedProduct(product, self.rows, *self._how), 0
        for name, width in parts:
            for number, adapter in enumerate(self._adapters):
                if (one := adapter.matrices.get(name)) is not None:
                    found.add(number, slice(begin, begin + width), one)
            begin += width
        self.linears += found.linears
        return found if found.linears else product

    def feed_forward(self, fed: FeedForward, prefix: str) -> FeedForward:
        """Return a feed-forward whose tensor names begin with `prefix`, with the contributions of
        adapters.
        """
        gate_up, down = fed.linears
        width, hidden = down.shape[1], down.shape[0]
        both = [(f"{prefix}.{part}_proj", width) for part in ("gate", "up")]
        products = self(gate_up, both), self(down, [(f"{prefix}.down_proj", hidden)])
        return fed if products == fed.linears else FeedForward(*products, fed.gate)

    def adapts(self, prefix: str) -> bool:
        """Return whether an adapter changes a matrix whose name begins with `prefix`."""
        return any(
            name.startswith(prefix) for adapter in self._adapters for name in adapter.matrices
        )
