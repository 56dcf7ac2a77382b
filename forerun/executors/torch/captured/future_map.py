"""What the next round needs of this one, kept on the device: it can begin before the host knows.

    slot      kv_len, output position, last token, and the full tree that was grown below it
    round     [slots -> rows that are `carried`] -> forward -> walk -> ... -> [rows -> slots]

A row that is `carried` takes up where the round before has left its slot. Of the host it gets only
bounds: draft tokens and levels at most, and positions it may take up. The draft tokens are the best
of the full tree, exactly those that forerun.speculative.draft_tree.full_draft takes, found by
sorting; who is above whom follows from their parents.

`resume` and `leave` are the slow twins of forerun.executors.torch.triton_future, which does each in
one launch.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.captured.buffers import Record, Size
from forerun.executors.torch.captured.future_trees import FutureState, best_nodes
from forerun.executors.torch.plain_round import Accepted, Facts
from forerun.speculative.accept import NOTHING
from forerun.speculative.draft_tree import full_size

LEVELS = 8
"""Room for trees so deep is made at least: deeper ones later void what was captured."""


class FutureMap:
    """The state by slot; one slot more takes what rows without a sequence write."""

    def __init__(self, slots: int, device: torch.device) -> None:
        state = torch.zeros(slots + 1, 3, dtype=torch.int32, device=device)
        self.state = _with_room(state, 0, 0)

    def grow(self, size: Size) -> bool:
        """Make room for what rounds of this size grow. True where there was none: what slots held
        is forgotten, and what was captured is void.
        """
        if not self.lacks(size):
            return False
        self.state = _with_room(self.state.state, size.width, max(size.levels, LEVELS))
        return True

    def lacks(self, size: Size) -> bool:
        """Whether there is no room for what rounds of this size grow."""
        return size.levels > 0 and (
            self.state.width != size.width or self.state.levels < size.levels
        )


def _with_room(state: Tensor, width: int, levels: int) -> FutureState:
    shape = len(state), full_size(width, levels)
    kinds = (0, torch.int32), (NOTHING, torch.int32), (-torch.inf, torch.float32)
    tokens, parents, value = (
        torch.full(shape, none, dtype=kind, device=state.device) for none, kind in kinds
    )
    return FutureState(state, tokens, parents, value, width, levels)


def resume(future: FutureState, size: Size, given: Facts) -> Facts:
    """The facts of a round, with those of rows that are carried from their slots. Launches only.

    What the host has filled in of such rows is right for chains.
    """
    carried = given["carried"] > 0
    state = future.state.index_select(0, given["slot"]).T
    where = torch.where(carried, state[:2], given["where"])
    found = {**given, "where": where, "kv_len": where[0], "position": where[1]}
    if size.nodes == 1:
        return {**found, "tokens": torch.where(carried, state[2], given["tokens"])}
    depth = torch.minimum(given["deep"], given["last"] - where[0])
    make = _chain if future.width <= 1 else best_nodes
    nodes = make(future, size, given["slot"], state[2], given["most"], depth)
    for name, own in nodes.items():
        there = given[name].view(own.shape)
        which = carried if own.dim() == 1 else carried[:, None]
        found[name] = torch.where(which, own, there).view(given[name].shape)
    return found


def _chain(
    future: FutureState, size: Size, slot: Tensor, token: Tensor, most: Tensor, depth: Tensor
) -> Facts:
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


def leave(
    future: FutureState, size: Size, facts: Facts, accepted: Accepted, record: Record
) -> None:
    """Keep what came of the rows, and write into the record what ran. Launches only."""
    slot = facts["slot"].long()
    record.tokens.copy_(facts["tokens"])
    token = accepted.choices
    if size.nodes > 1:
        record.parents.copy_(facts["parents"])
        record.count.copy_(facts["count"])
        token = token.view(size.rows, -1).gather(1, accepted.last.long()[:, None])[:, 0]
    moved = torch.cat([facts["where"] + accepted.count, token.clamp_min(0)[None].int()])
    future.state.index_copy_(0, slot, moved.T)
    if future.width:
        _leave_trees(future, size, slot, facts["draft_slot"] >= 0, record.grown)


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
