"""What advances recurrent states over a step's trees, in plain torch: the references of
forerun.executors.torch.triton.triton_states, and the kernels of captured rounds where there is no
GPU. What they take and give: forerun.executors.torch.attention.state_nodes.
"""

import numpy as np
import torch

from forerun.executors.torch.attention.delta_walk import DeltaWay, PlainDelta
from forerun.executors.torch.attention.state_nodes import StateKernels
from forerun.executors.torch.decoder import delta
from forerun.executors.torch.decoder.delta import DeltaNumbers, passed_on, tokens_of
from forerun.executors.torch.decoder.recurrent import window_sums


def ancestors(nodes, width):
    """Every node's window, from its own place backwards. Launches only."""
    rows, total = len(nodes.count), len(nodes.parents)
    begin = torch.arange(rows, device=nodes.parents.device).repeat_interleave(total // rows)
    begin, place = begin * (total // rows), torch.arange(total, device=begin.device)
    past = [place]
    for _ in range(width - 1):
        parent = nodes.parents.long()[place.clamp_min(0)]
        above = torch.where(parent >= 0, begin + parent, 1 - width)
        place = torch.where(place >= 0, above, place + 1)
        past.insert(0, place)
    return torch.stack(past, 1).int()


def rows_of(nodes, total):
    """int64[M]: the row of each of equally many nodes, and of its state; 0 of rows without any."""
    row = torch.arange(len(nodes.count), device=nodes.count.device)
    return torch.where(nodes.count > 0, nodes.slots, 0).long(), row.repeat_interleave(
        total // len(row)
    )


def sums(mixed, kernel, bias, windows, nodes, past):
    """float32[M,C]: the torch code of eager steps, over the rows' windows and then the nodes."""
    slots, row = rows_of(nodes, len(mixed))
    before = windows.index_select(0, slots).flatten(0, 1)
    behind = row[:, None] * windows.shape[1] - 1 - past
    at = torch.where(past < 0, behind, len(before) + past)
    return window_sums(torch.cat([before, mixed.float()]), at.long(), kernel, bias)


def real(nodes, values):
    """Zeros where there is no node."""
    rows = len(nodes.count)
    place = torch.arange(len(values) // rows, device=values.device)
    there = (place < nodes.count[:, None]).flatten()
    return torch.where(there.view(-1, *[1] * (values.dim() - 1)), values, 0.0)


def convolve(mixed, kernel, bias, states, nodes, past):
    return real(nodes, sums(mixed, kernel, bias, states.windows, nodes, past))


def score(about, numbers, states, nodes, past, known=None):
    """Place by place: a node's state is made of its parent's. Launches only, but `known`."""
    if known is not None:
        return by_known(about, numbers, states, nodes, known)
    rows, total = len(nodes.count), len(nodes.parents)
    convolved = sums(numbers.mixed, numbers.kernel, None, states.windows, nodes, past)
    tokens = tokens_of(about, numbers, passed_on(convolved))
    slots, _ = rows_of(nodes, total)
    above = [states.matrices.index_select(0, slots)]
    outputs = []
    each = torch.arange(rows, device=slots.device)
    for place in range(total // rows):
        mine = tokens.ordered(each * (total // rows) + place)
        parent = nodes.parents.view(rows, -1)[:, place] + 1
        here = torch.stack(above)[parent.clamp(0, place).long(), each]
        delta.advance(here, mine)
        above.append(here)
        outputs.append(delta.read(here, mine))
    return real(nodes, torch.stack(outputs, 1).flatten(0, 1))


def by_known(about, numbers, states, nodes, known):
    """The walk of a step on the CPU; waits."""
    start, leading, parents, slots, targets = (
        each.numpy()
        for each in (nodes.start, known.leading, nodes.parents, nodes.slots, known.targets)
    )
    parents = np.where(parents < 0, -1, parents + np.repeat(start[:-1], np.diff(start)))
    way = DeltaWay(start, leading, parents, slots, targets)
    tokens = tokens_of(about, numbers, numbers.mixed)
    return PlainDelta().advance(states.matrices, way, tokens)


def ends(nodes, path):
    """int64[R] node at which a row's path ends, its root without one; and at its last end of a
    page, -1 without one; bool[R] whether there is a path.
    """
    rows, each = path.on_path.shape
    order = torch.arange(each, device=path.on_path.device)
    full = path.kv_len[:, None] + 1 + path.depth.view(rows, each)
    full = path.on_path & (full % path.page_size == 0) & (path.copies >= 0)[:, None]
    begin = torch.arange(rows, device=order.device) * each
    last = torch.where(path.on_path, order, 0).amax(1)
    page = torch.where(full, order, -1).amax(1)
    return begin + last, torch.where(page >= 0, begin + page, -1), path.on_path[:, 0]


def put(table, rows, values, there):
    """Write table[:, rows] where `there`, without an index that depends on a value."""
    spare = torch.where(there, rows.long(), table.shape[1])
    longer = torch.cat([table, torch.zeros_like(table[:, :1])], 1)
    longer.index_copy_(1, spare, values)
    table.copy_(longer[:, :-1])


def advance(about, numbers, states, nodes, past, path):
    rows, total = len(nodes.count), len(nodes.parents)
    slots, _ = rows_of(nodes, total)
    _, page, there = ends(nodes, path)
    each, place_of = torch.arange(rows, device=slots.device), total // rows
    news, copies = [], []
    for layer in range(len(states.matrices)):
        mine = DeltaNumbers(
            *(
                getattr(numbers, name)[layer]
                for name in ("mixed", "gates", "kernel", "rate", "step")
            )
        )
        mine = DeltaNumbers(
            mine.mixed[:total], mine.gates[:total], mine.kernel, mine.rate, mine.step
        )
        passed = passed_on(sums(mine.mixed, mine.kernel, None, states.windows[layer], nodes, past))
        tokens = tokens_of(about, mine, passed)
        here = states.matrices[layer].index_select(0, slots)
        copy = here.clone()
        for place in range(place_of):
            node = each * place_of + place
            after = here.clone()
            delta.advance(after, tokens.ordered(node))
            kept = path.on_path[:, place].view(-1, 1, 1, 1)
            here = torch.where(kept, after, here)
            copy = torch.where((page == node).view(-1, 1, 1, 1), here, copy)
        news.append(here)
        copies.append(copy)
    put(states.matrices, path.copies, torch.stack(copies), there & (page >= 0))
    put(states.matrices, nodes.slots, torch.stack(news), there)


def shift(mixed, states, nodes, past, path):
    total = len(nodes.parents)
    slots, row = rows_of(nodes, total)
    last, page, there = ends(nodes, path)
    news, copies = [], []
    for layer, windows in enumerate(states.windows):
        before = windows.index_select(0, slots).flatten(0, 1)
        behind = row[:, None] * windows.shape[1] - 1 - past
        at = torch.where(past < 0, behind, len(before) + past).long()[:, 1:]
        rows = torch.cat([before, mixed[layer, :total].float()])
        news.append(rows[at[last]])
        copies.append(rows[at[page.clamp_min(0)]])
    put(states.windows, path.copies, torch.stack(copies), there & (page >= 0))
    put(states.windows, nodes.slots, torch.stack(news), there)


STATES = StateKernels(ancestors, score, convolve, advance, shift)
