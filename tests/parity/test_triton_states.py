"""The kernels of recurrent states, interpreted on the CPU, against plain torch."""

import numpy as np
import pytest
import torch

from forerun.executors.torch.attention.state_nodes import (
    KnownNodes,
    PathNodes,
    StateNodes,
    StateTables,
)
from forerun.executors.torch.decoder.delta import DeltaNumbers
from forerun.networks.layer_spec import GatedDelta
from forerun.speculative.verify import intervals
from tests.parity.interpreted import load
from tests.references.states import STATES

states = load("triton.triton_states")

SMALL = GatedDelta(key_heads=2, value_heads=4, key_size=6, value_size=10, window=4)
TILED = GatedDelta(key_heads=2, value_heads=4, key_size=8, value_size=34, window=3, tiled=True)
ABOUTS = [SMALL, TILED]
ROWS, EACH, LAYERS, MOST, TABLE = 4, 7, 2, 30, 9
TREES = [[-1, 0, 0, 1, 3, 2, 4], [-1, 0, 1, 2, 3], [-1], []]
"""Parents: a bush, a chain, a root alone, and a row without a node."""


def nodes_of(trees=TREES, each=EACH, slots=(3, 0, 5, 99)):
    """Equally many nodes of every row; the slot of a row without any is none."""
    parents = np.full((len(trees), each), -1, np.int32)
    tree_intervals = np.zeros((2, len(trees), each), np.int32)
    for row, tree in enumerate(trees):
        parents[row, : len(tree)] = tree
        if tree:
            tree_intervals[:, row, : len(tree)] = intervals(np.array(tree, np.int32))
    return StateNodes(
        slots=torch.tensor(slots, dtype=torch.int32),
        start=torch.arange(len(trees) + 1, dtype=torch.int32) * each,
        count=torch.tensor([len(tree) for tree in trees], dtype=torch.int32),
        parents=torch.from_numpy(parents).flatten(),
        tree_intervals=torch.from_numpy(tree_intervals).flatten(1),
    )


