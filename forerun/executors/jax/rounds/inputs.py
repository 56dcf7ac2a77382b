"""The host's input of a program: one int32 vector per dispatch, written in NumPy, read in jnp.

Of rows, [R]: kv_len; count of nodes; decided; draft_slot, the slot whose draft shall follow, or -1;
low and high halves of the seed; temperature (its bits); Bounds. Of nodes, [R*N]: tokens; parents
and depth within the row; place, the row of State.hidden for a node's stream; intervals
[2,R*N] (forerun.speculative.verify). Of pages: tables [R,K,W], of the engine's pages and, where
layers with a window give pages back (K = 2), of their window pages.

For carried rows (future_map.py) the device has kv_len and all values of the nodes.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.executors.device_choice import Choosing
from forerun.executors.jax.network.attention import ancestors
from forerun.executors.jax.rounds.accept import NodeSampling, Trees
from forerun.executors.jax.rounds.batches import Batch, Bucket
from forerun.executors.packed import Shapes, total, views_of, zeros_of
from forerun.interface.plan import Plan
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.speculative.verify import intervals
from forerun.types import Bools, Floats, Ints


class Bounds(NamedTuple):
    """Of rows [R]: the slot, or -1; position, the output position that the root decides; whether
    they are carried, in which case position lacks kv_len. For carried ones: most draft tokens,
    their deepest level, and the positions that the sequence may take. And copies, the row of
    recurrent states for a copy of the state at the last end of a page, or -1.
    """

    slot: Array
    position: Array
    carried: Array
    most: Array
    depth: Array
    end: Array
    copies: Array


_BOUNDS = tuple(f"of_{name}" for name in Bounds._fields)


def _shapes(size: Bucket, tables: tuple[int, int]) -> Shapes:
    rows = ("kv_len", "count", "decided", "draft_slot", "low", "high", "temperature", *_BOUNDS)
    nodes = ("tokens", "parents", "depth", "place")
    return {
        **dict.fromkeys(rows, (size.rows,)),
        **dict.fromkeys(nodes, (size.rows, size.nodes)),
        "intervals": (2, size.rows, size.nodes),
        "tables": (size.rows, *tables),
    }


def packed_size(size: Bucket, tables: tuple[int, int]) -> int:
    """Return the length of the int32 vector of a dispatch, for rows' page tables of this shape."""
    return total(_shapes(size, tables))


class Rows(NamedTuple):
    """The programs' work for a plan's rows.

    decided     bool[B] a program decides their paths; ignored for a chunk, whose nodes all stay
    draft_slot  int32[B] the slot whose draft shall follow; -1 = none
    temperature float32[B]; 0 = greedy
    copies      int32[B] as in Bounds
    """

    decided: Bools
    draft_slot: Ints
    temperature: Floats
    copies: Ints


def packed(
    batch: Batch, plan: Plan, trees: TreeBatch, choosing: Choosing, work: Rows, tables: Ints
) -> Ints:
    """Return the vector int32[packed_size] that a program reads for one batch of a complete plan.

    choosing  temperature, seed and prompt length by slot
    work     the programs' work for the plan's rows
    tables    int32[B,K,W] of the plan's rows
    """
    whole, views = _blank(batch, tables)
    for line, (row, nodes) in enumerate(zip(batch.rows, batch.nodes, strict=True)):
        count, first, slot = len(nodes), int(nodes[0]), int(plan.slots[row])
        depth = int(trees.depth[first])
        parents = trees.parents[nodes] - first
        parents[0] = -1
        views["kv_len"][line] = plan.kv_len[row] + depth
        views["count"][line] = count
        views["decided"][line] = batch.chunk or work.decided[row]
        views["draft_slot"][line] = work.draft_slot[row]
        views["of_copies"][line] = -1 if batch.chunk else work.copies[row]
        _put_choosing(views, line, slot, choosing, work.temperature[row])
        views["of_position"][line] += views["kv_len"][line]
        views["tokens"][line, :count] = trees.tokens[nodes]
        views["parents"][line, :count] = parents
        views["depth"][line, :count] = trees.depth[nodes] - depth
        views["intervals"][:, line, :count] = intervals(parents)
        views["tables"][line] = tables[row]
    return whole


