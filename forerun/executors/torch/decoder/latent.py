"""Latent attention (layer_spec.Latent): computes its heads from a layer's input, and the layer's
output from the attention output.
"""

import torch
from torch import Tensor

from forerun.executors.torch.decoder.adapters import Adapting
from forerun.executors.torch.decoder.elementwise import Elementwise, LatentHeads, Rotary
from forerun.executors.torch.decoder.layers import Linear, Product
from forerun.executors.torch.decoder.weights import Weights
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import Latent, LayerSpec


class LatentProjections:
    """The projections of absorbed latent attention: kv_b_proj is split into the part that maps
    queries to the latent space and the part that maps the attention output back; full keys and
    values are never computed.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        spec: LayerSpec,
        latent: Latent,
        arch: Architecture,
        parts: Elementwise,
    ) -> None:
        self._arch, self._parts, self._latent, self._prefix = arch, parts, latent, prefix
        self._q_norm: Tensor | None = None
        down = f"{prefix}.kv_a_proj_with_mqa"
        if latent.query_rank is None:
            self._down = weights.block_linear(down)
            self._queries = weights.block_linear(f"{prefix}.q_proj")
        else:
            self._down = weights.block_linear(f"{prefix}.q_a_proj", down)
            self._q_norm = weights.norm(f"{prefix}.q_a_layernorm.weight")
            self._queries = weights.linear(f"{prefix}.q_b_proj")
        self._norm = weights.norm(f"{prefix}.kv_a_layernorm.weight")
        each = weights.matrix(f"{prefix}.kv_b_proj.weight").unflatten(0, (arch.heads, -1))
        into, out_of = each.split([latent.nope, latent.value], 1)
        self._into = EachHead(into.transpose(1, 2))
        self._out_of = EachHead(out_of)
        self._out = weights.block_linear(f"{prefix}.o_proj")
        self._sinks = weights.vector(f"{prefix}.sinks") if spec.attention.sinks else None

    @property
    def linears(self) -> tuple[Product, ...]:
        """Its matrix products."""
        products = self._down, self._queries, self._out
        return *products, *self._into.linears, *self._out_of.linears

    def adapt(self, adapting: Adapting) -> None:
        """Apply adapters to the products other than those of kv_b_proj."""
        prefix, about = self._prefix, self._latent
        queries = f"{prefix}.q_proj"
        down = [(f"{prefix}.kv_a_proj_with_mqa", about.rank + about.rope)]
        if about.query_rank is not None:
            queries = f"{prefix}.q_b_proj"
            down.insert(0, (f"{prefix}.q_a_proj", about.query_rank))
        self._down = adapting(self._down, down)
        self._queries = adapting(self._queries, [(queries, self._queries.shape[0])])
        self._out = adapting(self._out, [(f"{prefix}.o_proj", self._arch.hidden)])

    def heads(self, x: Tensor, rotary: Rotary) -> LatentHeads:
        """Return queries and the latent row, before rotation, of rows [M,H] at the positions of
        `rotary`.
        """
        arch, about, norm = self._arch, self._latent, self._parts.norm
        down = self._down(x)
        kept = down[:, -about.rank - about.rope :]
        entering = x
        if self._q_norm is not None:
            entering = norm(down[:, : about.query_rank], self._q_norm, about.norm_eps)
        queries = self._queries(entering).unflatten(1, (arch.heads, -1))
        unrotated, rotated = queries.split([about.nope, about.rope], -1)
        latent, key = kept.split([about.rank, about.rope], -1)
        latent = norm(latent, self._norm, about.norm_eps)
        pair = self._into(unrotated), rotated
        return LatentHeads(pair, (latent, key), rotary, self._parts, sinks=self._sinks)

    def out(self, context: Tensor, gate: Tensor | None) -> Tensor:
        """Return [M,H] for the attention output [M,A,rank]; gate: always None."""
        return self._out(self._out_of(context).flatten(1))


class EachHead:
    """A product with a weight [A,out,in], one matrix for each head: [M,A,in] -> [M,A,out]. On the
    CPU one head after the other, so that a row's bits are independent of the number of rows.
    """

    def __init__(self, weight: Tensor) -> None:
        self.linears: tuple[Linear, ...] = ()
        if weight.device.type == "cpu":
            self.linears = tuple(Linear(each.contiguous()) for each in weight)
        else:
            self._weight = weight.transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M,A,out] for x [M,A,in]."""
        if not self.linears:
            return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)
        return torch.stack([linear(x[:, head]) for head, linear in enumerate(self.linears)], 1)
