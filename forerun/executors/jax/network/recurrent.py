"""Layers with a recurrent state as pure functions: short convolutions (layer_spec.ShortConvolution)
and gated delta nets (layer_spec.GatedDelta): the nodes' inputs and outputs, the update of a state
by a token, and the states after a step. The results are torch/decoder's, node by node.

A node reads its ancestors' inputs and, before its row's root, the window in its row of states. Rows
of states are those of state_slots.py, and one more of zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.jax.network.layers import product, rms_norm
from forerun.executors.jax.network.weights import Params
from forerun.networks.layer_spec import GatedDelta, Recurrent


class Brought(NamedTuple):
    """The nodes' inputs to a layer's states.

    mixed  float32[R,N,C] the convolution's input
    gates  float32[R,N,2Hv] b, then a, of a gated delta net
    after  float32[R,Hv,Dk,Dv] its states after the last nodes, if these are chains that all stay
    """

    mixed: Array
    gates: Array | None = None
    after: Array | None = None


Recur = Callable[[Any, Params, Brought], tuple[Array, Brought]]
"""(number among recurrent layers, the layer's parameters, the nodes' inputs) -> the layer's output,
float32[R,N,C] or [R,N,Hv,Dv]; and the inputs with `after`.
"""


def no_states(layer: Any, weights: Params, brought: Brought) -> tuple[Array, Brought]:
    """Raise TypeError: the pass has no recurrent states."""
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
    """The windows of R rows of N nodes.

    past  int32[R,N,W] each node's last tokens, its own last: W - 1 + n for node n of its row, less
          for places of the window in the state
    slot  int32[R] row of states at which a row begins
    """

    past: Array
    slot: Array

    @classmethod
    def of(cls, parents: Array, slot: Array, width: int) -> "Windows":
        """Return the windows of nodes with these parents [R,N], below 0 for a root; width: W."""
        rows, nodes = parents.shape
        place = jnp.broadcast_to(width - 1 + jnp.arange(nodes), (rows, nodes))
        # The place before each: in the window the previous one, for a root the window's last.
        before = jnp.broadcast_to(jnp.arange(width - 1) - 1, (rows, width - 1))
        above = jnp.concatenate([before, jnp.where(parents < 0, width - 2, width - 1 + parents)], 1)
        past = [place]
        for _ in range(width - 1):
            place = jnp.take_along_axis(above, jnp.maximum(place, 0), 1)
            past.insert(0, place)
        return cls(jnp.stack(past, -1), slot)

    def rows_of(self, windows: Array, mixed: Array) -> Array:
        """Return [R,W-1+N,C], the rows that `past` refers to, from windows [rows,W-1,C] and inputs
        [R,N,C].
        """
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
        """Return [L,R,W-1,C], the windows of all layers after a node int32[R] of each row."""
        where = jnp.take_along_axis(self.past, node[:, None, None], 1)[:, 0, 1:, None]
        found = [
            jnp.take_along_axis(self.rows_of(*each), where, 1)
            for each in zip(windows, mixed, strict=True)
        ]
        return jnp.stack(found)


def inputs(about: Recurrent, weights: Params, x: Array) -> tuple[Brought, Array]:
    """Return the inputs of x [R,N,H] to a layer's states, and the gate [R,N,.] of its output."""
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


_LEAST = 1e-6
"""Keeps the norm of a query or key above zero; the published model's value."""


class DeltaTokens(NamedTuple):
    """The inputs of the recurrence for nodes: float32.

    queries, keys  [R,N,Hv,Dk], values [R,N,Hv,Dv]
    decay, beta    [R,N,Hv]
    """

    queries: Array
    keys: Array
    values: Array
    decay: Array
    beta: Array

    def by_node(self) -> "DeltaTokens":
        """Return the same with the axis of nodes first."""
        return DeltaTokens(*(part.swapaxes(0, 1) for part in self))


def tokens_of(about: GatedDelta, weights: Params, sums: Array, gates: Array) -> DeltaTokens:
    """Return the recurrence's inputs of nodes, from the convolution's sums float32[R,N,C], and b
    and a [R,N,2Hv].
    """
    passed = sums / (1 + jnp.exp(-sums))
    parts = jnp.split(passed, [about.keys, 2 * about.keys], -1)
    heads = about.value_heads, about.value_size
    queries, keys = (
        _of_value_heads(about, _of_unit_length(part.reshape(*part.shape[:2], -1, about.key_size)))
        for part in parts[:2]
    )
    b, a = jnp.split(gates, 2, -1)
    a = a + weights["linear_attn.dt_bias"]
    soft = jnp.maximum(a, 0) + jnp.log1p(jnp.exp(-jnp.abs(a)))
    return DeltaTokens(
        queries * about.key_size**-0.5,
        keys,
        parts[2].reshape(*passed.shape[:2], *heads),
        jnp.exp(-jnp.exp(weights["linear_attn.A_log"]) * soft),
        1 / (1 + jnp.exp(-b)),
    )


def _of_unit_length(x: Array) -> Array:
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + _LEAST)


def _of_value_heads(about: GatedDelta, x: Array) -> Array:
    """Return [R,N,Hv,Dk] for key heads [R,N,Hk,Dk], repeated for the value heads that share one."""
    times = about.value_heads // about.key_heads
    return jnp.tile(x, (1, 1, times, 1)) if about.tiled else jnp.repeat(x, times, 2)


def _step(states: Array, token: DeltaTokens) -> Array:
    """Return states [R,Hv,Dk,Dv] after one token of each row."""
    keys = token.keys[..., None]
    states = states * token.decay[..., None, None]
    change = (token.values - (states * keys).sum(-2)) * token.beta[..., None]
    return states + keys * change[..., None, :]


