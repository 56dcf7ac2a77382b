"""Drafting as a part of the target's step: what is asked for with a step, and what comes with its
outcome. Both are ordinary values; a device that cannot do it leaves the request unanswered.
"""

from dataclasses import dataclass

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
