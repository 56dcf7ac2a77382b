"""Layers with a recurrent state as pure functions: short convolutions (layer_spec.ShortConvolution)
and gated delta nets (layer_spec.GatedDelta, delta.py). What they compute is torch/decoder's.

A node reads its ancestors' inputs and, before its row's root, the window in its row of states. Rows
of states are state_slots.py's, and one more, which holds zeros.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from forerun.executors.jax.network.layers import product, rms_norm
from forerun.executors.jax.network.weights import Params
from forerun.networks.layer_spec import GatedDelta, Recurrent


class Brought(NamedTuple):
    """What nodes bring to a layer's states.

    mixed  float32[R,N,C] what is convolved
    gates  float32[R,N,2Hv] b, then a, of a gated delta net
    after  float32[R,Hv,Dk,Dv] its states behind the last nodes, where these are chains and all stay
    """

    mixed: Array
    gates: Array | None = None
    after: Array | None = None


Recur = Callable[[Any, Params, Brought], tuple[Array, Brought]]
"""(number among recurrent layers, the layer's parameters, what nodes bring) -> what is read of the
states, float32[R,N,C] or [R,N,Hv,Dv]; and the same with `after`."""


def no_states(layer: Any, weights: Params, brought: Brought) -> tuple[Array, Brought]:
    """Raise TypeError: the pass has no states to read."""
    raise TypeError("a layer with a recurrent state runs where no states are kept")


class RecurrentTables(NamedTuple):
    """The recurrent states of all layers: windows float32[L,rows+1,W-1,C], and of gated delta nets
    matrices float32[L,rows+1,Hv,Dk,Dv].
    """

    windows: Array
    matrices: Array | None = None

    def copied(self, source: Array, target: Array) -> "RecurrentTables":
        """Return the tables with the rows int32[n] `source` copied to `target`."""
        matrices = None if self.matrices is None else self.matrices[:, source]
        return self.put(target, RecurrentTables(self.windows[:, source], matrices))

    def put(self, rows: Array, states: "RecurrentTables") -> "RecurrentTables":
        """Return the tables with `states` [L,n,...] at rows int32[n]; those beyond are dropped."""
        windows = self.windows.at[:, rows].set(states.windows, mode="drop")
        if self.matrices is None or states.matrices is None:
            return RecurrentTables(windows)
        return RecurrentTables(windows, self.matrices.at[:, rows].set(states.matrices, mode="drop"))


class Windows(NamedTuple):
    """Where nodes' windows are, of R rows of N nodes.

    past  int32[R,N,W] each node's last tokens, its own last: W - 1 + n for node n of its row, below
          for places of the window in the state
    slot  int32[R] row of states at which a row begins
    """

    past: Array
    slot: Array

    @classmethod
    def of(cls, parents: Array, slot: Array, width: int) -> "Windows":
        """Return those of nodes with these parents [R,N], below 0 for a root; width: W."""
        rows, nodes = parents.shape
        place = jnp.broadcast_to(width - 1 + jnp.arange(nodes), (rows, nodes))
        # Of a place of the window the one before it, of a root the window's last.
        before = jnp.broadcast_to(jnp.arange(width - 1) - 1, (rows, width - 1))
        above = jnp.concatenate([before, jnp.where(parents < 0, width - 2, width - 1 + parents)], 1)
        past = [place]
        for _ in range(width - 1):
            place = jnp.take_along_axis(above, jnp.maximum(place, 0), 1)
            past.insert(0, place)
        return cls(jnp.stack(past, -1), slot)

    def rows_of(self, windows: Array, mixed: Array) -> Array:
        """Return [R,W-1+N,C] that `past` counts, of windows [rows,W-1,C] and inputs [R,N,C]."""
        return jnp.concatenate([windows[self.slot], mixed], 1)

    def sums(self, windows: Array, mixed: Array, kernel: Array, bias: Array | None) -> Array:
        """Return float32[R,N,C], the convolution with a kernel [C,1,W], the oldest token first."""
        rows = self.rows_of(windows, mixed)
        total = jnp.zeros_like(mixed) if bias is None else jnp.zeros_like(mixed) + bias
        for place in range(kernel.shape[-1]):
            read = jnp.take_along_axis(rows, self.past[..., place, None], 1)
            total = total + read * kernel[:, 0, place]
        return total

    def behind(self, windows: Array, mixed: Array, node: Array) -> Array:
        """Return [L,R,W-1,C], the windows of all layers behind a node int32[R] of each row."""
        where = jnp.take_along_axis(self.past, node[:, None, None], 1)[:, 0, 1:, None]
        found = [
            jnp.take_along_axis(self.rows_of(*each), where, 1)
            for each in zip(windows, mixed, strict=True)
        ]
        return jnp.stack(found)


def inputs(about: Recurrent, weights: Params, x: Array) -> tuple[Brought, Array]:
    """Return what x [R,N,H] brings to a layer's states, and the gate [R,N,.] of its output."""
    if isinstance(about, GatedDelta):
        mixed, gates = (
            jnp.concatenate([product(x, weights[f"{part}_proj"]) for part in parts], -1)
            for parts in ("qkv", "ba")
        )
        gate = product(x, weights["z_proj"])
        return Brought(mixed.astype(jnp.float32), gates.astype(jnp.float32)), gate
    made = product(x, weights["in_proj"], weights.get("in_proj.bias"))
    b, gate, inner = jnp.split(made, 3, -1)
    return Brought(b.astype(jnp.float32) * inner.astype(jnp.float32)), gate


def opened(about: Recurrent, weights: Params, found: Array, gate: Array, eps: float) -> Array:
    """Return the output product's input [R,N,.], in the dtype of `gate`."""
    wide = gate.astype(jnp.float32)
    if isinstance(about, GatedDelta):
        found = rms_norm(found.astype(gate.dtype), weights["head_weight"], eps)
        found = found.reshape(gate.shape).astype(jnp.float32)
        wide = wide / (1 + jnp.exp(-wide))
    return (found * wide).astype(gate.dtype)
