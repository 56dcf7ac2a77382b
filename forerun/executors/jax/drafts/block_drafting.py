"""What a block drafter does at the end of a round: store the accepted nodes' features, propose one
block below every row's new end, and grow the best paths of its marginals.

    round   forward -> choose -> walk -> commit -> enter -> propose -> grow -> record

The trees are those of forerun.speculative.draft_tree.block_draft as far as a full tree holds them:
no child is worth more than its path, so the best `width` squared nodes of each level are enough
unless more draft tokens than that are verified.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.jax.drafts.block import BlockNetwork
from forerun.executors.jax.drafts.drafting import (
    NOWHERE,
    AcceptedStep,
    Noise,
    children,
    recorded,
)
from forerun.executors.jax.network.attention import Layer, Past, Tree, attend
from forerun.executors.jax.network.decoder import Numbered
from forerun.executors.jax.network.kv import DraftArrays, of_nodes, slots_of
from forerun.executors.jax.network.weights import Params


class JaxBlockDrafting(NamedTuple):
    """The block drafter's part of a round, and of passes beside it (block_passes.py)."""

    network: BlockNetwork
    page_size: int

    def work(
        self, params: Params, held: DraftArrays, accepted: AcceptedStep, width: int, levels: int
    ) -> tuple[DraftArrays, Array]:
        """Store the accepted paths' features, propose blocks below their ends and grow full trees;
        arguments and result as JaxDrafting.work.
        """
        given, (kept, count) = accepted.given, accepted.followed
        position = given.kv_len[:, None] + given.depth
        held = self.enter(params, held, accepted.streams, (given.table, position, kept))
        _, roots = accepted.end(kept)
        read = self.propose(params, held, roots[:, 0], given.table, given.kv_len + count)
        noise = Noise.of_rows(given, count)
        return held, recorded(self._grow(params, read[:, :levels], noise, width))

    def enter(
        self,
        params: Params,
        held: DraftArrays,
        features: Array,
        where: tuple[Array, Array, Array],
    ) -> DraftArrays:
        """Return the drafter's arrays with keys and values of features [R,N,F*H] in its pages.

        where  page tables int32[R,W], positions int32[R,N], and bool[R,N] which are stored
        """
        table, position, stored = where
        made = self.network.kept(params, features, position)
        slots = jnp.where(stored, slots_of(table, position, self.page_size), NOWHERE).reshape(-1)
        keys, values = (
            into.at[:, slots].set(of_nodes(new), mode="drop")
            for into, new in zip((held.keys, held.values), made, strict=True)
        )
        return held._replace(keys=keys, values=values)

    def propose(
        self, params: Params, held: DraftArrays, roots: Array, table: Array, kv_len: Array
    ) -> Array:
        """Return what the output head reads, [R,depth,H], of one block below each of roots
        int32[R], behind kv_len int32[R] tokens in the drafter's pages.
        """
        about, order = self.network.about, jnp.arange(self.network.about.places)
        position = kv_len[:, None] + order
        past = Past(held.keys, held.values, table, kv_len)
        seen = order[:, None] >= order if about.causal else jnp.ones((about.places,) * 2, bool)
        tree = Tree(jnp.broadcast_to(seen, (len(roots), *seen.shape)), position)

        def of_layer(layer: Numbered, queries: Array, keys: Array, values: Array) -> Array:
            return attend(queries, (keys, values), past, tree, Layer(*layer, self.page_size))

        return self.network.block(params, roots, position, of_layer)[:, self.network.first :]

    def _grow(
        self, params: Params, read: Array, noise: Noise, width: int
    ) -> list[tuple[Array, Array, Array]]:
        """Return tokens, parents and values, [R,.] each, of every level of full trees.

        read  [R,levels,H]; noise: of the first level
        """
        rows, levels, wide = read.shape
        logits = self.network.logits(params, read.reshape(-1, wide))
        seeds, positions, temperature = (jnp.repeat(part, levels, -1) for part in noise)
        noise = Noise(seeds, positions + jnp.tile(jnp.arange(levels), rows), temperature)
        found = children(logits, params["draft"]["ids"], noise, width)
        tokens, values = (part.reshape(rows, levels, width) for part in found)
        values, begin = jnp.minimum(values, 0.0), 0
        grown = [(tokens[:, 0], jnp.full((rows, width), -1, jnp.int32), values[:, 0])]
        for level in range(1, levels):
            above = grown[-1][2]
            paths = (above[..., None] + values[:, level, None]).reshape(rows, -1)
            worth, order = lax.top_k(paths, width * width)
            below = jnp.take_along_axis(tokens[:, level], order % width, 1)
            grown.append((below, (begin + order // width).astype(jnp.int32), worth))
            begin += above.shape[1]
        return grown
