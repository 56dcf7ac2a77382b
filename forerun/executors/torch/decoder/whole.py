"""The product of whole sequences, which training runs."""

import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor


class WholeLinear:
    """y = x W^T + b at any number of rows in one call, for whole sequences: training's product.

    A row's last bits may depend on how many others there are.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))
        self.weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[M,K] -> [M,N]."""
        return F.linear(x, self.weight, self._bias)
