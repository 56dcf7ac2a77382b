"""Every kernel that rounds launch, in plain torch, on any device: what the Triton kernels are held
to, and what captured rounds are tested with where there is no GPU.
"""

from dataclasses import fields, is_dataclass, replace
from functools import wraps
from inspect import isfunction

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.executors.torch.accept import best
from forerun.executors.torch.attention.geometry import Geometry, positions_of
from forerun.executors.torch.attention.kv import CacheTensor, PagedCache, enter, read
from forerun.executors.torch.attention.prompt_attention import row_by_row
from forerun.executors.torch.decoder.elementwise import PLAIN, rotation, softcapped
from forerun.executors.torch.decoder.grouped import Pairs, Stacked
from forerun.executors.torch.shaping import shaped
from forerun.executors.torch.triton.kernels import Kernels
from forerun.networks.layer_spec import AttentionSpec
from tests.references.future import leave, resume
from tests.references.rounds import (
    accept,
    children,
    choose,
    descend,
    follow,
    grow,
    keep,
    near,
    prepare,
)
from tests.references.states import STATES


def attend_dense(
    queries: Tensor,
    keys: CacheTensor,
    values: CacheTensor,
    geometry: Geometry,
    spec: AttentionSpec | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Context [Q,A,E] of queries [Q,A,E] over one layer's keys and values.

    The reference of the kernels: every page of every table is read, then masked. Shapes depend
    on shapes alone, so it can be captured.

    spec   how scores are made; None: scaled by 1/sqrt(E), no window
    sinks  float32[A]: a score of each head that carries no value
    """
    size, width, count = queries.shape[2], geometry.table.shape[1], len(geometry.slots)
    nodes = torch.arange(count, device=queries.device)
    row_of = torch.searchsorted(geometry.start[1:].contiguous(), nodes.int(), right=True)
    asking = nodes if geometry.asking is None else geometry.asking.long()
    row = row_of[asking]
    position = torch.arange(width * geometry.page_size, device=queries.device)
    page = geometry.table.long().clamp_min(0)[:, position // geometry.page_size]
    slots = (page * geometry.page_size + position % geometry.page_size)[row]
    spec = spec or AttentionSpec(size**-0.5)
    cached = position < geometry.kv_len[row, None]
    enter, leave = geometry.tree_intervals
    step = enter[asking, None]
    own = (enter <= step) & (step < leave) & (row_of == row[:, None])
    if spec.window is not None or geometry.begin:
        mine = positions_of(geometry)
        oldest = mine.clamp_max(geometry.begin)
        if spec.window is not None:
            oldest = torch.maximum(oldest, mine - spec.window + 1)
        oldest = oldest[asking, None]
        cached &= position >= oldest
        own &= mine >= oldest
    seen = torch.cat([cached, own], 1)
    slots = torch.cat([slots, geometry.slots.long().expand(len(asking), -1)], 1)
    # [G, M, T, E]; what is not seen is read as zero, because NaN times zero is NaN.
    key, value = (
        torch.where(seen[..., None], read(cached, slots), 0.0).float() for cached in (keys, values)
    )
    grouped = queries.float().unflatten(1, (len(keys), -1)).transpose(0, 1)
    scores = torch.einsum("gmae,gmte->gmat", grouped, key) * spec.scale
    scores = softcapped(scores, spec.softcap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        shape = *scores.shape[:3], 1
        scores = torch.cat([scores, sinks.view(len(keys), 1, -1, 1).expand(shape)], -1)
    weights = scores.softmax(-1)[..., : seen.shape[1]]
    return torch.einsum("gmat,gmte->mgae", weights, value).flatten(1, 2).to(queries.dtype)


def grouped_loop(x: Tensor, matrices: Stacked, pairs: Pairs, k: int) -> Tensor:
    """GroupedProduct, every expert for every pair: the reference of triton_experts.grouped. Shapes
    depend on shapes alone, so it can be captured.
    """
    rows = x.repeat_interleave(k, 0)
    result = x.new_zeros(len(rows), matrices.numbers.shape[1])
    for expert in range(len(matrices.numbers)):
        matrix = matrices.numbers[expert].to(x.dtype)
        product = F.linear(rows, matrix).float()
        if matrices.scale is not None:
            product = product * matrices.scale[expert]
        if matrices.bias is not None:
            product = product + matrices.bias[expert].float()
        mine = (pairs.expert == expert).unsqueeze(1)
        result = torch.where(mine, product.to(x.dtype), result)
    return result


def as_reference(work):
    """`work` of the package in place of a kernel: its frames count as the reference's."""

    @wraps(work)
    def stands_for(*args, **kwargs):
        return work(*args, **kwargs)

    return stands_for


def references_of(parts):
    """The same of all functions of a dataclass, and of dataclasses in it."""
    result = {each.name: getattr(parts, each.name) for each in fields(parts)}
    return replace(
        parts,
        **{name: as_reference(work) for name, work in result.items() if isfunction(work)},
        **{name: references_of(work) for name, work in result.items() if is_dataclass(work)},
    )


REFERENCE_KERNELS = Kernels(
    attend=attend_dense,
    varlen=row_by_row,
    enter=as_reference(enter),
    move=as_reference(PagedCache.move),
    prepare=prepare,
    near=near,
    accept=accept,
    choose=choose,
    best=as_reference(best),
    shape=as_reference(shaped),
    keep=keep,
    rotation=as_reference(rotation),
    follow=follow,
    grow=grow,
    descend=descend,
    children=children,
    resume=resume,
    leave=leave,
    states=STATES,
    parts=replace(references_of(PLAIN), grouped=grouped_loop),
)
"""All of them in plain torch, on any device."""
