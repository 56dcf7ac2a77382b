"""A checkpoint's tensors as a decoder wants them: on its device, in its dtype, several as one."""

import numpy as np
import torch
from torch import Tensor

from forerun.executors.torch.layers import Float8Linear, Linear, Product
from forerun.models.checkpoint import Checkpoint


class Weights:
    """A checkpoint's tensors on `device` in `dtype`, read when asked for.

    products  what the blocks' products are made of
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        products: type[Product],
    ) -> None:
        self._products = products
        self._unnarrowed: type[Product] = Linear if products is Float8Linear else products
        self._checkpoint, self._names = checkpoint, set(checkpoint.names())
        self._norm_offset = checkpoint.architecture.norm_offset
        self.device, self.dtype = device, dtype

    def vector(self, name: str) -> Tensor | None:
        """float32 whatever the dtype, or None where the model has no such tensor."""
        return self._load(name).float() if name in self._names else None

    def norm(self, name: str) -> Tensor:
        """What a norm multiplies by, float32[W]: the vector `name`, and the model's offset."""
        stored = self._load(name).float()
        return stored + self._norm_offset if self._norm_offset else stored

    def matrix(self, name: str) -> Tensor:
        """[N,K] in the dtype."""
        return self._load(name).to(self.dtype)

    def block_linear(self, *names: str) -> Product:
        """The matrices called names, one above the other, as one product of the blocks."""
        return self._joined(self._products, names)

    def linear(self, *names: str) -> Product:
        """The same, never in float8."""
        return self._joined(self._unnarrowed, names)

    def head(self, embedding: Tensor) -> Product:
        """The output head [V,H]; `embedding` is what it is tied to, if it is."""
        if "lm_head.weight" in self._names:
            return self.linear("lm_head")
        return self._unnarrowed(embedding)

    def _joined(self, kind: type[Product], names: tuple[str, ...]) -> Product:
        biases = [self.vector(f"{name}.bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        weight = torch.cat([self.matrix(f"{name}.weight") for name in names])
        return kind(weight, torch.cat(present).to(self.dtype) if present else None)

    def _load(self, name: str) -> Tensor:
        array = np.array(self._checkpoint.tensor(name))  # A copy: the file's view is read-only.
        return torch.from_numpy(array).to(self.device)
