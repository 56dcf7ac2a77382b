"""What a captured round launches before and after its forward pass, and beside a draft head in the
levels that it grows, in plain torch: the references of forerun.executors.torch.triton.triton_round,
triton_choice and triton_draft, which do each in one or two launches.

What they take and give is said in forerun.executors.torch.triton.round_types.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.executors.torch.accept import NodeNoise, best, of_words, philox
from forerun.executors.torch.decoder.elementwise import rotation
from forerun.executors.torch.triton.round_types import (
    Accepted,
    Extended,
    Frontier,
    Levels,
    Prepared,
    RoundInputs,
    RoundShape,
    TreeStarts,
)
from forerun.interface.draft_model import CANDIDATES
from forerun.speculative.accept import NOTHING
from forerun.speculative.tree import full_size

_LOW = 0xFFFFFFFF


def prepare(inputs: RoundInputs, shape: RoundShape) -> Prepared:
    """What the inputs say of every node. Launches only."""
    rows, total = len(inputs["count"]), len(inputs["depth"])
    nodes, device = total // rows, inputs["depth"].device
    node = torch.arange(total, device=device)
    row, place = node // nodes, node % nodes
    position = inputs["kv_len"][row] + inputs["depth"]
    page = (position // shape.page_size).clamp_max(inputs["table"].shape[1] - 1)
    pages = inputs["table"][row, page] * shape.page_size + position % shape.page_size
    # A chain's nodes follow each other; what is beyond the row's nodes is not read.
    real = place < inputs["count"][row]
    follows = (inputs["parents"] == place - 1) | ~real
    whole = follows.view(rows, nodes).all(1) & (inputs["decided"] > 0)
    slots = torch.where(whole[row] & real, pages, shape.scratch + node.int())
    low, high = inputs["low"].long(), inputs["high"].long()
    noise = NodeNoise(
        seeds=((high << 32) | (low & 0xFFFFFFFF))[row],
        positions=inputs["position"][row] + inputs["depth"],
        temperatures=inputs["temperature"].view(torch.float32)[row],
    )
    kinds = zip(shape.frequencies, shape.factors, strict=True)
    rotary = tuple(rotation(position, *kind) for kind in kinds)
    return Prepared(position, pages.int(), slots.int(), noise, rotary)


def near(
    position: Tensor, slots: Tensor, table: Tensor, shape: RoundShape, behind: int
) -> tuple[Tensor, Tensor]:
    """Where the nodes are in a cache of window pages. Launches only."""
    row = torch.arange(len(slots), device=slots.device) // (len(slots) // len(table))
    page = (position // shape.page_size).clamp_max(table.shape[1] - 1)
    pages = (table[row, page] * shape.page_size + position % shape.page_size).int()
    return torch.where(slots < shape.scratch, pages, slots - behind).int(), pages


def accept(logits: Tensor, noise: NodeNoise, inputs: RoundInputs, record: Tensor) -> Accepted:
    """Choose at every node, keep a path of every row, and write the choices on it into `record`
    int32[M], NOTHING elsewhere. Launches only.

    logits  [M,V] of any dtype
    """
    return keep(choose(logits.float(), noise), inputs, record)


def choose(logits: Tensor, noise: NodeNoise) -> Tensor:
    """int32[M] from logits float32[M,V]. Noise is made for all nodes, greedy ones included."""
    score, tokens = best(logits, noise, 0)
    return torch.where(score.isfinite(), tokens, NOTHING)


def keep(choices: Tensor, inputs: RoundInputs, record: Tensor) -> Accepted:
    """The same from choices int32[M] that were made."""
    kept = walk(choices, inputs)
    record.copy_(torch.where(kept.flatten(), choices, NOTHING))
    depth = inputs["depth"].view(kept.shape) + 1
    return Accepted(
        choices=choices,
        on_path=kept,
        count=kept.sum(1, dtype=torch.int32),
        last=(kept * depth).argmax(1).int(),
    )


def walk(choices: Tensor, inputs: RoundInputs) -> Tensor:
    """bool[R,N]: nodes on the accepted path of a decided row, its root included.

    The rule of forerun.speculative.accept without a loop: a node is right where it is the first
    child of its parent that drafts the parent's choice, and has a choice itself; it is kept where
    it and everything above it is right.
    """
    rows = len(inputs["count"])
    chosen, tokens, parents = (
        tensor.view(rows, -1) for tensor in (choices, inputs["tokens"], inputs["parents"])
    )
    enter, leave = inputs["tree_intervals"].view(2, rows, -1)
    order = torch.arange(chosen.shape[1], device=choices.device)
    same = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    doubled = (same & (order[:, None] > order)).any(-1)
    drafted = tokens == chosen.gather(1, parents.clamp_min(0).long())
    right = ((drafted & ~doubled) | (order == 0)) & (chosen != NOTHING)
    right &= (order < inputs["count"][:, None]) & (inputs["decided"][:, None] > 0)
    above = (enter[:, None] <= enter[:, :, None]) & (enter[:, :, None] < leave[:, None])
    kept: Tensor = ~(above & ~right[:, None]).any(-1)
    return kept


def follow(
    extended: Extended, accepted: Accepted, prepared: Prepared, inputs: RoundInputs, size: Levels
) -> TreeStarts:
    """Go to the end of every row's accepted path. Launches only."""
    rows, width = len(accepted.count), size.width
    each = torch.arange(rows, device=accepted.count.device)
    root = each * (len(prepared.position) // rows)
    last = root + accepted.last
    read, hidden = extended.read[last], extended.hidden[last]
    unused = len(extended.outputs) - 1
    slot = torch.where(inputs["draft_slot"] >= 0, extended.first + inputs["draft_slot"], unused)
    extended.outputs.index_copy_(0, slot.long(), hidden)
    kv_len = inputs["kv_len"] + accepted.count
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
    return TreeStarts(read, hidden, kv_len, tuple(levels), kv_len[wide] + begins[:, None])


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
    likely = TopChildren(best, which, logits.logsumexp(-1), ids)
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
class TopChildren:
    """The k likeliest children of n nodes, as a draft head sees them.

    logits      float32[n,k], descending
    which       int64[n,k] their draft ids
    normaliser  float32[n] logsumexp of all of a node's logits
    ids         int32[Vd] target id of every draft id
    """

    logits: Tensor
    which: Tensor
    normaliser: Tensor
    ids: Tensor


def pick(likely: TopChildren, noise: NodeNoise, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best children of n nodes, best first: target ids int32[n,width], and
    log-probabilities float32[n,width]; -inf instead of NaN.

    At T > 0 the noise of the position that a child would take, which the target will use too,
    reorders the likely ones; log-probabilities are then those of being the greatest.
    """
    temperature = noise.temperatures[:, None]
    values = likely.logits - likely.normaliser[:, None]
    tokens = likely.ids[likely.which]
    scores = values / torch.where(temperature > 0, temperature, 1.0) + _gumbel_of(
        noise, tokens.long()
    )
    scores = scores - scores.logsumexp(-1, keepdim=True)
    values = torch.where(temperature > 0, scores, values)
    values = torch.where(values.isnan(), -torch.inf, values)
    order = values.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    return tokens.gather(1, order), values.gather(1, order)


def children(
    scores: Tensor, ids: Tensor, others: Tensor, noise: NodeNoise, width: int
) -> tuple[Tensor, Tensor]:
    """As kernels.Children."""
    each = len(scores) // len(ids)
    normaliser = torch.logaddexp(scores.logsumexp(-1), others.repeat_interleave(each))
    which = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    likely = TopChildren(scores, which.repeat_interleave(each, 0), normaliser, ids.flatten())
    wide = (noise.seeds, noise.positions, noise.temperatures)
    wide = NodeNoise(*(part.repeat_interleave(each) for part in wide))
    tokens, values = pick(likely, wide, width)
    return tokens, values.clamp_max(0.0)


def _gumbel_of(noise: NodeNoise, tokens: Tensor) -> Tensor:
    """float32[n,k]: forerun.speculative.noise.gumbel_of of n nodes, tokens int64[n,k] for each."""
    seeds, positions = noise.seeds[:, None], noise.positions.long()[:, None]
    nothing = torch.zeros_like(tokens)
    counter = [tokens // 4, positions + nothing, nothing, nothing]
    words = torch.stack(philox(counter, [seeds & _LOW, (seeds >> 32) & _LOW]), -1)
    return of_words(words.gather(-1, (tokens % 4)[..., None])[..., 0])


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
