"""The recurrent states of one step: what its nodes read of them, and what they are afterwards."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from forerun.executors.jax.network.delta import (
    DeltaTokens,
    along_chains,
    along_path,
    along_trees,
    tokens_of,
)
from forerun.executors.jax.network.recurrent import Brought, RecurrentTables, Windows
from forerun.executors.jax.network.weights import Params
from forerun.networks.layer_spec import GatedDelta, Recurrent


class RecurrentNodes(NamedTuple):
    """The nodes of R rows of N; real: bool[R,N] those that exist, of rows that are decided here."""

    about: Recurrent
    windows: Windows
    parents: Array
    real: Array


@dataclass(frozen=True)
class RecurrentStep:
    """A step over states as they were before it.

    chain  nodes are chains that stay
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
        """Return the rows' states [L,R,...] behind the last of their nodes bool[R,N] `kept`, a
        path; and behind the last of those `ends`. Of rows without such nodes anything.

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
        if brought.after is not None:  # Nothing is copied behind chunks.
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
