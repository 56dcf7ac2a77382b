"""What the next round needs of this one, kept on the device: it can begin before the host knows.

    slot      kv_len, output position, last token, and the full tree that was grown below it
    round     [slots -> rows that are `ahead`] -> forward -> walk -> ... -> [rows -> slots]

A row that is `ahead` takes up where the round before has left its slot. Of the host it gets only
bounds: guesses and levels at most, and positions it may take up. The guesses are the best of the
full tree, exactly those that forerun.spec.draft.full_draft takes, found by sorting; who is above
whom follows from their parents. No shape and no branch depends on a value here.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.facts import Size
from forerun.spec.accept import NOTHING
from forerun.spec.draft import full_size

LEVELS = 8
"""Room for trees so deep is made at least: deeper ones later void what was captured."""


class Carry:
    """The state by slot; one slot more takes what rows without a sequence write.

    width, levels  of the trees that there is room for
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._rows = slots + 1
        self._state = {
            name: torch.zeros(self._rows, dtype=torch.int32, device=device)
            for name in ("kv_len", "position", "token")
        }
        self._device = device
        self.width = self.levels = 0
        self._make_room(0, 0)

    def grow(self, size: Size) -> bool:
        """Make room for what rounds of this size grow. True where there was none: what slots held
        is forgotten, and what was captured is void.
        """
        if not self.lacks(size):
            return False
        self._make_room(size.width, max(size.levels, LEVELS))
        return True

    def lacks(self, size: Size) -> bool:
        """Whether there is no room for what rounds of this size grow."""
        return size.levels > 0 and (self.width != size.width or self.levels < size.levels)

    def _make_room(self, width: int, levels: int) -> None:
        self.width, self.levels = width, levels
        count = full_size(width, levels)

        def made(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((self._rows, count), value, dtype=dtype, device=self._device)

        self._tokens, self._parents = made(0, torch.int32), made(NOTHING, torch.int32)
        self._value = made(-torch.inf, torch.float32)
        # Of a full tree's nodes: place, and level from 1.
        self._index = torch.arange(count, device=self._device)
        self._level = torch.ones_like(self._index)
        if levels > 1:
            self._level += ((self._index - width) // width**2 + 1).clamp_min(0)

    # --- launches only ---------------------------------------------------------------------

    def enter(self, size: Size, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The facts, with those of rows that are ahead from their slots."""
        slot, ahead = given["slot"].long(), given["ahead"] > 0
        state = {name: values[slot] for name, values in self._state.items()}
        depth = torch.minimum(given["deep"], given["ends"] - state["kv_len"] - 1)
        if size.nodes == 1 or self.width == 0:
            nodes = _chains(size, torch.ones_like(state["token"]), state["token"], None)
        elif self.width == 1:
            nodes = self._chain(size, slot, state["token"], given["most"], depth)
        else:
            nodes = self._tree(size, slot, state["token"], given["most"], depth)
        found = dict(given)
        for name, own in {**state, "count": nodes.pop("count")}.items():
            if name in found:
                found[name] = torch.where(ahead, own.int(), given[name])
        for name, own in nodes.items():
            given_there = given[name].view(own.shape)
            mixed = torch.where(ahead[:, None], own.int(), given_there)
            found[name] = mixed.view(given[name].shape)
        return found

    def _chain(
        self, size: Size, slot: Tensor, token: Tensor, most: Tensor, depth: Tensor
    ) -> dict[str, Tensor]:
        """What `_tree` gives of chains: their best nodes are the first."""
        most = torch.minimum(most, depth).clamp_max(size.nodes - 1)
        real = (self._value[slot] > -torch.inf) & (self._index < most[:, None])
        count = 1 + real.sum(1)
        guesses = self._tokens[slot][:, : size.nodes - 1]
        guesses = F.pad(guesses, (0, size.nodes - 1 - guesses.shape[1]))
        return _chains(size, count, token, guesses)

    def _tree(
        self, size: Size, slot: Tensor, token: Tensor, most: Tensor, depth: Tensor
    ) -> dict[str, Tensor]:
        """The best nodes of the slots' trees, as forerun.spec.draft.Growth.draft keeps them."""
        value, parents = self._value[slot], self._parents[slot].long()
        real = (value > -torch.inf) & (self._level <= depth[:, None])
        value = torch.where(real, value, -torch.inf)
        order = value.sort(dim=1, descending=True, stable=True).indices
        rank = torch.zeros_like(order).scatter_(1, order, self._index.expand_as(order))
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
            "count": count,
            "tokens": sent(self._tokens[slot], token, 0),
            "parents": sent(above, nothing, NOTHING),
            "depth": sent(self._level.expand_as(place), torch.zeros_like(count), 0),
        }
        deepest = min(size.nodes - 1, self.levels)
        return found | {"turns": _turns(size, found["parents"], count, deepest)}

    def leave(
        self, size: Size, facts: dict[str, Tensor], choices: Tensor, kept: Tensor, grown: Tensor
    ) -> None:
        """Keep what came of the rows: kept bool[R,N] of the accepted paths, choices of all nodes
        [R*N], and the trees that were grown below, int32[3*R*K] as in a record.
        """
        slot = facts["slot"].long()
        count = kept.sum(1, dtype=torch.int32)
        depth = facts["depth"].view_as(kept) + 1
        last = (kept * depth).argmax(1, keepdim=True)
        token = choices.view_as(kept).gather(1, last)[:, 0].clamp_min(0)
        moved = {
            "kv_len": facts["kv_len"] + count,
            "position": facts["position"] + count,
            "token": token.int(),
        }
        for name, values in moved.items():
            self._state[name].index_copy_(0, slot, values)
        room = self._value.shape[1]
        if not room:
            return
        value = self._value.new_full((size.rows, room), -torch.inf)
        if size.levels:
            tokens, parents, bits = grown.view(3, size.rows, size.guesses)
            follows = facts["home"][:, None] >= 0
            value[:, : size.guesses] = torch.where(
                follows, bits.contiguous().view(torch.float32), -torch.inf
            )
            self._tokens[:, : size.guesses].index_copy_(0, slot, tokens)
            self._parents[:, : size.guesses].index_copy_(0, slot, parents)
        self._value.index_copy_(0, slot, value)


def _chains(size: Size, count: Tensor, token: Tensor, guesses: Tensor | None) -> dict[str, Tensor]:
    """Facts of nodes of chains: `count` [R] of them, a root and its guesses [R,N-1]."""
    places = torch.arange(size.nodes, device=count.device).expand(size.rows, -1)
    tokens = token[:, None] if guesses is None else torch.cat([token[:, None], guesses], 1)
    real = places < count[:, None]
    if size.nodes > 1 and guesses is None:
        tokens = tokens.expand(-1, size.nodes)
    enter = torch.where(real, places, 2 * size.nodes + places)
    leave = torch.where(real, count[:, None], enter + 1)
    return {
        "count": count,
        "tokens": torch.where(real, tokens, 0),
        "parents": torch.where(real, places - 1, NOTHING),
        "depth": torch.where(real, places, 0),
        "turns": torch.stack([enter, leave]),
    }


def _turns(size: Size, parents: Tensor, count: Tensor, deepest: int) -> Tensor:
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
    ahead = 1.0 + (earlier * inside[:, None]).sum(-1)
    ahead = torch.where(places > 0, ahead, 0.0)
    enter = (above @ ahead[..., None])[..., 0].round().int()
    alone = 2 * size.nodes + places.int()
    return torch.stack([
        torch.where(real, enter, alone),
        torch.where(real, enter + inside.round().int(), alone + 1),
    ])  # fmt: skip