def _read(states: Array, token: DeltaTokens) -> Array:
    return (states * token.queries[..., None]).sum(-2)


def along_chains(states: Array, tokens: DeltaTokens, real: Array) -> tuple[Array, Array]:
    """Return float32[R,N,Hv,Dv], the outputs of nodes of chains, and the states after the last that
    are `real`, bool[R,N].
    """

    def once(states: Array, given: tuple[DeltaTokens, Array]) -> tuple[Array, Array]:
        token, there = given
        after = jnp.where(there[:, None, None, None], _step(states, token), states)
        return after, _read(after, token)

    last, found = lax.scan(once, states, (tokens.by_node(), real.swapaxes(0, 1)))
    return found.swapaxes(0, 1), last


def along_trees(states: Array, tokens: DeltaTokens, parents: Array) -> Array:
    """Return float32[R,N,Hv,Dv], the outputs of nodes with these parents [R,N] (below 0: none):
    each state is computed from its parent's, and all are kept until the last node.
    """
    rows, nodes = parents.shape
    every = jnp.zeros((nodes + 1, *states.shape), states.dtype).at[0].set(states)
    each = jnp.arange(rows)

    def once(every: Array, given: tuple[DeltaTokens, Array, Array]) -> tuple[Array, Array]:
        token, parent, number = given
        after = _step(every[jnp.maximum(parent + 1, 0), each], token)
        return every.at[number].set(after), _read(after, token)

    numbers = jnp.arange(1, nodes + 1)
    _, found = lax.scan(once, every, (tokens.by_node(), parents.swapaxes(0, 1), numbers))
    return found.swapaxes(0, 1)


def along_path(states: Array, tokens: DeltaTokens, kept: Array, ends: Array) -> tuple[Array, Array]:
    """Return the states after the nodes bool[R,N] of a path, and after the last of `ends`."""

    def once(
        held: tuple[Array, Array], given: tuple[DeltaTokens, Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        states, copy = held
        token, there, full = (given[0], *(each[:, None, None, None] for each in given[1:]))
        states = jnp.where(there, _step(states, token), states)
        return (states, jnp.where(full, states, copy)), None

    given = tokens.by_node(), kept.swapaxes(0, 1), ends.swapaxes(0, 1)
    return lax.scan(once, (states, states), given)[0]


class RecurrentNodes(NamedTuple):
    """The nodes of R rows of N; real: bool[R,N] those that exist, of rows that are decided here."""

    about: Recurrent
    windows: Windows
    parents: Array
    real: Array


@dataclass(frozen=True)
class RecurrentStep:
    """A step over states as they were before it.

    chain  whether the nodes are chains that stay
    """

    nodes: RecurrentNodes
    tables: RecurrentTables
    chain: bool

    def read(self, layer: Any, weights: Params, brought: Brought) -> tuple[Array, Brought]:
        """Implement recurrent.Recur."""
        nodes, tables = self.nodes, self.tables
        if tables.matrices is None:
            kernel, bias = weights["conv"], weights.get("conv.bias")
            sums = nodes.windows.sums(tables.windows[layer], brought.mixed, kernel, bias)
            return sums, brought
        tokens, before = self._tokens(layer, weights, brought), self._before(layer)
        if self.chain:
            found, after = along_chains(before, tokens, nodes.real)
            return found, brought._replace(after=after)
        return along_trees(before, tokens, nodes.parents), brought

    def advanced(
        self,
        weights: list[Params],
        brought: tuple[Brought, ...],
        depth: Array,
        kept: Array,
        ends: Array,
    ) -> tuple[RecurrentTables, RecurrentTables]:
        """Return the rows' states [L,R,...] after the last of their nodes bool[R,N] `kept`, a path;
        and after the last of those that are `ends`. Arbitrary for rows without such nodes.

        weights, brought  of the recurrent layers
        depth             int32[R,N]
        """
        mixed, windows = jnp.stack([each.mixed for each in brought]), self.nodes.windows
        last = [jnp.where(chosen, depth + 1, 0).argmax(1) for chosen in (kept, ends)]
        moved = [windows.behind(self.tables.windows, mixed, node) for node in last]
        if self.tables.matrices is None:
            return RecurrentTables(moved[0]), RecurrentTables(moved[1])
        made = [
            self._along(layer, *own, kept, ends)
            for layer, own in enumerate(zip(weights, brought, strict=True))
        ]
        matrices = [jnp.stack(each) for each in zip(*made, strict=True)]
        return RecurrentTables(moved[0], matrices[0]), RecurrentTables(moved[1], matrices[1])

    def _along(
        self, layer: int, weights: Params, brought: Brought, kept: Array, ends: Array
    ) -> tuple[Array, Array]:
        if brought.after is not None:  # Chunks need no copies.
            return brought.after, brought.after
        tokens = self._tokens(layer, weights, brought)
        return along_path(self._before(layer), tokens, kept, ends)

    def _before(self, layer: Any) -> Array:
        assert self.tables.matrices is not None
        return self.tables.matrices[layer][self.nodes.windows.slot]

    def _tokens(self, layer: Any, weights: Params, brought: Brought) -> DeltaTokens:
        about, windows = self.nodes.about, self.nodes.windows
        assert isinstance(about, GatedDelta) and brought.gates is not None
        kernel = weights["conv1d"]
        sums = windows.sums(self.tables.windows[layer], brought.mixed, kernel, None)
        return tokens_of(about, weights, sums, brought.gates)
