"""A gated delta net (layer_spec.GatedDelta) in torch: its inputs from a layer's input, and the
update of a state by a token.

The bits of every number are independent of the batch: everything but matrix products is done
element by element, and sums are taken in a fixed order (`summed`), so that a state advanced alone,
in a batch, over a prompt or again over accepted draft tokens has the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.executors.torch.decoder.adapters import Adapting
from forerun.executors.torch.decoder.elementwise import Elementwise
from forerun.executors.torch.decoder.layers import Product
from forerun.executors.torch.decoder.weights import Weights
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import GatedDelta

_LEAST = 1e-6
"""Keeps the norm of a query or key above zero; the published model's value."""


@dataclass(frozen=True, slots=True)
class DeltaNumbers:
    """The inputs of a gated delta net for nodes [M], in the dtype of its products, and its float32
    weights; for several layers, with a leading axis.

    mixed  [M,C] queries, keys and values, the input of the convolution
    gates  [M,2Hv] b, then a
    kernel   [C,W] of the convolution
    rate   [Hv] -exp(A)
    step   [Hv] dt
    """

    mixed: Tensor
    gates: Tensor
    kernel: Tensor
    rate: Tensor
    step: Tensor

    @property
    def decay(self) -> Tensor:
        """Decay factors of the nodes' states, float32[M,Hv]."""
        a = self.gates.float()[:, len(self.rate) :]
        return torch.exp(self.rate * softplus(a + self.step))

    @property
    def beta(self) -> Tensor:
        """Share, 0 to 1, of the value at each node's key that is replaced, float32[M,Hv]."""
        return 1 / (1 + torch.exp(-self.gates.float()[:, : len(self.rate)]))


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """A delta net's inputs for nodes [M] before their states are known. gate: [M,Hv,Dv] z."""

    about: GatedDelta
    numbers: DeltaNumbers
    gate: Tensor

    @property
    def mixed(self) -> Tensor:
        """The convolution's input, float32[M,C]."""
        return self.numbers.mixed.float()


class DeltaProjections:
    """The matrix products of a delta net, and its gated norm."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        about: GatedDelta,
        arch: Architecture,
        parts: Elementwise,
    ) -> None:
        self._about, self._arch, self._parts, self._prefix = about, arch, parts, prefix
        self._into = weights.block_linear(*(f"{prefix}.{part}_proj" for part in "qkvz"))
        self._gates = weights.linear(*(f"{prefix}.{part}_proj" for part in "ba"))
        self._out = weights.block_linear(f"{prefix}.out_proj")
        kernel, rate, step, norm = (
            weights.required(f"{prefix}.{name}")
            for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
        )
        self._kernel, self._rate, self._step = kernel[:, 0].contiguous(), -torch.exp(rate), step
        self._norm = norm

    @property
    def linears(self) -> tuple[Product, ...]:
        """Its matrix products: input, gates and output."""
        return self._into, self._gates, self._out

    def adapt(self, adapting: Adapting) -> None:
        """Apply adapters to the products."""
        about, heads = self._about, self._about.value_heads
        widths = {"q": about.keys, "k": about.keys, "v": about.values, "z": about.values}

        def named(widths: dict[str, int]) -> list[tuple[str, int]]:
            return [(f"{self._prefix}.{part}_proj", width) for part, width in widths.items()]

        self._into = adapting(self._into, named(widths))
        self._gates = adapting(self._gates, named({"b": heads, "a": heads}))
        self._out = adapting(self._out, named({"out": self._arch.hidden}))

    def inputs(self, x: Tensor) -> DeltaInputs:
        """Return the recurrence's inputs for rows [M,H], before the convolution, and the gate
        [M,Hv,Dv] of its output. Independent of positions.
        """
        about, own = self._about, (self._kernel, self._rate, self._step)
        mixed, gate = self._into(x).split([about.channels, about.values], -1)
        gate = gate.unflatten(-1, (about.value_heads, about.value_size))
        return DeltaInputs(about, DeltaNumbers(mixed, self._gates(x), *own), gate)

    def out(self, found: Tensor, gate: Tensor) -> Tensor:
        """Return [M,H] for the recurrence's output float32[M,Hv,Dv] and z [M,Hv,Dv]."""
        opened = self._parts.gated_norm(found, self._norm, self._arch.norm_eps, gate)
        return self._out(opened.flatten(1))


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) elementwise, without overflow; shape and dtype of `x`."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


