"""How a round takes up what the one before it left by slot, and leaves what the next one needs, in
plain torch: the references of forerun.executors.torch.triton.triton_future, which does each in one
launch.

The draft tokens are the best of the full tree, exactly those that
forerun.speculative.draft_tree.full_draft takes, found by sorting; ancestors follow from
their parents.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.executors.torch.sizes import Record, Size
from forerun.executors.torch.triton.round_types import Accepted, FutureState, RoundInputs
from forerun.speculative.accept import NOTHING


def resume(future: FutureState, size: Size, given: RoundInputs) -> RoundInputs:
    """The inputs of a round, with those of rows that are carried from their slots. Launches only.

    What the host has filled in of such rows is right for chains.
    """
    carried = given["carried"] > 0
    state = future.state.index_select(0, given["slot"]).T
    where = torch.where(carried, state[:2], given["where"])
    facts = {**given, "where": where, "kv_len": where[0], "position": where[1]}
    if size.nodes == 1:
        return {**facts, "tokens": torch.where(carried, state[2], given["tokens"])}
    depth = torch.minimum(given["deep"], given["last"] - where[0])
    make = _chain if future.width <= 1 else best_nodes
    nodes = make(future, size, given["slot"], state[2], given["most"], depth)
    for name, own in nodes.items():
        there = given[name].view(own.shape)
        which = carried if own.dim() == 1 else carried[:, None]
        facts[name] = torch.where(which, own, there).view(given[name].shape)
    return facts


def _chain(
    future: FutureState, size: Size, slot: Tensor, token: Tensor, most: Tensor, depth: Tensor
) -> RoundInputs:
    """What `best_nodes` gives of chains: they are the first."""
    grown = (future.value.index_select(0, slot) > -torch.inf).sum(1, dtype=torch.int32)
    draft_tokens = torch.minimum(torch.minimum(most, depth), grown).clamp(0, size.nodes - 1)
    count = draft_tokens + 1
    tokens = future.tokens.index_select(0, slot)[:, : size.nodes - 1]
    tokens = torch.cat([token[:, None], tokens], 1)
    places = torch.arange(size.nodes, dtype=torch.int32, device=slot.device)
    # The first `count` see what is before them, what is no node itself alone.
    leaves = torch.maximum(count[:, None], places + 1)
    return {
        "count": count,
        "tokens": F.pad(tokens, (0, size.nodes - tokens.shape[1])),
        # What is no node stands where the last one does: there is a page.
        "depth": torch.minimum(places, draft_tokens[:, None]),
        "tree_intervals": torch.stack([places.expand_as(leaves), leaves]),
    }


def best_nodes(
    future: FutureState, size: Size, slot: Tensor, token: Tensor, most: Tensor, depth: Tensor
) -> RoundInputs:
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
    nodes = {
        "count": count.int(),
        "tokens": sent(future.tokens.index_select(0, slot), token, 0),
        "parents": sent(above, nothing, NOTHING).int(),
        "depth": sent(levels.expand_as(place), torch.zeros_like(count), 0).int(),
    }
    deepest = min(size.nodes - 1, future.levels)
    return nodes | {"tree_intervals": tree_intervals_of(size, nodes["parents"], count, deepest)}


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


def leave(
    future: FutureState, size: Size, inputs: RoundInputs, accepted: Accepted, record: Record
) -> None:
    """Keep what came of the rows, and write into the record what ran. Launches only."""
    slot = inputs["slot"].long()
    record.tokens.copy_(inputs["tokens"])
    token = accepted.choices
    if size.nodes > 1:
        record.parents.copy_(inputs["parents"])
        record.count.copy_(inputs["count"])
        token = token.view(size.rows, -1).gather(1, accepted.last.long()[:, None])[:, 0]
    moved = torch.cat([inputs["where"] + accepted.count, token.clamp_min(0)[None].int()])
    future.state.index_copy_(0, slot, moved.T)
    if future.width:
        _leave_trees(future, size, slot, inputs["draft_slot"] >= 0, record.grown)


def _leave_trees(
    future: FutureState, size: Size, slot: Tensor, extends: Tensor, grown: Tensor
) -> None:
    """Keep what was grown below rows that are followed; nothing below others."""
    value = future.value.new_full((size.rows, future.value.shape[1]), -torch.inf)
    if size.levels:
        tokens, parents, bits = grown.view(3, size.rows, size.draft_tokens)
        values = bits.view(torch.float32)
        value[:, : size.draft_tokens] = torch.where(extends[:, None], values, -torch.inf)
        future.tokens[:, : size.draft_tokens].index_copy_(0, slot, tokens)
        if future.width > 1:
            future.parents[:, : size.draft_tokens].index_copy_(0, slot, parents)
    future.value.index_copy_(0, slot, value)
