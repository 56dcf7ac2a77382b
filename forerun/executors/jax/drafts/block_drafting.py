"""The work of a block drafter at a round's end: store the accepted nodes' features, propose one
block below every row's new end, and grow the best paths of its marginals, or of what these become
below the tokens above (pairs.py).

    round   forward -> choose -> walk -> commit -> enter -> propose -> grow -> record

The trees are those of forerun.speculative.draft_tree (block_draft, path_draft) as far as a full
tree holds them: no child is worth more than its path, so the best `width` squared nodes of each
level are enough unless more draft tokens than that are verified.

Passes that the host runs, for what rounds do not do themselves:

    enter  (R, N)       features of chains that became permanent: their keys and values into pages
    block  (R, k)       one block below each root: candidates of every depth
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.jax.drafts.block import BlockNetwork
from forerun.executors.jax.drafts.drafting import (
    NOWHERE,
    AcceptedStep,
    children,
    log_normaliser,
    ranked,
    recorded,
)
from forerun.executors.jax.drafts.pairs import JaxPairs, calibrated
from forerun.executors.jax.network.attention import Layer, Past, Tree, attend
from forerun.executors.jax.network.kv import DraftArrays, State, of_nodes, slots_of
from forerun.executors.jax.network.weights import Params
from forerun.executors.jax.rounds.accept import NodeSampling
from forerun.executors.jax.rounds.batches import Bucket
from forerun.executors.packed import Shapes, views_of
from forerun.interface.draft_model import CANDIDATES
from forerun.speculative.tree import full_size

_Found = tuple[tuple[Array, Array], Array | None, Array | None]
"""Children of n nodes, target ids and values [R,n or 1,width]; confidence [R,n]; state [R,n,r]."""


def enter_shapes(size: Bucket, tables: tuple[int, int]) -> Shapes:
    """Return the parts of the int32 vector that `enter` reads: by row kv_len; by node `stream`, the
    row of the streams with its features, and `real`, 1 if the node exists; page tables of this
    shape (inputs.py).
    """
    nodes = dict.fromkeys(("stream", "real"), (size.rows, size.nodes))
    return {"kv_len": (size.rows,), **nodes, "tables": (size.rows, *tables)}


def block_shapes(rows: int, tables: tuple[int, int]) -> Shapes:
    """Return the parts of the int32 vector that `block` reads: by row kv_len, root token and page
    tables of this shape (inputs.py).
    """
    return {"kv_len": (rows,), "root": (rows,), "tables": (rows, *tables)}


class JaxBlockDrafting(NamedTuple):
    """The block drafter's work in a round, and its other passes.

    tables  shape of a row's page tables
    """

    network: BlockNetwork
    page_size: int
    tables: tuple[int, int]

    def work(
        self, params: Params, held: DraftArrays, accepted: AcceptedStep, width: int, levels: int
    ) -> tuple[DraftArrays, Array]:
        """Store the accepted paths' features, propose blocks below their ends and build full trees;
        arguments and result as JaxDrafting.work.
        """
        inputs, (on_path, count) = accepted.inputs, accepted.followed
        position = inputs.kv_len[:, None] + inputs.depth
        table = inputs.tables[:, 0]
        held = self.store_features(params, held, accepted.streams, (table, position, on_path))
        _, roots = accepted.end(on_path)
        read = self.propose(params, held, roots[:, 0], table, inputs.kv_len + count)
        noise = inputs.behind(count)
        return held, self._grow(params, (roots, read[:, :levels]), noise, width)

    def store_features(
        self,
        params: Params,
        held: DraftArrays,
        features: Array,
        where: tuple[Array, Array, Array],
    ) -> DraftArrays:
        """Return the drafter's arrays with keys and values of features [R,N,F*H] in its pages.

        where  page tables int32[R,W], positions int32[R,N], and bool[R,N] which to store
        """
        table, position, stored = where
        pairs = self.network.target_keys_values(params, features, position)
        slots = jnp.where(stored, slots_of(table, position, self.page_size), NOWHERE).reshape(-1)
        keys, values = (
            into.at[:, slots].set(of_nodes(new), mode="drop")
            for into, new in zip((held.keys, held.values), pairs, strict=True)
        )
        return held._replace(keys=keys, values=values)

    def propose(
        self, params: Params, held: DraftArrays, roots: Array, table: Array, kv_len: Array
    ) -> Array:
        """Return the output head's input, [R,depth,H], for one block below each of roots int32[R],
        after kv_len int32[R] tokens in the drafter's pages.
        """
        about, order = self.network.about, jnp.arange(self.network.about.places)
        position = kv_len[:, None] + order
        past = Past(held.keys, held.values, table, kv_len, self.page_size)
        seen = order[:, None] >= order if about.causal else jnp.ones((about.places,) * 2, bool)
        tree = Tree(jnp.broadcast_to(seen, (len(roots), *seen.shape)), position)

        def of_layer(layer: Layer, queries: Array, keys: Array, values: Array) -> Array:
            return attend(queries, (keys, values), past, tree, layer)

        return self.network.block(params, roots, position, of_layer)[:, self.network.first :]

    def _grow(
        self, params: Params, blocks: tuple[Array, Array], noise: NodeSampling, width: int
    ) -> Array:
        """Return the record of full trees: each level's nodes have the best `width` children, and
        the best `width` squared of all of these are expanded further.

        blocks  int32[R,1] roots, and [R,levels,H] the head's input; noise: of the first level
        """
        tokens, read = blocks
        rows, levels, wide = read.shape
        logits = self.network.logits(params, read.reshape(-1, wide))
        below = self._below(params, logits, read, noise, width)
        values, state, grown = jnp.zeros((rows, 1), jnp.float32), None, []
        confident: list[Array] = []
        for level in range(levels):
            found, sure, state = below(level, tokens, state)
            paths = values[..., None] + jnp.minimum(found[1], 0.0)
            most = width ** min(level + 1, 2)
            values, order = lax.top_k(paths.reshape(rows, -1), most)
            tokens = jnp.broadcast_to(found[0], paths.shape).reshape(rows, -1)
            tokens = jnp.take_along_axis(tokens, order, 1)
            above = full_size(width, level - 1) if level else -1
            grown.append((tokens, (above + order // width).astype(jnp.int32), values))
            if state is not None:
                state = jnp.take_along_axis(state, (order // width)[..., None], 1)
            confident += [] if sure is None else [sure]
        return recorded(grown, confident)

    def _below(
        self, params: Params, logits: Array, read: Array, noise: NodeSampling, width: int
    ) -> Callable[..., "_Found"]:
        """Return a function that finds the best `width` children of a level's nodes: (level, target
        ids of the nodes int32[R,n], their state) -> children, confidence and the children's state.

        logits  float32[R*levels,Vd] of the places
        """
        rows, levels, _ = read.shape
        weights, about = params["draft"], self.network.about
        if about.algorithm == "dflash":
            # The best of each depth, whatever is above them.
            every = noise.repeated(levels).further(jnp.tile(jnp.arange(levels), rows))
            found = children(logits, weights["ids"], every, width)
            tokens, values = (part.reshape(rows, levels, 1, width) for part in found)
            return lambda level, *_: ((tokens[:, level], values[:, level]), None, None)
        best, which = lax.top_k(logits, min(about.top_k or max(CANDIDATES, width), about.vocab))
        log_probs = best - log_normaliser(logits)[:, None]
        pairs = JaxPairs(
            about,
            weights["pairs"],
            which.reshape(rows, levels, -1),
            log_probs.reshape(rows, levels, -1),
            read.astype(jnp.float32),
        )
        hot = noise.temperature > 0

        def of_pairs(level: int, tokens: Array, state: Array | None) -> _Found:
            found = pairs.below(level, tokens, state)
            count, shape = tokens.shape[1], found.values.shape
            ids = jnp.broadcast_to(weights["ids"][pairs.which[:, level, None]], shape)
            each = noise.repeated(count).further(level)
            flat = found.values.reshape(-1, shape[2])
            chosen, values = ranked(ids.reshape(flat.shape), flat, each, width)
            chosen, values = (part.reshape(rows, count, width) for part in (chosen, values))
            if found.confidence is not None:
                chances = pairs.weights["chances"][:, :, level]
                values = calibrated(chances, found.confidence, values, hot)
            return (chosen, values), found.confidence, found.state

        return of_pairs

    # --- passes that the host runs: what rounds do not do themselves ---

    def enter(self, params: Params, state: State, whole: Array, *, size: Bucket) -> State:
        """Return the state with keys and values of accepted positions [R,N] written into the
        drafter's pages.

        whole  int32[total] vector of `enter_shapes(size, tables)`; padding is written nowhere
        """
        held = state.drafting
        given = views_of(whole, enter_shapes(size, self.tables))
        position = given["kv_len"][:, None] + jnp.arange(size.nodes)
        where = given["tables"][:, 0], position, given["real"] > 0
        held = self.store_features(params, held, held.streams[given["stream"]], where)
        return state._replace(draft=held)

    def block(self, params: Params, state: State, whole: Array, *, size: Bucket) -> Array:
        """Return the candidates of one block below each of R = size.rows roots,
        int32[R,depth,2*k+h]: draft ids, the bits of float32 log-probabilities (nats), best first,
        and the bits of the h elements that the output head reads, if tokens depend on those above;
        k = size.nodes.

        whole  int32 vector of `block_shapes`. Changes nothing.
        """
        held, network = state.drafting, self.network
        given = views_of(whole, block_shapes(size.rows, self.tables))
        where = given["root"], given["tables"][:, 0], given["kv_len"]
        read = self.propose(params, held, *where)
        logits = network.logits(params, read.reshape(-1, read.shape[-1]))
        best, ids = lax.top_k(logits, size.nodes)
        log_probs = (best - log_normaliser(logits)[:, None]).reshape(*read.shape[:2], -1)
        numbers = [log_probs, read[..., : 0 if network.about.algorithm == "dflash" else None]]
        bits = (lax.bitcast_convert_type(each.astype(jnp.float32), jnp.int32) for each in numbers)
        return jnp.concatenate([ids.reshape(log_probs.shape), *bits], -1)
