"""What stands before and after the forward pass of a captured round, and beside a draft head in the
levels that it grows, in plain torch: the slow twins of forerun.executors.torch.triton_round and
triton_draft, which do each in one or two launches.

A round has R rows of N nodes, M = R*N. Its facts come by name as in captured/buffers.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.executors.torch.accept import Likely, NodeNoise, choose, pick
from forerun.executors.torch.layers import Rotary, rotation
from forerun.interface.draft_model import CANDIDATES
from forerun.speculative.accept import NOTHING
from forerun.speculative.draft_tree import full_size

Facts = dict[str, Tensor]
"""By name: captured/buffers.py."""


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What the rounds of a model have in common.

    page_size    positions of a page
    scratch      slot of node 0 (see kv.py)
    frequencies  float32[K,E/2] of the K kinds of rotary positions
    factors      float32[K] what their cos and sin are multiplied by
    """

    page_size: int
    scratch: int
    frequencies: Tensor
    factors: Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a round's facts say of its nodes.

    position  int32[M] in tokens
    pages     int32[M] slot of that position in the row's pages
    slots     int32[M] where keys and values go: of a decided row that is a chain into `pages`,
              where the accepted ones stay and the next step overwrites the rest; else in scratch
    noise     how each node chooses
    rotary    of the positions, one for each kind
    """

    position: Tensor
    pages: Tensor
    slots: Tensor
    noise: NodeNoise
    rotary: tuple[Rotary, ...]


def prepare(facts: Facts, shape: RoundShape) -> Prepared:
    """What the facts say of every node. Launches only."""
    rows, total = len(facts["count"]), len(facts["depth"])
    nodes, device = total // rows, facts["depth"].device
    node = torch.arange(total, device=device)
    row, place = node // nodes, node % nodes
    position = facts["kv_len"][row] + facts["depth"]
    page = (position // shape.page_size).clamp_max(facts["table"].shape[1] - 1)
    pages = facts["table"][row, page] * shape.page_size + position % shape.page_size
    # A chain's nodes follow each other; what is beyond the row's nodes is nobody's affair.
    real = place < facts["count"][row]
    follows = (facts["parents"] == place - 1) | ~real
    whole = follows.view(rows, nodes).all(1) & (facts["decided"] > 0)
    slots = torch.where(whole[row] & real, pages, shape.scratch + node.int())
    low, high = facts["low"].long(), facts["high"].long()
    noise = NodeNoise(
        seeds=((high << 32) | (low & 0xFFFFFFFF))[row],
        positions=facts["position"][row] + facts["depth"],
        temperatures=facts["temperature"].view(torch.float32)[row],
    )
    kinds = zip(shape.frequencies, shape.factors, strict=True)
    rotary = tuple(rotation(position, *kind) for kind in kinds)
    return Prepared(position, pages.int(), slots.int(), noise, rotary)


@dataclass(frozen=True, slots=True)
class Accepted:
    """What became of a round's rows.

    choices  int32[M] of all nodes
    kept     bool[R,N] nodes on the accepted path of a decided row, its root included
    count    int32[R] how many those are
    last     int32[R] node within the row at which the path ends; 0 where there is none
    """

    choices: Tensor
    kept: Tensor
    count: Tensor
    last: Tensor


def accept(logits: Tensor, noise: NodeNoise, facts: Facts, record: Tensor) -> Accepted:
    """Choose at every node, keep a path of every row, and write the choices on it into `record`
    int32[M], NOTHING elsewhere. Launches only.

    logits  [M,V] of any dtype
    """
    return keep(choose(logits.float(), noise), facts, record)


def keep(choices: Tensor, facts: Facts, record: Tensor) -> Accepted:
    """The same from choices int32[M] that were made."""
    kept = walk(choices, facts)
    record.copy_(torch.where(kept.flatten(), choices, NOTHING))
    depth = facts["depth"].view(kept.shape) + 1
    return Accepted(
        choices=choices,
        kept=kept,
        count=kept.sum(1, dtype=torch.int32),
        last=(kept * depth).argmax(1).int(),
    )


def walk(choices: Tensor, facts: Facts) -> Tensor:
    """bool[R,N]: nodes on the accepted path of a decided row, its root included.

    The rule of forerun.speculative.accept without a loop: a node is right where it is the first
    child of its parent that drafts the parent's choice, and has a choice itself; it is kept where
    it and everything above it is right.
    """
    rows = len(facts["count"])
    chosen, tokens, parents = (
        tensor.view(rows, -1) for tensor in (choices, facts["tokens"], facts["parents"])
    )
    enter, leave = facts["tree_intervals"].view(2, rows, -1)
    order = torch.arange(chosen.shape[1], device=choices.device)
    twins = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    doubled = (twins & (order[:, None] > order)).any(-1)
    drafted = tokens == chosen.gather(1, parents.clamp_min(0).long())
    right = ((drafted & ~doubled) | (order == 0)) & (chosen != NOTHING)
    right &= (order < facts["count"][:, None]) & (facts["decided"][:, None] > 0)
    above = (enter[:, None] <= enter[:, :, None]) & (enter[:, :, None] < leave[:, None])
    kept: Tensor = ~(above & ~right[:, None]).any(-1)
    return kept


@dataclass(frozen=True, slots=True)
class Levels:
    """The trees that a round grows: `levels` deep, `width` children of each of `width` nodes."""

    levels: int
    width: int


@dataclass(frozen=True, slots=True)
class Below:
    """Where the trees of R rows start: at the end of what was extended.

    read, hidden  [R,H] what the output head reads there, [R,W] what a next step receives
    kv_len        int32[R] cached draft positions
    noise         of each level's askers, those of a child's position: [R] at first, then [R*width]
    position      int32[levels-1,R*width] of the nodes that run, level by level
    """

    read: Tensor
    hidden: Tensor
    kv_len: Tensor
    noise: tuple[NodeNoise, ...]
    position: Tensor


@dataclass(frozen=True, slots=True)
class Extended:
    """What an extension of all M nodes gave.

    read, hidden  [M,H] and [M,W], as in Below
    outputs       [n,W] where a row's `hidden` is kept by slot, from `first` on; the last is of
                  nobody
    """

    read: Tensor
    hidden: Tensor
    outputs: Tensor
    first: int


def follow(
    extended: Extended, accepted: Accepted, prepared: Prepared, facts: Facts, size: Levels
) -> Below:
    """Go to the end of every row's accepted path. Launches only."""
    rows, width = len(accepted.count), size.width
    each = torch.arange(rows, device=accepted.count.device)
    root = each * (len(prepared.position) // rows)
    last = root + accepted.last
    read, hidden = extended.read[last], extended.hidden[last]
    nobody = len(extended.outputs) - 1
    slot = torch.where(facts["draft_slot"] >= 0, extended.first + facts["draft_slot"], nobody)
    extended.outputs.index_copy_(0, slot.long(), hidden)
    kv_len = facts["kv_len"] + accepted.count
    noise = prepared.noise
    position = noise.positions[root] + accepted.count
    seeds, temperatures = noise.seeds[root], noise.temperatures[root]
    wide = each.repeat_interleave(width)
    levels = [NodeNoise(seeds, position, temperatures)]
    levels += [
        NodeNoise(seeds[wide], position[wide] + level, temperatures[wide])
        for level in range(1, size.levels)
    ]
    begins = torch.arange(size.levels - 1, device=each.device, dtype=torch.int32)
    return Below(read, hidden, kv_len, tuple(levels), kv_len[wide] + begins[:, None])


def grow(
    logits: Tensor,
    ids: Tensor,
    noise: NodeNoise,
    size: Levels,
    level: int,
    grown: Tensor,
    chosen: Tensor | None,
) -> None:
    """Hang `width` children below the nodes that a level asks for. Launches only.

    logits  [n,Vd] of those nodes, of any dtype; ids int32[Vd] target ids
    grown   int32[3,R,K] tokens, parents and values' bits of the trees (see draft_tree.py)
    chosen  int[R,width] which of the level before the nodes are; None: at the first level, where
            the rows' ends ask, and in chains
    """
    rows, width = grown.shape[1], size.width
    logits = logits.float()
    best, which = logits.topk(min(max(CANDIDATES, width), len(ids)), -1)
    likely = Likely(best, which, logits.logsumexp(-1), ids)
    tokens, values = pick(likely, noise, width)
    values = values.clamp_max(0.0).view(rows, -1, width)
    begin, count = full_size(width, level), values[0].numel()
    parents = torch.full_like(grown[1, :, :count], -1)
    if level:
        above = torch.full_like(grown[1, :, : values.shape[1]], full_size(width, level - 1))
        above = above if chosen is None else above + chosen.int()
        values = grown[2].view(torch.float32).gather(1, above.long())[..., None] + values
        parents = above.repeat_interleave(width, 1)
    place = slice(begin, begin + count)
    grown[0, :, place] = tokens.view(rows, count)
    grown[1, :, place] = parents
    grown[2].view(torch.float32)[:, place] = values.reshape(rows, count)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes that a level of R trees runs, `width` of each.

    chosen  int32[R,width] which of the newest level they are, ascending
    tokens  int32[R*width]
    hidden  [R*width,W] what they receive: the outputs of the nodes they hang below
    above   int32[R,levels-1,width] who is above each of them in each level that has run, by its
            place there, in this level themselves; -1 in later ones
    tree_intervals  int32[2,n] of each row's root, if it is run, and of the nodes of all levels that
                    run: see geometry.py, where only this level's nodes ask
    """

    chosen: Tensor
    tokens: Tensor
    hidden: Tensor
    above: Tensor
    tree_intervals: Tensor


def descend(
    grown: Tensor, size: Levels, level: int, hidden: Tensor, above: Tensor | None, roots: bool
) -> Frontier:
    """Go on below the `width` best nodes of the newest level, ties to the earlier; `level` counts
    those that are grown. Launches only.

    grown   int32[3,R,K] as in `grow`
    hidden  [R*width,W] outputs of the level that ran last, at level 1 of the rows' ends [R,W]
    above   of the frontier before; None at level 1
    roots   each row's root is run before its nodes
    """
    rows, width, later = grown.shape[1], size.width, size.levels - 1 - level
    newest = slice(full_size(width, level - 1), full_size(width, level))
    values = grown[2].view(torch.float32)[:, newest]
    best = values.sort(dim=1, descending=True, stable=True).indices[:, :width]
    chosen = best.sort(dim=1).values
    tokens = grown[0].gather(1, newest.start + chosen).flatten()
    place = torch.arange(width, device=grown.device)
    own = place.expand(rows, 1, -1)
    parents = torch.zeros_like(chosen) if above is None else chosen // width
    known = [own]
    if above is not None:
        earlier = above[:, : level - 2].long()
        which = parents[:, None].expand(-1, earlier.shape[1], -1)
        known = [earlier.gather(2, which), parents[:, None], own]
    deep = torch.cat([*known, own.new_full((rows, later, width), -1)], 1)
    compared = deep[..., None, :]
    intervals = torch.stack([
        (compared < place[:, None]).sum(-1), (compared <= place[:, None]).sum(-1)
    ]).flatten(2)  # fmt: skip
    if roots:
        root = intervals.new_tensor([0, width])[:, None, None].expand(-1, rows, 1)
        intervals = torch.cat([root, intervals], 2)
    given = hidden.view(rows, len(hidden) // rows, hidden.shape[1])
    taken = given.gather(1, parents[..., None].expand(-1, -1, hidden.shape[1])).flatten(0, 1)
    return Frontier(chosen.int(), tokens, taken, deep.int(), intervals.int().view(2, -1))
