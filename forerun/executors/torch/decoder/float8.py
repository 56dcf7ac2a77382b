"""Rows of the cache and of weights in float8."""

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MOST = torch.finfo(FLOAT8).max


class Float8Rows(NamedTuple):
    """Rows in float8: numbers float8[M,K], and each row's scale float32[M,1]; their product
    approximates the row.
    """

    numbers: Tensor
    scale: Tensor


def float8_rows(x: Tensor) -> Float8Rows:
    """Return rows [M,K] as float8 with one scale each: the row's greatest absolute value over
    float8's. NaN stays NaN.
    """
    wide = x.float()
    # Multiply by the inverse, as CUDA divides by a constant and the CPU does not.
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) * (1 / _FLOAT8_MOST)
    numbers = (wide / scale).clamp(-_FLOAT8_MOST, _FLOAT8_MOST).to(FLOAT8)
    return Float8Rows(numbers, scale)
