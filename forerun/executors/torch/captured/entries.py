"""The entries of a round's extension in the caches of draft models that are not EAGLE heads: behind
roots stored by slot, and beside outputs of other layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.executors.layer_states import LayerStates
from forerun.executors.torch.attention.geometry import Geometry
from forerun.executors.torch.attention.kv import PagedCache
from forerun.executors.torch.drafts.draft_cache import DraftCache
from forerun.executors.torch.drafts.level_model import LevelModel
from forerun.executors.torch.triton.round_types import Accepted, Prepared, RoundInputs

Move = Callable[[Tensor, Tensor, Tensor], None]
"""(slots [n], slots they are copied to [n], bool[n] which): in all of a draft's layers."""


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """A round after its commit: its inputs (fixed.py), the geometry of its step, and the values
    of round_types.py.
    """

    inputs: RoundInputs
    geometry: Geometry
    prepared: Prepared
    accepted: Accepted


class KindOfPages(NamedTuple):
    """What a round has in one of PagedCache.kinds: its geometry, whose `slots` are also here, and
    `pages` int32[M] as of Prepared.
    """

    cache: PagedCache
    geometry: Geometry
    slots: Tensor
    pages: Tensor


def behind_roots(
    cache: DraftCache, committed: CommittedRound, nodes: Tensor, move: Move
) -> tuple[Prepared, Tensor]:
    """Return the entries of a step's nodes behind their roots, which move to their pages; and
    int32[R], the slots of the next roots. nodes: int32[R,N] their scratch slots.
    """
    prepared, inputs, last = committed.prepared, committed.inputs, committed.accepted.last[:, None]
    followed = inputs["draft_slot"] >= 0
    waiting = cache.root_begin + inputs["draft_slot"].clamp_min(0)
    move(waiting, prepared.pages.view_as(nodes)[:, 0].contiguous(), followed)
    position = prepared.position + 1
    page = (position // cache.page_size).clamp_max(inputs["table"].shape[1] - 1)
    pages = inputs["table"].gather(1, page.view_as(nodes).long())
    pages = pages * cache.page_size + position.view_as(nodes) % cache.page_size
    # The last one waits by slot; of a row that is not followed it stays where it is.
    ends = torch.where(followed[:, None], waiting[:, None], nodes)
    place = torch.arange(nodes.shape[1], device=nodes.device)
    pages = torch.where(place == last, ends, pages).int()
    entries = replace(prepared, position=position, slots=nodes.flatten(), pages=pages.flatten())
    return entries, ends.gather(1, last.long())[:, 0]


def before_of(
    model: LevelModel, states: LayerStates, committed: CommittedRound
) -> Callable[[int, Tensor], Tensor]:
    """Return Nodes.before of a round whose layers read each other: outputs [R*N,H] -> [R*N,H] of
    the node above each; for a root, the stored output of the entry before it.
    """
    inputs, size = committed.inputs, model.cache.page_size
    length, rows = inputs["kv_len"], len(inputs["kv_len"])
    page = inputs["table"].gather(1, (length // size - 1).clamp_min(0)[:, None].long())[:, 0]
    slot = states.slots + inputs["draft_slot"].clamp_min(0)
    stored = model.outputs.index_select(
        0, torch.where(length % size == 0, states.pages + page, slot)
    )
    # Roots first, then nodes.
    parents = inputs["parents"].view(rows, -1)
    row = torch.arange(rows, device=parents.device)[:, None]
    above = torch.where(parents < 0, row, rows + row * parents.shape[1] + parents).flatten()

    def before(layer: int, outputs: Tensor) -> Tensor:
        width = outputs.shape[1]
        of_roots = stored[:, layer * width : (layer + 1) * width]
        return torch.cat([of_roots, outputs]).index_select(0, above)

    return before


def keep_page_ends(
    model: LevelModel, states: LayerStates, committed: CommittedRound, outputs: Tensor
) -> None:
    """Write outputs [R*N,W] of accepted entries that are the last of their pages into the model's
    table, for sequences that continue behind these pages. Launches only.
    """
    prepared, size = committed.prepared, model.cache.page_size
    full = committed.accepted.kept.flatten() & (prepared.position % size == size - 1)
    rows = torch.where(full, states.pages + prepared.pages // size, states.rows - 1)
    model.outputs.index_copy_(0, rows.long(), outputs)
