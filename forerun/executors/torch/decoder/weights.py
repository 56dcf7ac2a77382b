"""A checkpoint's tensors in the form that a decoder needs: on its device, in its dtype, several
stacked as one.

A matrix is copied from the file to its destination in pieces, each in its stored dtype; only
quantised pieces are dequantised to float32 on the way. The host never has more than a few pieces in
memory in addition to the file's own pages, which are released once a matrix was read.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.checkpoints.checkpoint import Checkpoint, Repeated
from forerun.checkpoints.ggml import floats_of
from forerun.checkpoints.mapped import Packed, release
from forerun.checkpoints.quantised_matrices import quantised_matrix
from forerun.errors import ModelError
from forerun.executors.torch.decoder.few_bits import FewBitsProducts, alike, loaded, rounded
from forerun.executors.torch.decoder.few_bits_layers import FewBitsLinear, SideBySide
from forerun.executors.torch.decoder.float8 import FLOAT8, float8_rows
from forerun.executors.torch.decoder.grouped import Stacked
from forerun.executors.torch.decoder.layers import MakeProduct, Product
from forerun.executors.torch.decoder.staging import staging
from forerun.types import AnyArray, Ints

PIECE = 1 << 24
"""Bytes of a file that are read at once."""

_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def numbers_of(kind: str, rows: AnyArray) -> Tensor:
    """Return [n,K], a copy of rows uint8[n,bytes of a row]: in their stored dtype, or float32 if
    they are quantised.
    """
    if kind in _STORED:
        return torch.from_numpy(np.array(rows, order="C")).view(_STORED[kind])
    return torch.from_numpy(floats_of(kind, np.ascontiguousarray(rows)))


def pieces_of(packed: Packed) -> Iterator[tuple[slice, Tensor]]:
    """Yield a packed matrix piece by piece, from the first row on: its rows as a slice, and their
    values float32[n,K].
    """
    for rows in _pieces(packed):
        yield rows, numbers_of(packed.kind, packed.rows[rows])


def _pieces(packed: Packed) -> Iterator[slice]:
    step = max(1, PIECE // packed.rows.shape[1])
    return (slice(first, first + step) for first in range(0, len(packed.rows), step))


def some_rows(
    checkpoint: Checkpoint, name: str, which: Ints, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return [n,K], rows int32[n] of a matrix; reads nothing else of it."""
    packed = checkpoint.packed(name)
    if packed is None:
        return torch.from_numpy(checkpoint.tensor(name)[which]).to(device, dtype)
    return numbers_of(packed.kind, packed.rows[which]).to(device).to(dtype)


