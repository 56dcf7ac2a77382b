"""A mixture of experts: each row runs through the few feed-forwards that a router chooses for it.

Shazeer et al. 2017 (arXiv 1701.06538), in the form of Qwen2-MoE and Qwen3-MoE. A row's bits do
not depend on the others: the rows of one expert are multiplied at row counts at which that does
not matter (layers.padded_rows), and a row's experts are added in the order of its own choice.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.float8 import Rows
from forerun.executors.torch.layers import FeedForward, Gate, Product, padded_rows, plain
from forerun.executors.torch.weights import Weights
from forerun.models.layer_spec import Experts


class Mixture:
    """A router, its experts and the expert that every row visits, if there is one.

    Which rows an expert gets is known on the host only: a pass waits for the device.
    """

    def __init__(self, weights: Weights, prefix: str, about: Experts, gate: Gate) -> None:
        self._about = about
        self._router = weights.linear(f"{prefix}.gate")
        self._experts = [
            FeedForward(*weights.feed_forward(f"{prefix}.experts.{expert}"), gate)
            for expert in range(about.count)
        ]
        self._shared: FeedForward | None = None
        if about.shared:
            self._shared = FeedForward(*weights.feed_forward(f"{prefix}.shared_expert"), gate)
            self._shared_gate = weights.matrix(f"{prefix}.shared_expert_gate.weight").float()[0]

    @property
    def linears(self) -> tuple[Product, ...]:
        """All matrix products."""
        parts = [*self._experts, *([self._shared] if self._shared else [])]
        return self._router, *(linear for part in parts for linear in part.linears)

    def __call__(self, x: Rows, sizes: tuple[int, ...]) -> Tensor:
        """[M,H] -> [M,H], not from float8. `sizes`: row counts that products may be run at; empty
        = any.
        """
        x = plain(x)
        weights, chosen = self._routes(x)
        found = self._outputs(x, chosen, sizes)
        # One after the other: a sum over an axis may add in an order that depends on its shape.
        mixed = found[:, 0].float() * weights[:, :1]
        for place in range(1, self._about.top_k):
            mixed = mixed + found[:, place].float() * weights[:, place : place + 1]
        if self._shared is not None:
            score = (x.float() * self._shared_gate).sum(-1, keepdim=True)
            mixed = mixed + self._shared(x, sizes).float() / (1 + torch.exp(-score))
        return mixed.to(x.dtype)

    def _routes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row: its experts' weights float32[M,k] and numbers int64[M,k], best first."""
        chances = self._router(x).float().softmax(-1)
        weights, chosen = chances.topk(self._about.top_k, -1)
        if self._about.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def _outputs(self, x: Tensor, chosen: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """[M,k,H]: what each row's experts make of it."""
        count, width = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        found = x.new_empty(count * width, x.shape[1])
        bounds = torch.bincount(chosen.flatten(), minlength=self._about.count).tolist()
        for expert, places in zip(self._experts, order.split(bounds), strict=True):
            if not len(places):
                continue
            rows = x[places // width]
            rows = F.pad(rows, (0, 0, 0, padded_rows(len(rows), sizes) - len(rows)))
            found[places] = expert(rows, sizes)[: len(places)]
        return found.view(count, width, -1)
