"""The work of a draft network at the end of a round: follow the target, build the next trees.

    round   forward -> choose -> walk -> commit -> extend -> level 1 -> level 2 -> ... -> record

The arithmetic is that of forerun.drafters.model_drafter and forerun.speculative.draft_tree in fixed
shapes: the host's branches become sorts, gathers and masks here.

The extension runs the network over all nodes of the step, in the target's own tree. If it reads
features, node n pairs its own with the target's choice there, so the accepted path contains
exactly the tokens that follow (EAGLE, arXiv 2401.15077, section 4.1). If it reads tokens alone,
each node has its own token, and the target's token at the path's end, the next root, is one more
node, which attends to the path. Only that path is written to pages. The nodes of a level attend to
the cached prefix, the accepted path and their ancestors, whose keys and values stay in the program:
drafted ones are never written.

A network that reads the target's pages runs that root alone, with the features of the path's end,
and then draft tokens at the same position; it writes nothing.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.executors.jax.drafts.draft_network import DraftNetwork, Ran
from forerun.executors.jax.network.attention import (
    Layer,
    Pages,
    Pasts,
    Tree,
    attend,
    pasts_of,
)
from forerun.executors.jax.network.decoder import Attend
from forerun.executors.jax.network.kv import (
    DraftArrays,
    NetworkSizes,
    after,
    of_nodes,
    slots_of,
)
from forerun.executors.jax.network.weights import Params
from forerun.executors.jax.rounds.accept import NodeSampling
from forerun.executors.jax.rounds.inputs import Inputs
from forerun.executors.jax.rounds.noise import approximate, words_of
from forerun.interface.draft_model import CANDIDATES

NOWHERE = np.int32(np.iinfo(np.int32).max)
"""An index beyond every array: writes to it are dropped."""


class AcceptedStep(NamedTuple):
    """A round after its commit.

    choices   int32[R,N] of all nodes
    on_path   bool[R,N] nodes on an accepted path
    streams   [R,N,F*H] features of the nodes
    pages     the target's
    """

    inputs: Inputs
    choices: Array
    on_path: Array
    streams: Array
    pages: Pages = ((), ())

    @property
    def followed(self) -> tuple[Array, Array]:
        """Return the permanent nodes bool[R,N] of rows that the draft model follows, and their
        number int32[R].
        """
        on_path = self.on_path & (self.inputs.draft_slot >= 0)[:, None]
        return on_path, on_path.sum(1, dtype=jnp.int32)

    def end(self, on_path: Array) -> tuple[Array, Array]:
        """Return int32[R], the number of the deepest of the nodes `on_path` bool[R,N] of each row,
        and int32[R,1], the target's choice there, which is the next root; 0 and its choice if there
        is no such node.
        """
        last = jnp.where(on_path, self.inputs.depth + 1, 0).argmax(1)
        return last, jnp.maximum(jnp.take_along_axis(self.choices, last[:, None], 1), 0)


class _Roots(NamedTuple):
    """The roots of the next trees: the end of every row's extension.

    read, hidden  [R,.] input of the output head, and of a next step
    position      int32[R] of the first level's nodes
    accepted      int32[R] accepted nodes of this step
    path          the extension's result, its positions int32[R,N], and bool[R,N] the part that the
                  trees attend to
    """

    read: Array
    hidden: Array
    position: Array
    accepted: Array
    path: tuple[Ran, Array, Array]


class _Growing(NamedTuple):
    """Trees while they are built level by level; T = N of the extension, then `width` for every
    level that runs.

    tokens, values  [R,width**2] of the newest level; the first one's are padded by -inf
    hidden   [R,width,H] input of a next step, of the nodes that ran last
    seen     bool[R,width,T] the nodes that these attend to
    keys     keys and values [layers,R,T,G,E]
    """

    tokens: Array
    values: Array
    hidden: Array
    seen: Array
    keys: tuple[Array, Array]

    @classmethod
    def of(
        cls, first: tuple[Array, Array, Array], roots: _Roots, shape: tuple[int, int]
    ) -> "_Growing":
        """Return trees of the roots and the level below them."""
        (width, levels), (path, _, on_path) = shape, roots.path
        more, wide = (levels - 1) * width, width * width - width
        seen = jnp.pad(on_path, ((0, 0), (0, more)))[:, None]
        room = ((0, 0), (0, 0), (0, more), (0, 0), (0, 0))
        return cls(
            jnp.pad(first[0], ((0, 0), (0, wide))),
            jnp.pad(first[2], ((0, 0), (0, wide)), constant_values=-jnp.inf),
            jnp.repeat(roots.hidden[:, None], width, 1),
            jnp.broadcast_to(seen, (len(on_path), width, seen.shape[-1])),
            (jnp.pad(path.keys, room), jnp.pad(path.values, room)),
        )


class _Extended(NamedTuple):
    """The nodes of an extension: the N nodes of the step, and the next root if it runs as a node.

    tokens, position  int32[R,N']
    streams           [R,N',.] their features; of width 0 if none are read
    seen              bool[R,N',N'] the nodes that each attends to
    path              bool[R,N'] the permanent ones
    last              int32[R] the last of those
    """

    tokens: Array
    position: Array
    streams: Array
    seen: Array
    path: Array
    last: Array

    @classmethod
    def of(
        cls, accepted: AcceptedStep, on_path: Array, count: Array, sizes: NetworkSizes
    ) -> "_Extended":
        """Return the extension of permanent nodes, on_path bool[R,N], of which count int32[R] are
        true.
        """
        inputs = accepted.inputs
        position = inputs.kv_len[:, None] + inputs.depth
        seen = inputs.trees.seen
        (last, next_root), streams = accepted.end(on_path), accepted.streams
        if not (sizes.runs_root or sizes.borrows):
            return cls(jnp.maximum(accepted.choices, 0), position, streams, seen, on_path, last)
        if sizes.borrows:
            beside = jnp.take_along_axis(streams, last[:, None, None], 1)
            end, own = (inputs.kv_len + count)[:, None], jnp.ones((len(count), 1, 1), bool)
            return cls(next_root, end, beside, own, ~own[:, 0], jnp.zeros_like(last))
        path = jnp.pad(on_path, ((0, 0), (0, 1)), constant_values=True)
        before = jnp.pad(seen, ((0, 0), (0, 0), (0, 1)))
        return cls(
            jnp.concatenate([inputs.trees.tokens, next_root], 1),
            jnp.concatenate([position, (inputs.kv_len + count)[:, None]], 1),
            jnp.zeros((*path.shape, 0), streams.dtype),
            jnp.concatenate([before, path[:, None]], 1),
            path,
            jnp.full_like(last, on_path.shape[1]),
        )


class JaxDrafting(NamedTuple):
    """The network's work in a round. nodes: M of a step; slots: of pages."""

    network: DraftNetwork
    page_size: int
    slots: int
    nodes: int

    def work(
        self, params: Params, held: DraftArrays, accepted: AcceptedStep, width: int, levels: int
    ) -> tuple[DraftArrays, Array]:
        """Extend the draft network by the accepted paths and build full trees below their ends.

        held     the draft's arrays, read and replaced
        accepted  the round's choices and accepted nodes
        width    children per node, and nodes expanded per level
        levels   of draft tokens, at least one

        Returns the new arrays and a record int32[3*R*K], K = full_size(width, levels): tokens,
        parents and bits of values. Rows with draft_slot -1 store nothing.
        """
        roots, pasts, target = self._extend(params, held, accepted)
        record = recorded(self._grow(params, accepted.inputs, roots, pasts, (width, levels)))
        # The trees read the arrays before this step's writes.
        target = after(target, record[-1:])
        held = committed(held, roots.path[0], target)
        follows = accepted.inputs.draft_slot >= 0
        place = jnp.where(follows, self.nodes + accepted.inputs.draft_slot, NOWHERE)
        return held._replace(outputs=held.outputs.at[place].set(roots.hidden, mode="drop")), record

    def pasts(self, held: DraftArrays, pages: Pages, tables: Array, kv_len: Array) -> Pasts:
        """Return the cached keys and values that the network's layers read for rows with these page
        tables and lengths: its own pages, or the target's, `pages`, if it reads those.
        """
        if not self.network.sizes.borrows:
            return pasts_of(((held.keys,), (held.values,)), tables, kv_len, self.page_size)
        return pasts_of(pages, tables, kv_len, self.page_size, self.network.sizes.borrows)

    def attention(
        self, pasts: Pasts, tree: Tree, held: tuple[Array, Array] | None = None, begin: Any = 0
    ) -> Attend:
        """Return the attention of a draft network's layer: over the cached prefix and the pass's
        own nodes. A layer that reads the target's pages has no keys and values of its own, and its
        number and kind are those of the layer that it reads.

        held  keys and values [layers,R,T,G,E] of nodes that ran before; the own ones are inserted
              from index `begin` on
        """

        def of_layer(layer: Layer, queries: Array, *fresh: Array) -> Array:
            if fresh and held is not None:
                place = (0, begin, 0, 0)
                fresh = tuple(
                    lax.dynamic_update_slice(before[layer.number], own, place)
                    for before, own in zip(held, fresh, strict=True)
                )
            return attend(queries, fresh, pasts[layer.kind], tree, layer)

        return of_layer

    def _extend(
        self, params: Params, held: DraftArrays, accepted: AcceptedStep
    ) -> tuple[_Roots, Pasts, Array]:
        """Run every node. Returns the roots of the next trees, the cached keys and values that
        these read, and int32[R,N'], the slots of permanent entries: accepted nodes of rows that are
        followed.
        """
        inputs, network = accepted.inputs, self.network
        on_path, count = accepted.followed
        cached = inputs.kv_len + count * bool(network.sizes.borrows)
        pasts = self.pasts(held, accepted.pages, inputs.tables, cached)
        extended = _Extended.of(accepted, on_path, count, network.sizes)
        hidden = network.enter(params, extended.streams)
        tree = Tree(extended.seen, extended.position)
        of_layer = self.attention(pasts, tree)
        ran = network.run(params, extended.tokens, hidden, extended.position, of_layer)
        follows = inputs.draft_slot >= 0
        place = jnp.where(follows, self.nodes + inputs.draft_slot, NOWHERE)
        slots = slots_of(inputs.tables[:, 0], extended.position, self.page_size)
        target = jnp.where(extended.path, slots, NOWHERE)
        if network.sizes.runs_root:
            target = target.at[:, -1].set(jnp.where(follows, self.slots + place, NOWHERE))
        last = extended.last[:, None, None]
        read, output = (jnp.take_along_axis(x, last, 1)[:, 0] for x in (ran.read, ran.output))
        position = inputs.kv_len + count + network.sizes.runs_root
        path = ran, extended.position, extended.path
        return _Roots(read, output, position, count, path), pasts, target

    def _grow(
        self, params: Params, inputs: Inputs, roots: _Roots, pasts: Pasts, shape: tuple[int, int]
    ) -> list[tuple[Array, Array, Array]]:
        """Return tokens, parents and values, [R,.] each: of the first level, then of all others."""
        width, levels = shape
        noise = inputs.behind(roots.accepted)
        tokens, values = self._children(params, roots.read, noise, width)
        first = tokens, jnp.full_like(tokens, -1), jnp.minimum(values, 0.0)
        if levels == 1:
            return [first]
        noise = noise.repeated(width)

        def level(growing: _Growing, number: Array) -> tuple[_Growing, tuple[Array, ...]]:
            """Run the best nodes of the level above; gives the level below them."""
            chosen = jnp.sort(lax.top_k(growing.values, width)[1], -1)
            seen = jnp.take_along_axis(growing.seen, (chosen // width)[..., None], 1)
            growing, ran = self._run(params, growing, (chosen, seen), (roots, pasts), number)
            read = ran.read.reshape(-1, ran.read.shape[-1])
            tokens, values = self._children(params, read, noise.further(number), width)
            tokens, values = (part.reshape(-1, width * width) for part in (tokens, values))
            base = jnp.take_along_axis(growing.values, chosen, 1)
            values = jnp.repeat(base, width, 1) + jnp.minimum(values, 0.0)
            begin = jnp.where(number == 1, 0, width + (number - 2) * width * width)
            parents = (begin + jnp.repeat(chosen, width, 1)).astype(jnp.int32)
            growing = growing._replace(tokens=tokens, values=values)
            return growing, (tokens, parents, values)

        start = _Growing.of(first, roots, shape)
        _, grown = lax.scan(level, start, jnp.arange(1, levels))
        rest = [jnp.moveaxis(part, 0, 1).reshape(part.shape[1], -1) for part in grown]
        return [first, (rest[0], rest[1], rest[2])]

    def _run(
        self,
        params: Params,
        growing: "_Growing",
        which: tuple[Array, Array],
        below: tuple[_Roots, Pasts],
        number: Array,
    ) -> tuple["_Growing", Ran]:
        """Run nodes chosen int32[R,width] of the newest level, which attend to their ancestors."""
        (chosen, seen), (roots, pasts) = which, below
        rows, width = chosen.shape
        above = roots.path[1]
        path, rest = above.shape[1], growing.seen.shape[2] - above.shape[1]
        own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (rows, width, width))
        begin = path + (number - 1) * width
        seen = lax.dynamic_update_slice(seen, own, (0, 0, begin))
        hidden = jnp.take_along_axis(growing.hidden, (chosen // width)[..., None], 1)
        token = jnp.take_along_axis(growing.tokens, chosen, 1)
        further = 0 if self.network.sizes.borrows else number - 1
        position = jnp.broadcast_to((roots.position + further)[:, None], token.shape)
        later = roots.position[:, None] + jnp.arange(rest) // width
        tree = Tree(seen, position, jnp.concatenate([above, later], 1))
        of_layer = self.attention(pasts, tree, growing.keys, begin)
        ran = self.network.run(params, token, hidden, position, of_layer)
        keys = tuple(
            lax.dynamic_update_slice(held, new, (0, 0, begin, 0, 0))
            for held, new in zip(growing.keys, (ran.keys, ran.values), strict=True)
        )
        return growing._replace(hidden=ran.output, seen=seen, keys=(keys[0], keys[1])), ran

    def _children(
        self, params: Params, read: Array, noise: NodeSampling, width: int
    ) -> tuple[Array, Array]:
        logits = self.network.logits(params, read)
        return children(logits, params["draft"]["ids"], noise, width)


def recorded(
    grown: list[tuple[Array, Array, Array]], confident: list[Array] | None = None
) -> Array:
    """Return a record int32[record_size] of trees: tokens, parents and bits of values, [R,.] of
    each level; then bits of confidences [R,.] below the root and each level but the last, if any.
    """
    whole = [jnp.concatenate(part, 1) for part in zip(*grown, strict=True)]
    if confident:
        known = jnp.concatenate(confident, 1)
        whole.append(jnp.pad(known, ((0, 0), (0, 1 + whole[2].shape[1] - known.shape[1]))))
    whole[2:] = [lax.bitcast_convert_type(part, jnp.int32) for part in whole[2:]]
    return jnp.concatenate([part.reshape(-1) for part in whole])


def children(logits: Array, ids: Array, noise: NodeSampling, width: int) -> tuple[Array, Array]:
    """Return the best children of n nodes, best first: target ids int32[n,width] and values
    float32[n,width] in nats, -inf if a logit is NaN.

    logits  float32[n,Vd]
    ids     int32[Vd] target id of every draft id

    At T > 0 the noise of the child's position, which the target will use too, reorders the
    CANDIDATES likeliest (arXiv 2408.07978); it need not be exact here.
    """
    normaliser = log_normaliser(logits)[:, None]
    hot = noise.temperature > 0

    def greedy() -> tuple[Array, Array]:
        best, which = lax.top_k(logits, width)
        return ids[which], best - normaliser

    def sampled() -> tuple[Array, Array]:
        best, which = lax.top_k(logits, min(max(CANDIDATES, width), logits.shape[1]))
        return ranked(ids[which], best - normaliser, noise, width)

    tokens, values = lax.cond(hot.any(), sampled, greedy)
    return tokens, jnp.where(jnp.isnan(values), -jnp.inf, values)


def ranked(tokens: Array, values: Array, noise: NodeSampling, width: int) -> tuple[Array, Array]:
    """Return the best `width` of each node's candidates, as `children`; target ids tokens
    int32[n,K] and log-probabilities values float32[n,K].
    """
    hot = noise.temperature > 0
    seeds = jnp.broadcast_to(noise.seeds[..., None], (2, *tokens.shape))
    words = words_of(seeds, jnp.broadcast_to(noise.positions[:, None], tokens.shape), tokens)
    scores = values / jnp.where(hot, noise.temperature, 1.0)[:, None] + approximate(words)
    values = jnp.where(hot[:, None], scores - log_normaliser(scores)[:, None], values)
    best, order = lax.top_k(jnp.where(jnp.isnan(values), -jnp.inf, values), width)
    return jnp.take_along_axis(tokens, order, 1), best


def log_normaliser(logits: Array) -> Array:
    """Return float32[n], log(sum(exp(logits))) in nats over the last axis of logits [n,V], maximum
    subtracted.
    """
    most = logits.max(-1)
    total: Array = most + jnp.log(jnp.exp(logits - most[:, None]).sum(-1))
    return total


def committed(held: DraftArrays, ran: Ran, target: Array) -> DraftArrays:
    """Return the draft's arrays with a pass's keys and values written at slots target int32[R,N];
    NOWHERE is not written.
    """
    keys, values = (
        into.at[:, target.reshape(-1)].set(of_nodes(new), mode="drop")
        for into, new in ((held.keys, ran.keys), (held.values, ran.values))
    )
    return held._replace(keys=keys, values=values)