class Weights:
    """A checkpoint's tensors on `device` in `dtype`, read when used.

    products  creates the blocks' products
    finite    raise ModelError for values that are not finite
    few_bits  creates products whose weights stay quantised as in the file (quantised_matrices.py);
              None: all are dequantised
    narrow    few_bits creates only the blocks' products, of weights rounded to float8
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        products: MakeProduct,
        *,
        finite: bool = False,
        few_bits: FewBitsProducts | None = None,
        narrow: bool = False,
    ) -> None:
        assert few_bits is not None or not narrow
        self._products, self._finite, self._few_bits = products, finite, few_bits
        self._block: Tensor | None = None
        self._narrow = narrow
        self._checkpoint, self._names = checkpoint, set(checkpoint.names())
        self._norm_offset = checkpoint.architecture.norm_offset
        self.device, self.dtype = device, dtype
        self._staging = staging(device)

    def vector(self, name: str) -> Tensor | None:
        """Return the vector float32[N] of that name, whatever its stored dtype; None if the model
        has no such tensor.
        """
        return self._load(name).float() if name in self._names else None

    def required(self, name: str) -> Tensor:
        """Return the tensor of that name, of any shape [...], as float32, without the offset that
        norms have in some families. Raises as Checkpoint.tensor if it is missing.
        """
        return self._load(name).float()

    def norm(self, name: str) -> Tensor:
        """Return the factors of a norm, float32[W]: the vector `name` plus the model's offset."""
        stored = self._load(name).float()
        return stored + self._norm_offset if self._norm_offset else stored

    def matrix(self, name: str) -> Tensor:
        """Return [N,K] of that name, in the activations' dtype, on the device."""
        return self._stacked((name,))

    def stored_matrix(self, name: str) -> Tensor:
        """Return [N,K] of that name, on the device: in its stored dtype if that is floating point,
        else as `matrix`.
        """
        packed = self._checkpoint.packed(name)
        if packed is None or packed.kind not in _STORED:
            return self.matrix(name)
        whole = torch.empty(self._checkpoint.shape(name), dtype=_STORED[packed.kind])
        whole = whole.to(self.device)
        self._fill(whole, name)
        return whole

    def block_linear(self, *names: str) -> Product:
        """Return the named matrices, stacked by rows, as one product of the blocks."""
        if not self._narrow or self._few_bits is None:
            return self.linear(*names)
        weight = rounded(self._stacked(tuple(f"{name}.weight" for name in names)))
        return FewBitsLinear(weight, self._bias(names), self._few_bits)

    def linear(self, *names: str) -> Product:
        """Return one product [M,K] -> [M,N] as `block_linear`, but never rounded to float8, with
        biases.
        """
        kept = None if self._few_bits is None or self._narrow else self._kept(names)
        if kept is not None:
            return kept
        weight = self._stacked(tuple(f"{name}.weight" for name in names))
        return self._products(weight, self._bias(names))

    def feed_forward(self, prefix: str) -> tuple[Product, Product]:
        """Return the products of layers.FeedForward: gate and up, stacked by rows, and down; tensor
        names begin with `prefix`.
        """
        gate_up = self.block_linear(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        return gate_up, self.block_linear(f"{prefix}.down_proj")

    def wide_linear(self, *names: str) -> Product:
        """Return a product as `linear`, with weights in float32 for any dtype."""
        weight = self._stacked(tuple(f"{name}.weight" for name in names)).float()
        return self._products(weight, self._bias(names, torch.float32))

    def experts(self, prefix: str, which: range, *parts: str) -> Stacked:
        """Return one tensor with the stacked `parts` of experts prefix.N for each N in `which`; in
        float8 if the blocks' weights are.
        """
        rows = [self._checkpoint.shape(f"{prefix}.{which[0]}.{part}.weight") for part in parts]
        shape = len(which), sum(each[0] for each in rows), rows[0][1]
        narrow = self._narrow
        numbers = torch.empty(shape, dtype=FLOAT8 if narrow else self.dtype, device=self.device)
        scale = torch.empty(shape[:2], device=self.device) if narrow else None
        each = [[f"{prefix}.{expert}.{part}" for part in parts] for expert in which]
        for place, names in enumerate(each):
            if scale is None:
                for out, name in zip(
                    numbers[place].split([r[0] for r in rows]), names, strict=True
                ):
                    self._fill(out, f"{name}.weight")
                continue
            found = float8_rows(self._stacked(tuple(f"{name}.weight" for name in names)))
            numbers[place], scale[place] = found.numbers, found.scale[:, 0]
        bias = self._bias([name for names in each for name in names])
        return Stacked(numbers, scale, None if bias is None else bias.view(shape[:2]))

    def head(self, embedding: Tensor) -> Product:
        """Return the output head [V,H]; `embedding` is used if the head is tied to it."""
        if "lm_head.weight" in self._names:
            return self.linear("lm_head")
        return self._products(embedding, None)

    def _kept(self, names: tuple[str, ...]) -> Product | None:
        """Return the named matrices as one quantised product, or as concatenated products if not
        all are quantised alike; None if none is quantised.
        """
        assert self._few_bits is not None
        found = [quantised_matrix(self._checkpoint, f"{name}.weight") for name in names]
        kept = [matrix for matrix in found if matrix is not None]
        if not kept:
            return None
        if len(kept) == len(names) and alike(kept):
            return FewBitsLinear(loaded(kept, self.device), self._bias(names), self._few_bits)
        parts = [self.linear(name) for name in names]
        return SideBySide(parts, (sum(part.shape[0] for part in parts), kept[0].shape[1]))

    def _bias(self, names: Sequence[str], dtype: torch.dtype | None = None) -> Tensor | None:
        """Return [N] in a dtype (None: that of `self`), the concatenated biases of these matrices;
        None without any.
        """
        biases = [self.vector(f"{name}.bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        return torch.cat(present).to(dtype or self.dtype) if present else None

    def _stacked(self, names: tuple[str, ...]) -> Tensor:
        """Return [N,K], these matrices stacked by rows."""
        shapes = [self._checkpoint.shape(name) for name in names]
        rows = [shape[0] for shape in shapes]
        whole = torch.empty(sum(rows), shapes[0][1], dtype=self.dtype, device=self.device)
        for part, name in zip(whole.split(rows), names, strict=True):
            self._fill(part, name)
        return whole

    def _fill(self, out: Tensor, name: str) -> None:
        if isinstance(self._checkpoint, Repeated):
            self._repeat(out, self._checkpoint.block)
            return
        packed = self._checkpoint.packed(name)
        if packed is None:
            out.copy_(self._load(name))
            return
        if self._staging is not None and packed.kind in _STORED and not self._finite:
            dtype = _STORED[packed.kind]
            self._staging.copy((out[r], packed.rows[r], dtype) for r in _pieces(packed))
            release(packed.rows)
            return
        for rows, numbers in pieces_of(packed):
            there = numbers.to(self.device)
            if self._finite and not bool(there.isfinite().all()):
                raise ModelError(
                    f"{self._checkpoint.path}: {name} holds NaN or infinity; the file is damaged"
                )
            out[rows].copy_(there)
        release(packed.rows)

    def _repeat(self, out: Tensor, block: AnyArray) -> None:
        """Fill `out` with repetitions of `block`, which is copied to the device once."""
        if self._block is None:
            self._block = torch.from_numpy(block).to(self.device).to(self.dtype)
        flat, length = out.view(-1), len(self._block)
        whole = len(flat) // length * length
        flat[:whole].view(-1, length).copy_(self._block.expand(whole // length, -1))
        flat[whole:].copy_(self._block[: len(flat) - whole])

    def _load(self, name: str) -> Tensor:
        array = np.array(self._checkpoint.tensor(name))  # A copy: the file's view is read-only.
        return torch.from_numpy(array).to(self.device)
