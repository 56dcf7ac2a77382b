"""Writing a plan into the facts of a captured round: the host's half, in NumPy."""

from itertools import pairwise

import numpy as np

from forerun.errors import EngineError
from forerun.executors.device_choice import Choosing, PlainNodes
from forerun.executors.torch.captured.buffers import Size
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.speculative.verify import intervals
from forerun.types import AnyArray, Bools, Ints

Buffers = dict[str, AnyArray]
"""See buffers.py; blank before anything is written."""


def prepare_inputs(
    buffers: Buffers, size: Size, plan: Plan, trees: TreeBatch, plain: PlainNodes
) -> tuple[Ints, Bools]:
    """Write a step of which the host knows everything. Returns the place of every flat node, and
    bool[B] which rows the device decides.
    """
    count = plan.rows
    row = np.repeat(np.arange(count), np.diff(trees.start))
    place = row * size.nodes + np.arange(len(row)) - trees.start[row]
    decided = np.isin(trees.start[:-1], plain.nodes)
    buffers["kv_len"][:count] = plan.kv_len
    buffers["count"][:count] = np.diff(trees.start)
    buffers["decided"][:count] = decided
    roots = np.searchsorted(plain.nodes, trees.start[:-1][decided])
    chosen = np.flatnonzero(decided)
    _put_choosing(buffers, chosen, plain.seeds[roots], plain.temperatures[roots])
    buffers["position"][chosen] = plain.positions[roots]
    buffers["tokens"][place] = trees.tokens
    buffers["parents"][place] = np.where(trees.parents < 0, -1, trees.parents - trees.start[row])
    buffers["depth"][place] = trees.depth
    buffers["tree_intervals"][:, place] = tree_intervals(trees, row)
    return place.astype(np.int32), decided


def prepare_inputs_carried(
    buffers: Buffers, size: Size, plan: Plan, choosing: Choosing, most: AnyArray
) -> None:
    """Write a plan that goes on from a running round: bounds, and what a sequence never changes.
    most int[B] draft tokens.

    Of nodes, what stands there in a chain of any length; of trees the device knows better.
    """
    rows, places = np.arange(plan.rows), np.arange(size.nodes)
    buffers["carried"][rows] = buffers["decided"][rows] = buffers["count"][rows] = 1
    buffers["most"][rows], buffers["deep"][rows] = most, plan.max_depth
    buffers["last"][rows] = plan.ends - 1
    _put_choosing(buffers, rows, choosing.seed[plan.slots], choosing.temperature[plan.slots])
    buffers["parents"].reshape(-1, size.nodes)[rows] = places - 1
    buffers["tree_intervals"].reshape(2, -1, size.nodes)[0, rows] = places
    buffers["tree_intervals"].reshape(2, -1, size.nodes)[1, rows] = 1


def check_pages(plan: Plan, trees: TreeBatch, page_size: int) -> None:
    """Raise EngineError where a node's position has no page."""
    row = np.repeat(np.arange(plan.rows), np.diff(trees.start))
    _check_pages(plan.page_table, row, plan.kv_len[row] + trees.depth, page_size)


def check_pages_carried(plan: Plan, page_size: int) -> None:
    """Raise EngineError where the last position that a row can reach has no page."""
    deepest = np.minimum(plan.kv_len + plan.max_depth, plan.ends - 1)
    position = np.maximum(plan.kv_len, deepest)
    _check_pages(plan.page_table, np.arange(plan.rows), position, page_size)


def _check_pages(page_table: Ints, row: AnyArray, position: AnyArray, page_size: int) -> None:
    page = position // page_size
    inside = page < page_table.shape[1]
    if not inside.all() or (page_table[row, page] < 0).any():
        raise EngineError("a plan's position has no page: the page table is too short")


def _put_choosing(
    buffers: Buffers, rows: AnyArray, seeds: AnyArray, temperatures: AnyArray
) -> None:
    """How these rows choose: seeds uint64, temperatures float32."""
    buffers["low"][rows] = (seeds & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    buffers["high"][rows] = (seeds >> 32).astype(np.uint32).view(np.int32)
    buffers["temperature"].view(np.float32)[rows] = temperatures


def tree_intervals(trees: TreeBatch, row: AnyArray) -> AnyArray:
    """int32[2,M]: enter and leave (geometry.py) of every flat node; row int[M] its row."""
    counts = np.diff(trees.start)
    if np.array_equal(trees.parents[trees.depth > 0], np.flatnonzero(trees.depth > 0) - 1):
        return np.stack([trees.depth, counts[row]])
    spans = [
        intervals(trees.parents[begin:end] - begin) for begin, end in pairwise(trees.start.tolist())
    ]
    return np.concatenate(spans, axis=1)
