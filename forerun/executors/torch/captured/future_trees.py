"""Which nodes of the full trees that a round has grown the next one verifies, and who sees whom
there: slow twins of a part of forerun.executors.torch.triton_future.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.executors.torch.captured.buffers import Size
from forerun.executors.torch.plain_round import Facts
from forerun.speculative.accept import NOTHING


@dataclass(frozen=True, slots=True)
class FutureState:
    """By slot, and of nobody in the last place; K = full_size(width, levels).

    state   int32[S,3] kv_len, output position, last token
    tokens, parents, value  int32, int32, float32[S,K] the full tree below it; -inf = no such node
    """

    state: Tensor
    tokens: Tensor
    parents: Tensor
    value: Tensor
    width: int
    levels: int


def best_nodes(
    future: FutureState, size: Size, slot: Tensor, token: Tensor, most: Tensor, depth: Tensor
) -> Facts:
    """The best nodes of the slots' trees, as speculative.draft_tree.DraftTree.draft keeps them."""
    value = future.value.index_select(0, slot)
    parents = future.parents.index_select(0, slot).long()
    # Of a full tree's nodes: place, and level from 1.
    index = torch.arange(value.shape[1], device=value.device)
    width = future.width
    levels = 1 + (((index - width) // width**2) + 1).clamp_min(0)
    real = (value > -torch.inf) & (levels <= depth[:, None])
    value = torch.where(real, value, -torch.inf)
    order = value.sort(dim=1, descending=True, stable=True).indices
    rank = torch.zeros_like(order).scatter_(1, order, index.expand_as(order))
    kept = real & (rank < most.clamp_max(size.nodes - 1)[:, None])
    place = kept.cumsum(1)
    into = torch.where(kept, place, size.nodes)

    def sent(values: Tensor, root: Tensor, rest: int) -> Tensor:
        """[R,N]: the kept ones in their places, behind the root."""
        out = values.new_full((size.rows, size.nodes + 1), rest).scatter_(1, into, values)
        out[:, 0] = root
        return out[:, : size.nodes]

    above = torch.where(parents < 0, 0, place.gather(1, parents.clamp_min(0)))
    nothing = torch.full_like(place[:, 0], NOTHING)
    count = 1 + place[:, -1]
    found = {
        "count": count.int(),
        "tokens": sent(future.tokens.index_select(0, slot), token, 0),
        "parents": sent(above, nothing, NOTHING).int(),
        "depth": sent(levels.expand_as(place), torch.zeros_like(count), 0).int(),
    }
    deepest = min(size.nodes - 1, future.levels)
    return found | {"tree_intervals": tree_intervals_of(size, found["parents"], count, deepest)}


def tree_intervals_of(size: Size, parents: Tensor, count: Tensor, deepest: int) -> Tensor:
    """[2,R,N]: enter and leave (geometry.py) of trees of `count` [R] nodes with such parents
    [R,N], none deeper than `deepest`.
    """
    places = torch.arange(size.nodes, device=parents.device)
    real = places < count[:, None]
    # above[r,i,j]: node j is node i or above it. Paths of 1, 2, 4, ... edges.
    above = ((parents[:, :, None] == places) | (places[:, None] == places)).float()
    for _ in range((deepest - 1).bit_length()):
        above = (above @ above).clamp_max(1.0)
    inside = (above * real[:, :, None]).sum(1)
    # Before a node come those above it, and all that is below its earlier siblings.
    earlier = (parents[:, :, None] == parents[:, None]) & (places[:, None] > places)
    carried = 1.0 + (earlier * inside[:, None]).sum(-1)
    carried = torch.where(places > 0, carried, 0.0)
    enter = (above @ carried[..., None])[..., 0].round().int()
    alone = 2 * size.nodes + places.int()
    return torch.stack([
        torch.where(real, enter, alone),
        torch.where(real, enter + inside.round().int(), alone + 1),
    ])  # fmt: skip
