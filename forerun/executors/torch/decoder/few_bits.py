"""Matrix products whose weight stays quantised: integers with a scale, and possibly a zero point,
for each group of columns, or float8 with such scales (formats: checkpoints/grouped.py).

The arithmetic is that of the formats: differences of integers are exact in 16 bits, sums and scales
are float32. The kernel is triton_few_bits.py; the reference here is also used on the CPU.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.checkpoints.grouped import MIDDLE, Grouped, GroupedKind, whole_block
from forerun.executors.torch.decoder.float8 import FLOAT8, float8_rows
from forerun.machine import cores
from forerun.types import AnyArray

READ, PIECE = 1 << 23, 1 << 24
"""READ: elements of a matrix that a thread reads at once. PIECE: elements that the reference
dequantises at once.
"""

FEW, COLUMNS = 256, 64
"""FEW: rows up to which the kernel runs. COLUMNS: outputs of one of its tiles.

FEW by bytes: the kernel reads 4-bit weights once for every 32 rows, half a byte each, while
dequantised ones are written and read as 2. Above 64 rows, where the kernel has .7 of bfloat16's
speed, not measured: docs/inside/gpu-runbook.md.
"""

TILE = 32
"""Rows that the reference always multiplies at once, so that a row's bits are independent of the
others.
"""

_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True, slots=True, eq=False)
class FewBits:
    """A quantised weight w [N,K]. Columns are divided into blocks, each within one group.

    kind, block  as of checkpoints.grouped.Grouped
    shape    (N, K)
    group    columns that share a scale
    numbers  [blocks,N,bytes of a block] in the order of `order`: int8; uint8 for float8 and for 4
             bits, where byte i has element i in its low bits and element i + block/2 in its high
             ones
    scales   [groups,N]
    zeros    float32[groups,N]; None if there are none. float32 because 4 bytes is the least that a
             device prefetches
    order    int32[K] the column of every element; None: in order
    through  int32[tiles] how many programs of a tile have finished: 0 between products
    """

    kind: GroupedKind
    shape: tuple[int, int]
    block: int
    group: int
    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    through: Tensor

    def integers(self, first: int, last: int) -> Tensor:
        """Return float32[n,K], the stored values of rows `first` to before `last`, before zero
        points and scales, in the columns' own order.
        """
        found = self.numbers[:, first:last].transpose(0, 1)
        if self.kind == "int4":
            found = torch.cat([found & 15, found >> 4], -1)
        if self.kind == "float8":
            found = found.contiguous().view(FLOAT8)
        return found.float().flatten(1)[:, : self.shape[1]]

    def widened(self, first: int, last: int) -> Tensor:
        """Return float32[last-first,K], the dequantised rows from `first` to before `last`."""
        numbers, columns = self.integers(first, last), self.shape[1]

        def spread(each: Tensor) -> Tensor:
            return each[:, first:last].t().float().repeat_interleave(self.group, 1)[:, :columns]

        if self.zeros is not None:
            numbers = numbers - spread(self.zeros)
        elif self.kind == "int4":
            numbers = numbers - MIDDLE
        numbers = numbers * spread(self.scales)
        if self.order is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(1, self.order.long(), numbers)


FewBitsProduct = Callable[[Tensor, FewBits, Tensor | None], Tensor]
"""(x [M,K], weight, bias [N] or None) -> [M,N] in the dtype of `x`: x W^T + b."""

GATED = ("silu", "gelu_tanh", "clamped_silu")
"""Activations that a FewBitsGate supports."""

FewBitsGate = Callable[[Tensor, FewBits, Tensor | None, str], Tensor]
"""(x [M,K], stacked weight of gate and up, bias, one of GATED) -> [M,N/2]: activation(gate) *
up.
"""


@dataclass(frozen=True, slots=True)
class FewBitsProducts:
    """The functions that multiply by quantised weights. gated: gate, up and activation in one;
    None: a product followed by the activation.
    """

    product: FewBitsProduct
    gated: FewBitsGate | None = None


def few_bits_product(x: Tensor, weight: FewBits, bias: Tensor | None) -> Tensor:
    """Compute FewBitsProduct with PyTorch operations, as the reference. Dequantises a few rows of
    the weight at a time, for TILE rows of `x` at a time.
    """
    outputs, inputs = weight.shape
    step = max(1, PIECE // inputs)
    rows = F.pad(x.float(), (0, 0, 0, -len(x) % TILE))
    found = rows.new_empty(len(rows), outputs)
    for first in range(0, outputs, step):
        last = min(first + step, outputs)
        wide = weight.widened(first, last)
        for place in range(0, len(rows), TILE):
            found[place : place + TILE, first:last] = rows[place : place + TILE] @ wide.t()
    found = found[: len(x)]
    return (found if bias is None else found + bias.float()).to(x.dtype)


IN_TORCH = FewBitsProducts(few_bits_product)
"""In plain torch, on any device."""


def _tensor(array: AnyArray) -> Tensor:
    """Return a copy as a tensor, since views of files are read-only."""
    return torch.from_numpy(np.array(array, order="C"))


def alike(matrices: Sequence[Grouped]) -> bool:
    """Return whether these matrices can be stacked as one quantised weight."""
    first = matrices[0]
    facts = {(m.kind, m.shape[1], m.group, m.block, m.zeros, m.scale) for m in matrices}
    orders = {None if m.order is None else m.order.tobytes() for m in matrices}
    return len(facts) == len(orders) == 1 and first.block > 0


def loaded(matrices: Sequence[Grouped], device: torch.device) -> FewBits:
    """Load matrices that are `alike`, stacked, to a device; pieces are read in parallel. Raises the
    exceptions of reading them.
    """
    first = matrices[0]
    inputs, block, half = first.shape[1], first.block, first.kind == "int4"
    outputs, blocks = sum(m.shape[0] for m in matrices), -(-first.shape[1] // first.block)
    kind = torch.int8 if first.kind == "int8" else torch.uint8
    shape = blocks, outputs, block // 2 if half else block
    numbers = torch.empty(shape, dtype=kind, device=device)
    scales = torch.empty(first.groups, outputs, dtype=_SCALES[first.scale], device=device)
    zeros = torch.empty(first.groups, outputs, device=device) if first.zeros else None

    def put(matrix: Grouped, begin: int, end: int, at: int) -> None:
        """Copy rows from `begin` to `end` of a matrix to row `at` of the weight and on."""
        found = matrix.read(slice(begin, end))
        rows = F.pad(_tensor(found.numbers), (0, blocks * block - inputs))
        rows = rows.view(-1, blocks, block)
        if half:
            rows = rows[..., : block // 2] | rows[..., block // 2 :] << 4
        there = slice(at, at + end - begin)
        numbers[:, there] = rows.transpose(0, 1).to(device)
        scales[:, there] = _tensor(found.scales).t().to(device)
        if zeros is not None and found.zeros is not None:
            zeros[:, there] = _tensor(found.zeros).t().to(device)

    above, step = 0, max(1, READ // inputs)
    with ThreadPoolExecutor(cores(), "forerun-load") as pool:
        for matrix in matrices:
            count = matrix.shape[0]
            parts = [(n, min(n + step, count), above + n) for n in range(0, count, step)]
            put(matrix, *parts[0])  # The progress of the read is counted on this thread.
            list(pool.map(lambda part, matrix=matrix: put(matrix, *part), parts[1:]))
            above += count
    order = None if first.order is None else torch.from_numpy(first.order).to(device)
    return FewBits(
        first.kind,
        (outputs, inputs),
        block,
        first.group,
        numbers,
        scales,
        zeros,
        order,
        _through(outputs, device),
    )


def rounded(weight: Tensor) -> FewBits:
    """Return a floating-point weight [N,K] rounded to float8, with a scale for each row."""
    outputs, inputs = weight.shape
    block, found = whole_block(inputs), float8_rows(weight)
    numbers = F.pad(found.numbers.view(torch.uint8), (0, -inputs % block))
    numbers = numbers.view(outputs, -1, block).transpose(0, 1).contiguous()
    scales, through = found.scale.t().contiguous(), _through(outputs, weight.device)
    shape = outputs, inputs
    return FewBits("float8", shape, block, inputs, numbers, scales, None, None, through)


def _through(outputs: int, device: torch.device) -> Tensor:
    """Return `FewBits.through` for a weight with `outputs` rows."""
    return torch.zeros(-(-FEW // 16) * -(-outputs // COLUMNS), dtype=torch.int32, device=device)
