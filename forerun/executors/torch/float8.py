"""Products in float8, and rows that are kept in it."""

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MOST = torch.finfo(FLOAT8).max


class Float8Linear:
    """y = x W^T + b with both factors in float8 (E4M3), "W8A8 dynamic".

    A scale per row of W, made once, and per row of x, made at every call: each row's greatest
    absolute value becomes float8's. On CUDA one call of the library; elsewhere its slow twin.
    Takes and returns the dtype of the weight it was made of.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))
        self._bias = bias
        self._narrow, self._scale = float8_rows(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[M,K] -> [M,N]."""
        narrow, scale = float8_rows(x)
        if x.device.type != "cuda":
            y = (narrow.float() @ self._narrow.float().T) * scale * self._scale.T
            y = y if self._bias is None else y + self._bias
            return y.to(x.dtype)
        return torch._scaled_mm(
            narrow,
            self._narrow.t(),
            scale_a=scale,
            scale_b=self._scale.t(),
            bias=self._bias,
            out_dtype=x.dtype,
        )


def float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 [M,K] and scales float32[M,1] whose product is nearly x [M,K]. NaN stays NaN."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / _FLOAT8_MOST
    return (wide / scale).clamp(-_FLOAT8_MOST, _FLOAT8_MOST).to(FLOAT8), scale