def packed_carried(
    batch: Batch, plan: Plan, ends: Ints, most: Ints, choosing: Choosing, work: Rows, tables: Ints
) -> Ints:
    """Return the vector int32[packed_size] of a round that begins from another: every row takes
    length, root and tree from its slot.

    ends  int32[B] as in `Executor.begin_after`
    most  int32[B] the most draft tokens of each row
    """
    whole, views = _blank(batch, tables)
    rows = slice(0, plan.rows)
    views["count"][rows] = views["decided"][rows] = views["of_carried"][rows] = 1
    views["draft_slot"][rows] = work.draft_slot
    views["of_most"][rows], views["of_depth"][rows] = most, plan.max_depth
    views["of_end"][rows], views["of_copies"][rows] = ends, work.copies
    views["tables"][rows] = tables
    for line, slot in enumerate(plan.slots.tolist()):
        _put_choosing(views, line, slot, choosing, work.temperature[line])
    return whole


def _blank(batch: Batch, tables: Ints) -> tuple[Ints, dict[str, Any]]:
    """Return a vector without rows, for page tables like these, and its views."""
    size, (_, kinds, width) = batch.size, tables.shape
    whole, views = zeros_of(_shapes(size, (kinds, width)))
    views["draft_slot"][:] = views["of_slot"][:] = views["of_copies"][:] = -1
    views["parents"][:] = -1
    # Padding attends only to itself.
    views["intervals"][0] = 2 * size.nodes + np.arange(size.nodes)
    views["intervals"][1] = views["intervals"][0] + 1
    views["place"][:] = batch.places()
    return whole, views


def _put_choosing(
    views: dict[str, Any], line: int, slot: int, choosing: Choosing, temperature: float
) -> None:
    """Write a row's sampling parameters; the position lacks kv_len."""
    seed = int(choosing.seed[slot])
    halves = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
    views["low"][line], views["high"][line] = halves
    views["of_slot"][line], views["of_position"][line] = slot, 1 - int(choosing.prompt_len[slot])
    views["temperature"].view(np.float32)[line] = temperature


class Inputs(NamedTuple):
    """The input vector inside a program; shapes as above."""

    kv_len: Array
    tables: Array
    depth: Array
    place: Array
    draft_slot: Array
    trees: Trees
    sampling: NodeSampling
    bounds: Bounds

    @classmethod
    def of(cls, whole: Array, size: Bucket, tables: tuple[int, int]) -> "Inputs":
        """Return the parts of a vector int32[packed_size] inside a program, and the ancestors,
        positions and seeds computed from them.
        """
        views = views_of(whole, _shapes(size, tables))
        depth = views["depth"]
        real = jnp.arange(size.nodes) < views["count"][:, None]

        def of_nodes(values: Array) -> Array:
            return jnp.broadcast_to(values[:, None], depth.shape).reshape(-1)

        halves = [lax.bitcast_convert_type(views[name], jnp.uint32) for name in ("low", "high")]
        temperature = lax.bitcast_convert_type(views["temperature"], jnp.float32)
        return cls(
            kv_len=views["kv_len"],
            tables=views["tables"],
            depth=depth,
            place=views["place"].reshape(-1),
            draft_slot=views["draft_slot"],
            trees=Trees(
                tokens=views["tokens"],
                parents=views["parents"],
                seen=ancestors(views["intervals"]),
                real=real & (views["decided"][:, None] > 0),
            ),
            sampling=NodeSampling(
                seeds=jnp.stack([of_nodes(half) for half in halves]),
                positions=of_nodes(views["of_position"]) + depth.reshape(-1),
                temperature=of_nodes(temperature),
            ),
            bounds=Bounds(*(views[name] for name in _BOUNDS)),
        )

    def behind(self, count: Array) -> NodeSampling:
        """Return the parameters of a child of the last of count int32[R] permanent nodes of each
        row.
        """
        seeds, positions, temperature = (
            part.reshape(*part.shape[:-1], *self.depth.shape)[..., 0] for part in self.sampling
        )
        return NodeSampling(seeds, positions + count, temperature)


def padded_masks(batch: Batch, masks: NodeMasks | None, words: int) -> tuple[Ints, Ints]:
    """Return grammar masks at a fixed size: which mask each node uses, int32[R*N], and their bits
    int32[R*N+1,words], of which the last row is all ones, "everything allowed".

    words  ceil(V/32)
    """
    size = batch.size
    row = np.full(size, -1, np.int32)
    for line, nodes in zip(row, batch.nodes, strict=False):
        line[: len(nodes)] = -1 if masks is None else masks.row[nodes]
    used, which = np.unique(np.append(row, -1), return_inverse=True)
    whole = np.full((size.total + 1, words), 0xFFFFFFFF, np.uint32)
    if masks is not None:
        whole[: len(used) - 1] = masks.bits[used[1:]]
    # The first of `used` is -1.
    which = np.where(which == 0, size.total, which - 1)[:-1]
    return which.astype(np.int32), whole.view(np.int32)
