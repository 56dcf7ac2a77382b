"""Products in float8, and rows that are kept in it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MOST = torch.finfo(FLOAT8).max


class Float8Rows(NamedTuple):
    """The left side of a product in float8: numbers float8[M,K], and each row's scale in
    float32[M,1]; their product approximates the row.
    """

    numbers: Tensor
    scale: Tensor


Rows = Tensor | Float8Rows
"""The left side of a matrix product: [M,K] in the activations' dtype or in float8."""


class Float8Linear:
    """y = x W^T + b with both factors in float8 (E4M3), "W8A8 dynamic".

    A scale per row of W, made once, and per row of x, made at every call: each row's greatest
    absolute value becomes float8's. On CUDA one call of the library; on the CPU its slow twin.
    Returns the dtype of the weight it was made of, and takes that or rows already in float8.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))
        self._bias, self._dtype = bias, weight.dtype
        self._weight = float8_rows(weight)

    def __call__(self, x: Rows) -> Tensor:
        """[M,K] -> [M,N]."""
        rows = x if isinstance(x, Float8Rows) else float8_rows(x)
        numbers, scale = self._weight
        if numbers.device.type == "cpu":
            y = (rows.numbers.float() @ numbers.float().T) * rows.scale * scale.T
            y = y if self._bias is None else y + self._bias
            return y.to(self._dtype)
        return torch._scaled_mm(
            rows.numbers,
            numbers.t(),
            scale_a=rows.scale,
            scale_b=scale.t(),
            bias=self._bias,
            out_dtype=self._dtype,
        )


def float8_rows(x: Tensor) -> Float8Rows:
    """Rows [M,K] as float8 with one scale each, the row's largest number over float8's. NaN stays
    NaN.
    """
    wide = x.float()
    # Times the inverse: CUDA divides by a number so, the CPU does not.
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) * (1 / _FLOAT8_MOST)
    numbers = (wide / scale).clamp(-_FLOAT8_MOST, _FLOAT8_MOST).to(FLOAT8)
    return Float8Rows(numbers, scale)


@dataclass(frozen=True, slots=True)
class Float8Parts:
    """The operations between products in float8: `float8_rows` of Elementwise's results, which are
    first rounded to the activations' dtype.
    """

    rows: Callable[[Tensor], Float8Rows]
    norm: Callable[[Tensor, Tensor, float], Float8Rows]
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Float8Rows]]
    gate: Callable[[Tensor, Tensor], Float8Rows]
    gelu_gate: Callable[[Tensor, Tensor], Float8Rows]