@dataclass(frozen=True, slots=True)
class Tokens:
    """The inputs of the recurrence for n nodes, float32.

    queries, keys  [n,Hk,Dk]
    values         [n,Hv,Dv]
    decay, beta    [n,Hv]
    tiled          as GatedDelta's
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    decay: Tensor
    beta: Tensor
    tiled: bool = False

    def ordered(self, order: Tensor) -> "Tokens":
        """Return copies of the nodes `order`, int64[n], in that order."""
        return self._each(lambda part: part.index_select(0, order))

    def part(self, begin: int, end: int) -> "Tokens":
        """Return the nodes from `begin` to before `end`, as views."""
        return self._each(lambda part: part[begin:end])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        return Tokens(
            change(self.queries),
            change(self.keys),
            change(self.values),
            change(self.decay),
            change(self.beta),
            self.tiled,
        )


def tokens_of(about: GatedDelta, numbers: DeltaNumbers, passed: Tensor) -> Tokens:
    """Return the inputs of the first n nodes, given the results of convolution and SiLU,
    float32[n,C] (`passed_on`).
    """
    count = len(passed)
    queries, keys, values = passed.split([about.keys, about.keys, about.values], -1)
    shape = (about.key_heads, about.key_size)
    return Tokens(
        _of_unit_length(queries.unflatten(-1, shape)) * about.key_size**-0.5,
        _of_unit_length(keys.unflatten(-1, shape)),
        values.unflatten(-1, (about.value_heads, about.value_size)),
        numbers.decay[:count],
        numbers.beta[:count],
        about.tiled,
    )


def passed_on(sums: Tensor) -> Tensor:
    """Return SiLU of a convolution's sums float32[n,C] (`window_sums`)."""
    return sums / (1 + torch.exp(-sums))


def _of_unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt(summed((x * x).unsqueeze(-1)) + _LEAST)


def advance(states: Tensor, tokens: Tokens) -> None:
    """Advance `states` float32[n,Hv,Dk,Dv] by one token each, of n tokens, in place."""
    keys = _each_value_head(tokens.keys, states, tokens.tiled).unsqueeze(-1)
    states *= tokens.decay[..., None, None]
    change = (tokens.values - summed(states * keys)) * tokens.beta.unsqueeze(-1)
    states += keys * change.unsqueeze(-2)


def read(states: Tensor, tokens: Tokens) -> Tensor:
    """Return float32[n,Hv,Dv], the outputs of the queries of n tokens in their states."""
    queries = _each_value_head(tokens.queries, states, tokens.tiled)
    return summed(states * queries.unsqueeze(-1))


def _each_value_head(x: Tensor, states: Tensor, tiled: bool) -> Tensor:
    """Return [n,Hv,Dk] for key heads [n,Hk,Dk], repeated for the value heads that share one; these
    are contiguous, or interleaved (`tiled`).
    """
    times = states.shape[1] // x.shape[1]
    return x.repeat(1, times, 1) if tiled else x.repeat_interleave(times, 1)


def summed(x: Tensor) -> Tensor:
    """Return [...,D] for [...,n,D]: adds the two halves repeatedly until one row is left. The order
    of a library's sum depends on the shape of the whole tensor.
    """
    while (rows := x.shape[-2]) > 1:
        half = rows // 2
        rest = x[..., 2 * half :, :]
        x = x[..., :half, :] + x[..., half : 2 * half, :]
        if rows % 2:
            x = torch.cat([x, rest], -2)
    return x[..., 0, :]