def numbers_of(about, count, layers=None, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    first = () if layers is None else (layers,)

    def drawn(*shape):
        return torch.randn(*first, *shape, generator=random)

    heads = about.value_heads
    return DeltaNumbers(
        drawn(count, about.channels).to(dtype),
        drawn(count, 2 * heads).to(dtype),
        drawn(about.channels, about.window),
        -drawn(heads).exp(),
        drawn(heads),
    )


def tables_of(about, layers=None, seed=1):
    random = torch.Generator().manual_seed(seed)
    first = () if layers is None else (layers,)
    shape = about.value_heads, about.key_size, about.value_size
    windows = torch.randn(*first, TABLE, about.window - 1, about.channels, generator=random)
    return StateTables(windows, torch.randn(*first, TABLE, *shape, generator=random))


def copied(tables):
    return StateTables(tables.windows.clone(), tables.matrices.clone())


def near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_windows_go_up_the_tree_and_on_in_the_state(width):
    nodes = nodes_of()
    actual = states.ancestors(nodes, width)
    assert actual.dtype == torch.int32
    assert torch.equal(actual, STATES.ancestors(nodes, width))
    assert actual[4].tolist()[-2:] == [3, 4]
    assert actual[EACH].tolist() == [*range(-1, -width, -1), EACH], "places of the window, then it"
    assert actual[:EACH, -1].tolist() == list(range(EACH))


@pytest.mark.parametrize("about", ABOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nodes_read_what_their_paths_leave(about, dtype):
    nodes, numbers, tables = nodes_of(), numbers_of(about, 28, dtype=dtype), tables_of(about)
    before = copied(tables)
    past = STATES.ancestors(nodes, about.window)
    actual = states.score(about, numbers, tables, nodes, past)
    near(actual, STATES.score(about, numbers, tables, nodes, past))
    assert actual[:EACH].abs().min() > 0
    assert not actual[2 * EACH + 1 :].any(), "what is no node reads nothing"
    assert torch.equal(tables.matrices, before.matrices)


@pytest.mark.parametrize("about", ABOUTS)
def test_known_tokens_stay_whatever_is_accepted(about):
    """A prompt of rows of any length, drafts below one, and copies on the way."""
    trees = [[-1, 0, 1, 2, 3, 3, 5, 4], [-1], [-1, 0, 1]]
    starts = np.cumsum([0, *map(len, trees)])
    parents = np.concatenate(trees).astype(np.int32)
    spans = [intervals(np.array(tree, np.int32)) for tree in trees]
    nodes = StateNodes(
        slots=torch.tensor([2, 4, 0], dtype=torch.int32),
        start=torch.from_numpy(starts).int(),
        count=torch.from_numpy(np.diff(starts)).int(),
        parents=torch.from_numpy(parents),
        tree_intervals=torch.from_numpy(np.concatenate(spans, 1)),
    )
    targets = torch.full((len(parents),), -1, dtype=torch.int32)
    targets[torch.tensor([1, 3])] = torch.tensor([7, 6], dtype=torch.int32)
    known = KnownNodes(torch.tensor([4, 1, 3], dtype=torch.int32), targets)
    numbers, tables = numbers_of(about, len(parents)), tables_of(about)
    others = copied(tables)
    actual = states.score(about, numbers, tables, nodes, None, known)
    near(actual, STATES.score(about, numbers, others, nodes, None, known))
    near(tables.matrices, others.matrices)
    untouched = [1, 3, 5, 8]
    assert torch.equal(tables.matrices[untouched], tables_of(about).matrices[untouched])


@pytest.mark.parametrize("channels", [20, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_short_convolutions_read_their_ancestors(channels, biased):
    random = torch.Generator().manual_seed(2)
    mixed = torch.randn(28, channels, generator=random)
    kernel, bias = torch.randn(channels, 3, generator=random), torch.randn(channels)
    tables = StateTables(torch.randn(TABLE, 2, channels, generator=random), None)
    nodes = nodes_of()
    past = STATES.ancestors(nodes, 3)
    wanted = mixed, kernel, bias if biased else None, tables, nodes, past
    actual = states.convolve(*wanted)
    near(actual, STATES.convolve(*wanted))
    assert actual[4].abs().min() > 0


def path_of(nodes, kept, copies=(-1, 6, 7, -1), page_size=3, kv_len=(4, 2, 5, 0)):
    """kept: the nodes of each row's path."""
    marks = torch.zeros(ROWS, EACH, dtype=torch.bool)
    depth = torch.zeros(ROWS, EACH, dtype=torch.int32)
    for row, (path, tree) in enumerate(zip(kept, TREES, strict=True)):
        marks[row, list(path)] = True
        for node, above in enumerate(tree):
            depth[row, node] = depth[row, above] + 1 if above >= 0 else 0
    lengths = torch.tensor(kv_len, dtype=torch.int32)
    copied_to = torch.tensor(copies, dtype=torch.int32)
    return PathNodes(marks, depth.flatten(), lengths, copied_to, page_size)


PATHS = [([0, 1, 3, 4], [0, 1, 2, 3, 4], [0], []), ([0, 2, 5], [], [0], []), ([], [0, 1], [], [])]


@pytest.mark.parametrize("about", ABOUTS)
@pytest.mark.parametrize("kept", PATHS)
def test_paths_stay_and_other_branches_go(about, kept):
    nodes, path = nodes_of(), path_of(nodes_of(), kept)
    numbers, tables = numbers_of(about, MOST, LAYERS), tables_of(about, LAYERS)
    before, others = copied(tables), copied(tables)
    past = STATES.ancestors(nodes, about.window)
    for made, where in ((states, tables), (STATES, others)):
        made.advance(about, numbers, where, nodes, past, path)
        made.shift(numbers.mixed, where, nodes, past, path)
    near(tables.matrices, others.matrices)
    assert torch.equal(tables.windows, others.windows)
    moved = {int(nodes.slots[row]) for row in range(ROWS) if kept[row]}
    # Of the chain, lengths 3 to 7: the copy is of length 6. The lone root's is of length 6 too.
    moved |= {6} if len(kept[1]) else set()
    moved |= {7} if len(kept[2]) else set()
    for row in range(TABLE):
        same = torch.equal(tables.matrices[:, row], before.matrices[:, row])
        assert same == (row not in moved), row
        assert torch.equal(tables.windows[:, row], before.windows[:, row]) == same, row
    if len(kept[1]) == 5:  # A path that ends where a page does.
        short = copied(before)
        ended = path_of(nodes, (kept[0], kept[1][:4], *kept[2:]))
        states.advance(about, numbers, short, nodes, past, ended)
        states.shift(numbers.mixed, short, nodes, past, ended)
        assert torch.equal(short.matrices[:, 0], tables.matrices[:, 6])
        assert torch.equal(short.windows[:, 0], tables.windows[:, 6])


@pytest.mark.parametrize("about", ABOUTS)
def test_what_was_scored_below_a_path_is_scored_so_again_behind_it(about):
    """To the bit: a node of the tree, and the same token as the next root."""
    nodes, every = nodes_of(), numbers_of(about, MOST, 1)
    tables = tables_of(about, 1)
    past = states.ancestors(nodes, about.window)

    def one(numbers, count):
        own = (each[0] for each in (numbers.kernel, numbers.rate, numbers.step))
        return DeltaNumbers(numbers.mixed[0, :count], numbers.gates[0, :count], *own)

    def first():
        return StateTables(tables.windows[0], tables.matrices[0])

    actual = states.score(about, one(every, 28), first(), nodes, past)
    path = path_of(nodes, ([0, 1, 3], [], [], []))
    states.advance(about, every, tables, nodes, past, path)
    states.shift(every.mixed, tables, nodes, past, path)
    root = nodes_of([[-1]], 1, (3,))
    fed = DeltaNumbers(
        every.mixed[:, 4:5], every.gates[:, 4:5], every.kernel, every.rate, every.step
    )
    past = states.ancestors(root, about.window)
    assert torch.equal(states.score(about, one(fed, 1), first(), root, past)[0], actual[4])
