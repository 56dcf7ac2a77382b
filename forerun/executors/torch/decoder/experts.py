"""A mixture of experts: each row runs through the few feed-forwards that a router chooses for it
(Shazeer et al. 2017, arXiv 1701.06538); the kind of router is configuration (layer_spec.Router).

On a device with a grouped product (grouped.GroupedProduct), a mixture does not synchronise with the
device, so rounds can be captured. On the CPU each expert is a product of its own, whose rows the
host selects, and a row's bits are independent of the others: an expert's rows are multiplied at the
row counts of layers.padded_rows, and a row's experts are added in the order of its own choice.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.errors import ConfigError
from forerun.executors.torch.decoder.adapters import Adapting, RowAdapters
from forerun.executors.torch.decoder.elementwise import Elementwise
from forerun.executors.torch.decoder.few_bits_layers import feed_forward
from forerun.executors.torch.decoder.grouped import GroupedProduct, Pairs
from forerun.executors.torch.decoder.layers import FeedForward, Product, alone, padded_rows
from forerun.executors.torch.decoder.weights import Weights
from forerun.executors.torch.group import Group
from forerun.networks.layer_spec import Activation, Experts, Router


class Mixture:
    """A router, its experts and the shared expert that every row visits, if there is one.

    group  the ranks that have the other experts, or the other columns of each. The router is on
           every rank, and so is the shared expert unless it is divided (Experts.shared_whole)
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        about: Experts,
        parts: Elementwise,
        activation: Activation = "silu",
        group: Group | None = None,
    ) -> None:
        self._about, self._sum = about, group.sum if group else alone
        self._rows = RowAdapters()
        # DeepSeek's scores are so close that 16 bits would choose other experts.
        wide = about.router.scores == "sigmoid"
        self._router = (weights.wide_linear if wide else weights.linear)(f"{prefix}.gate")
        self._correction = weights.vector(f"{prefix}.gate.e_score_correction_bias")
        self._scale = weights.vector(f"{prefix}.gate.per_expert_scale")
        gate, experts = parts.gate_for(activation), f"{prefix}.experts"
        self._each: list[FeedForward] = []
        self._grouped: GroupedProduct | None = parts.grouped
        if parts.grouped is None:
            self._each = [
                FeedForward(*weights.feed_forward(f"{experts}.{expert}"), gate)
                for expert in about.here
            ]
        else:
            self._gate = gate
            self._gate_up = weights.experts(experts, about.here, "gate_proj", "up_proj")
            self._down = weights.experts(experts, about.here, "down_proj")
        self._shared: FeedForward | None = None
        self._shared_gate: Tensor | None = None
        if about.shared:
            shared = weights.feed_forward(f"{prefix}.shared_expert")
            self._shared = feed_forward(shared, gate, activation)
        if about.shared_gate:
            self._shared_gate = weights.matrix(f"{prefix}.shared_expert_gate.weight").float()[0]

    @property
    def linears(self) -> tuple[Product, ...]:
        """All matrix products that are one for all rows, or one for each expert."""
        parts = [*self._each, *([self._shared] if self._shared else [])]
        return self._router, *(linear for part in parts for linear in part.linears)

    def adapt(self, adapting: Adapting, prefix: str) -> None:
        """Apply adapters to the experts' products, whose tensor names begin with `prefix`. Raises
        ConfigError if the experts are one grouped product.
        """
        if self._grouped is not None and adapting.adapts(f"{prefix}.experts."):
            raise ConfigError(
                "lora-modules: an adapter changes experts, which this device runs as one product "
                "for all; use the CPU, or merge it into the weights."
            )
        self._rows = adapting.rows
        self._router = adapting(self._router, [(f"{prefix}.gate", self._router.shape[0])])
        self._each = [
            adapting.feed_forward(expert, f"{prefix}.experts.{number}")
            for number, expert in enumerate(self._each)
        ]
        if self._shared is not None:
            self._shared = adapting.feed_forward(self._shared, f"{prefix}.shared_expert")

    def __call__(self, x: Tensor, sizes: tuple[int, ...], routed: Tensor | None = None) -> Tensor:
        """Return [M,H] for x [M,H], summed over the ranks. `sizes`: row counts at which products
        may run; empty = any. routed: the router's input [M,H]; None: x.
        """
        wide, routed = self._about.router.scores == "sigmoid", x if routed is None else routed
        logits = self._router(routed.float() if wide else routed).float()
        weights, chosen = routes(logits, self._about.router, self._about.top_k, self._correction)
        if self._scale is not None:
            weights = weights * self._scale[chosen]
        if self._about.own is not None:
            chosen = _places(chosen, self._about.own)
        if self._grouped is None:
            found = self._outputs(x, chosen, sizes)
        else:
            found = self._launched(x, chosen, self._grouped)
        # One by one: the order of a sum over an axis may depend on its shape.
        mixed = found[:, 0].float() * weights[:, :1]
        for place in range(1, self._about.top_k):
            mixed = mixed + found[:, place].float() * weights[:, place : place + 1]
        if self._shared is None:
            return self._sum(mixed.to(x.dtype))
        shared = self._shared(x, sizes).float()
        if self._shared_gate is not None:
            score = (x.float() * self._shared_gate).sum(-1, keepdim=True)
            shared = shared / (1 + torch.exp(-score))
        if self._about.shared_whole:
            mixed = self._sum(mixed.to(x.dtype)).float()
            return (mixed + shared).to(x.dtype)
        return self._sum((mixed + shared).to(x.dtype))

    def _launched(self, x: Tensor, chosen: Tensor, grouped: GroupedProduct) -> Tensor:
        """Compute `_outputs` with the grouped product, without synchronising with the device."""
        count, k = chosen.shape
        pairs = Pairs.of(chosen, len(self._about.here))
        opened, up = grouped(x, self._gate_up, pairs, k).chunk(2, -1)
        found = grouped(self._gate(opened, up), self._down, pairs, 1)
        if self._about.own is not None:
            found = torch.where((pairs.expert < len(self._about.own)).unsqueeze(1), found, 0)
        return found.view(count, k, -1)

    def _outputs(self, x: Tensor, chosen: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return [M,k,H], the outputs of each row's experts, 0 for those of other ranks. The host
        waits for the choices.
        """
        count, width = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        found = x.new_zeros(count * width, x.shape[1])
        bounds = torch.bincount(chosen.flatten(), minlength=len(self._each) + 1).tolist()
        for expert, places in zip(self._each, order.split(bounds)[:-1], strict=True):
            if not len(places):
                continue
            rows = x[places // width]
            rows = F.pad(rows, (0, 0, 0, padded_rows(len(rows), sizes) - len(rows)))
            self._rows.select(places // width, len(rows))
            found[places] = expert(rows, sizes)[: len(places)]
        self._rows.select_all()
        return found.view(count, width, -1)


def _places(chosen: Tensor, here: range) -> Tensor:
    """Return the experts' indices among those of this rank `here`; for an expert of another rank,
    the number of this rank's experts.
    """
    place = chosen - here.start
    return torch.where((place >= 0) & (place < len(here)), place, len(here))


def routes(
    logits: Tensor, router: Router, top_k: int, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each row's expert weights float32[M,k] and numbers int64[M,k], best first.

    logits  float32[M,N] of all experts; correction: float32[N], if the router has one
    """
    # Not torch.sigmoid, whose bits on the CPU depend on the index in the tensor.
    sigmoid = router.scores == "sigmoid"
    scores = 1 / (1 + torch.exp(-logits)) if sigmoid else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if router.groups > 1:
        grouped = ranked.unflatten(-1, (router.groups, -1))
        best = grouped.topk(router.summed, -1)[0].sum(-1).topk(router.topk_group, -1)[1]
        kept = torch.zeros_like(grouped[..., 0]).scatter_(-1, best, 1.0).unsqueeze(-1)
        ranked = torch.where(kept > 0, grouped, -torch.inf).flatten(1)
    chosen = ranked.topk(top_k, -1)[1]
    weights = scores.gather(-1, chosen)
    if router.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST)
    return weights if router.scale == 1.0 else weights * router.scale, chosen


_LEAST = 1e-20
"""Keeps a sum of sigmoids above zero."""
