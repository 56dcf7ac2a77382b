"""Drafting as a part of the target's step: what is asked for with a step, and what comes with its
outcome. Both are ordinary values; a device that cannot do it leaves the request unanswered.
"""

from dataclasses import dataclass
from typing import NamedTuple

from forerun.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a step of the target shall do for the draft model at its end, if the device can.

    slots   int32[.] of sequences that the draft model has caught up with: it shall be extended by
            what is accepted, and the next draft grown below that
    width   children per node, and nodes expanded per level
    levels  of draft tokens, at least one; a device that has no room for so many grows fewer
    """

    slots: Ints
    width: int
    levels: int


@dataclass(frozen=True, slots=True)
class NextDrafts:
    """What a step drafted for the one after it.

    K = forerun.speculative.tree.full_size(width, levels).

    rows    bool[B]      rows of the step that were extended by all that became permanent, as
                         `DraftModel.extend` would, and below whose new end a tree was grown
    width, levels        of the trees; they are full
    tokens  int32[B,K]   target ids; a tree's nodes in the order of speculative.draft_tree.DraftTree
    parents int32[B,K]   as in Draft
    value   float32[B,K] as in DraftTree, the noise of sampling included; -inf = no such node
    ids, log_probs  int32[B,k], float32[B,k] what may follow the rows' new ends, likeliest first, as
                    `DraftModel.extend` says it but by target ids; -inf = nothing. None where no
                    grammar holds a row, which might choose among them
    """

    rows: Bools
    width: int
    levels: int
    tokens: Ints
    parents: Ints
    value: Floats
    ids: Ints | None = None
    log_probs: Floats | None = None


class DraftSize(NamedTuple):
    """Draft tokens of a row: `nodes` in all, paths of `depth`."""

    nodes: int
    depth: int


def draft_sizes(nodes: int, depth: int) -> list[DraftSize]:
    """The few sizes that drafts of at most `nodes` tokens and `depth` levels come in, ascending, so
    that a device can prepare a program for each.

    Depths are 1, 3, 7, ... and `depth` itself, every level as wide as the others (nodes // depth);
    where levels are wider than one, also a single draft token. Requires 1 <= depth <= nodes; not
    checked.
    """
    width = nodes // depth
    depths = sorted({(2 << power) - 1 for power in range(depth.bit_length())} | {depth})
    sizes = [DraftSize(width * levels, levels) for levels in depths if levels < depth]
    alone = [DraftSize(1, 1)] if width > 1 else []
    return [*alone, *sizes, DraftSize(nodes, depth)]
