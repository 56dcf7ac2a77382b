"""Parts that some layers have in addition to attention and one feed-forward (layer_spec.LayerSpec):
experts in parallel with it, and a vector per token.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.decoder.adapters import Adapting
from forerun.executors.torch.decoder.elementwise import Elementwise
from forerun.executors.torch.decoder.experts import Mixture
from forerun.executors.torch.decoder.layers import Product
from forerun.executors.torch.decoder.weights import Weights
from forerun.networks.arch import PER_LAYER_ROWS, Architecture
from forerun.networks.layer_spec import BESIDE_NORMS, LayerSpec


class BesideExperts:
    """Experts in parallel with a feed-forward, each of the two with norms of its own."""

    def __init__(
        self, weights: Weights, prefix: str, spec: LayerSpec, eps: float, parts: Elementwise
    ) -> None:
        assert spec.beside is not None
        self._norms = [weights.norm(f"{prefix}.{name}.weight") for name in BESIDE_NORMS]
        self._norm, self._eps = parts.norm, eps
        self._mixture = Mixture(weights, f"{prefix}.moe", spec.beside, parts, spec.activation)
        self._scale: Tensor | None = None
        if spec.beside.router.own_input:
            scale = weights.required(f"{prefix}.moe.gate.scale")
            self._scale = scale * len(scale) ** -0.5

    @property
    def linears(self) -> tuple[Product, ...]:
        """Its matrix products."""
        return self._mixture.linears

    def adapt(self, adapting: Adapting, prefix: str) -> None:
        """Apply adapters to the experts' products, whose tensor names begin with `prefix`."""
        self._mixture.adapt(adapting, prefix)

    def __call__(self, x: Tensor, fed: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return [M,H] for the residual stream x [M,H] and the feed-forward's output [M,H]. `sizes`
        as of Mixture.
        """
        behind_fed, before, behind = self._norms
        routed = None if self._scale is None else self._norm(x, self._scale, self._eps)
        mixed = self._mixture(self._norm(x, before, self._eps), sizes, routed)
        fed = self._norm(fed, behind_fed, self._eps)
        return fed + self._norm(mixed, behind, self._eps)


class TokenVectors:
    """Each token's vectors for all layers: rows of a table, and a product of its embedding."""

    def __init__(self, weights: Weights, arch: Architecture, parts: Elementwise) -> None:
        self._layers, self._norm, self._eps = arch.layers, parts.norm, arch.norm_eps
        self._table = weights.stored_matrix(f"{PER_LAYER_ROWS}.weight")
        self._projection = weights.linear("model.per_layer_model_projection")
        self._weight = weights.norm("model.per_layer_projection_norm.weight")
        self._scale = torch.tensor(arch.token_vector**0.5).to(weights.dtype).item()
        self._shrink = arch.hidden**-0.5

    @property
    def linears(self) -> tuple[Product, ...]:
        """Its matrix products."""
        return (self._projection,)

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return [M,L,D] of tokens int64[M] and their embeddings [M,H], scaled."""
        made = (self._projection(x) * self._shrink).unflatten(1, (self._layers, -1))
        made = self._norm(made, self._weight, self._eps)
        rows = F.embedding(tokens, self._table).to(x.dtype) * self._scale
        return (made + rows.view(made.shape)) * 2**-0.5


class TokenVector:
    """One layer's use of its token vector: x + norm(projection(activation(gate x) vector))."""

    def __init__(
        self, weights: Weights, prefix: str, spec: LayerSpec, eps: float, parts: Elementwise
    ) -> None:
        self._gate_product = weights.block_linear(f"{prefix}.per_layer_input_gate")
        self._projection = weights.block_linear(f"{prefix}.per_layer_projection")
        self._weight = weights.norm(f"{prefix}.post_per_layer_input_norm.weight")
        self._gate, self._norm, self._eps = parts.gate_for(spec.activation), parts.norm, eps

    @property
    def linears(self) -> tuple[Product, ...]:
        """Its matrix products."""
        return self._gate_product, self._projection

    def adapt(self, adapting: Adapting, prefix: str) -> None:
        """Apply adapters to the products, whose tensor names begin with `prefix`."""
        gate, projection = self._gate_product, self._projection
        names = f"{prefix}.per_layer_input_gate", f"{prefix}.per_layer_projection"
        self._gate_product = adapting(gate, [(names[0], gate.shape[0])])
        self._projection = adapting(projection, [(names[1], projection.shape[0])])

    def __call__(self, x: Tensor, vector: Tensor) -> Tensor:
        """Return [M,H] for the residual stream x [M,H] and the vectors [M,D]."""
        made = self._projection(self._gate(self._gate_product(x), vector))
        return x + self._norm(made, self._weight, self._eps)
