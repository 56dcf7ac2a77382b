"""Passes of a draft network that the host runs: what rounds do not do themselves.

    extend      (R, N)       chains that became permanent: prompts, rows that the host decided
    expand      (R, N, D)    draft tokens, at most D below their roots
    candidates  (FEW, k)     the most probable tokens of nodes of the last pass

The first two take the state, donated, and return it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.jax.drafts.drafting import NOWHERE, JaxDrafting, committed, log_normaliser
from forerun.executors.jax.network.attention import Tree
from forerun.executors.jax.network.kv import DraftArrays, State, after, slots_of
from forerun.executors.jax.network.weights import Params
from forerun.executors.jax.rounds.batches import Bucket
from forerun.executors.packed import Shapes, views_of, zeros_of
from forerun.types import AnyArray, Ints

FEW = 8
"""Nodes whose logits or candidates are copied to the host in one dispatch."""

DEPTHS = (4, 16, 64)
"""The most draft tokens above one that the host runs, for which programs are compiled."""


def extend_shapes(size: Bucket, tables: tuple[int, int]) -> Shapes:
    """Return the parts of the int32 vector that `extend` reads. By row: kv_len; root, the row of
    `outputs` for the last node's output (and, for a network that runs roots, its keys and values).
    By node: tokens; stream, the row of its features; read, the row of `reads` to write; real, 1 if
    the node exists. A row has page tables of this shape (inputs.py).
    """
    nodes = dict.fromkeys(("tokens", "stream", "read", "real"), (size.rows, size.nodes))
    return {
        "kv_len": (size.rows,),
        "root": (size.rows,),
        **nodes,
        "tables": (size.rows, *tables),
    }


def expand_shapes(size: Bucket, tables: tuple[int, int], depth: int) -> Shapes:
    """Return the parts of the int32 vector that `expand` reads. By row: kv_len; root, the row of
    `outputs` of its root.

    By node: tokens; above, the row of `outputs` of its parent; number; depth below the first level;
    path, the numbers of the `depth` draft nodes above it, -1 = none. A row has page tables of this
    shape (inputs.py).
    """
    nodes = dict.fromkeys(("tokens", "above", "number", "depth"), (size.rows, size.nodes))
    return {
        "kv_len": (size.rows,),
        "root": (size.rows,),
        **nodes,
        "path": (size.rows, size.nodes, depth),
        "tables": (size.rows, *tables),
    }


def blank(shapes: Shapes) -> tuple[Ints, dict[str, AnyArray]]:
    """Return a zero vector int32[total] of these parts without a node, and views of the parts: rows
    to write are NOWHERE, paths -1.
    """
    whole, views = zeros_of(shapes)
    for name in ("root", "read", "number"):
        if name in views:
            views[name][:] = NOWHERE
    if "path" in views:
        views["path"][:] = -1
    return whole, views


class DraftPrograms(NamedTuple):
    """The programs as pure functions. tables: shape of a row's page tables."""

    drafting: JaxDrafting
    tables: tuple[int, int]

    @property
    def _runs_root(self) -> bool:
        return self.drafting.network.sizes.runs_root

    def extend(self, params: Params, state: State, whole: Array, *, size: Bucket) -> State:
        """Return the state after permanent nodes [R,N] ran through the draft network, with their
        keys and values in its pages, outputs of roots in `outputs`, and the head's inputs in
        `reads`.

        whole  int32[total] vector of `extend_shapes(size, tables)`
        """
        held, given = state.drafting, views_of(whole, extend_shapes(size, self.tables))
        hidden = self.drafting.network.enter(params, held.streams[given["stream"]])
        position = given["kv_len"][:, None] + jnp.arange(size.nodes)
        pages = state.keys, state.values
        pasts = self.drafting.pasts(held, pages, given["tables"], given["kv_len"])
        order = jnp.arange(size.nodes)
        seen = jnp.broadcast_to(order[:, None] >= order, (*size, size.nodes))
        attend = self.drafting.attention(pasts, Tree(seen, position))
        ran = self.drafting.network.run(params, given["tokens"], hidden, position, attend)
        target = slots_of(given["tables"][:, 0], position, self.drafting.page_size)
        target = jnp.where(given["real"] > 0, target, NOWHERE)
        last = jnp.maximum(given["real"].sum(1) - 1, 0)[:, None]
        if self._runs_root:
            apart = (order == last) & (given["root"] != NOWHERE)[:, None]
            target = jnp.where(apart, self.drafting.slots + given["root"][:, None], target)
        held = committed(held, ran, after(target, ran.read))
        output = jnp.take_along_axis(ran.output, last[..., None], 1)[:, 0]
        outputs = held.outputs.at[given["root"]].set(output, mode="drop")
        return state._replace(draft=_read(held._replace(outputs=outputs), given["read"], ran.read))

    def expand(
        self, params: Params, state: State, whole: Array, *, size: Bucket, levels: int
    ) -> State:
        """Return the state after draft nodes [R,N] ran, each of which has at most `levels` draft
        nodes above it. Their keys, values and outputs are written to the rows of draft nodes; pages
        do not change.

        whole  int32[total] vector of `expand_shapes(size, tables, levels)`
        """
        held, given = state.drafting, views_of(whole, expand_shapes(size, self.tables, levels))
        below = given["depth"] + self._runs_root
        further = 0 if self.drafting.network.sizes.borrows else below
        position = given["kv_len"][:, None] + further * jnp.ones_like(below)
        pages = state.keys, state.values
        pasts = self.drafting.pasts(held, pages, given["tables"], given["kv_len"])
        above = given["path"].reshape(size.rows, -1)
        root = given["kv_len"][:, None]
        fresh = root + self._runs_root + jnp.tile(jnp.arange(levels), size.nodes)
        own = jnp.eye(size.nodes, dtype=bool)
        seen = jnp.repeat(own, levels, 1) & (above >= 0)[:, None]
        if self._runs_root:
            above = jnp.concatenate([given["root"][:, None], above], 1)
            seen = jnp.pad(seen, ((0, 0), (0, 0), (1, 0)), constant_values=True)
            fresh = jnp.concatenate([root, fresh], 1)
        place = self.drafting.slots + jnp.maximum(above, 0)
        room = ((0, 0), (0, 0), (0, size.nodes), (0, 0), (0, 0))
        before = jnp.pad(held.keys[:, place], room), jnp.pad(held.values[:, place], room)
        seen = jnp.concatenate([seen, jnp.broadcast_to(own, (*size, size.nodes))], -1)
        tree = Tree(seen, position, jnp.concatenate([fresh, position], 1))
        attend = self.drafting.attention(pasts, tree, before, above.shape[1])
        hidden = held.outputs[given["above"]]
        ran = self.drafting.network.run(params, given["tokens"], hidden, position, attend)
        number = given["number"]
        drawn = number < self.drafting.nodes
        target = jnp.where(drawn, self.drafting.slots + number, NOWHERE)
        held = committed(held, ran, after(target, ran.read))
        outputs = held.outputs.at[number.reshape(-1)].set(
            ran.output.reshape(size.total, held.outputs.shape[1]), mode="drop"
        )
        return state._replace(draft=_read(held._replace(outputs=outputs), number, ran.read))

    def candidates(self, params: Params, state: State, rows: Array, *, size: Bucket) -> Array:
        """Return int32[2,FEW,k] for rows int32[FEW] of `reads`: draft ids, and bits of float32
        log-probabilities (nats), best first; k = size.nodes. Changes nothing.
        """
        logits = self.drafting.network.logits(params, state.drafting.reads[rows])
        best, ids = lax.top_k(logits, size.nodes)
        log_probs = best - log_normaliser(logits)[:, None]
        return jnp.stack([ids, lax.bitcast_convert_type(log_probs, jnp.int32)])


def _read(held: DraftArrays, place: Array, read: Array) -> DraftArrays:
    flat = read.reshape(-1, read.shape[-1])
    return held._replace(reads=held.reads.at[place.reshape(-1)].set(flat, mode="drop"))
