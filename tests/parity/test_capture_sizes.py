"""Which rounds are captured before the first, and that every step runs as one of them."""

from itertools import pairwise

import numpy as np
import pytest

from forerun.draft_shape import DraftShape
from forerun.executors.torch.captured.declared import (
    FORCED,
    NODES,
    ROWS,
    covering,
    declared,
    padded_rows,
    row_nodes,
)
from forerun.executors.torch.captured.shaped_rows import CUT
from forerun.executors.torch.sizes import Size
from forerun.interface.executor import ExecutorLimits
from tests.covering import every, thinned, values

PLAIN, NGRAM, CHAIN, LONG = DraftShape(), DraftShape(8), DraftShape(3, 1, 3), DraftShape(5, 1, 5)
BOTH, TREE = DraftShape(8, 1, 3), DraftShape(15, 4, 5)
MOST_PADDING = 1.5


def limits(slots, scored=512):
    return ExecutorLimits(16, 4096, slots, max(scored, slots), 4096, 1000, scored)


@pytest.mark.parametrize(
    ("draft", "most"),
    [
        (PLAIN, (3, 18, 30, 48)),
        (NGRAM, (13, 75, 123, 167)),
        (CHAIN, (13, 72, 116, 176)),
        (LONG, (17, 96, 156, 220)),
        (BOTH, (17, 96, 156, 222)),
        (TREE, (17, 102, 166, 230)),
    ],
)
def test_few_sizes_are_declared(draft, most):
    """Each is captured at start-up, 70 ms on an H100: 64 sequences are ready after 8 to 12 s."""
    for slots, count in zip((1, 16, 64, 256), most, strict=True):
        sizes = declared(limits(slots), draft)
        assert len(sizes) == len(set(sizes)) <= count
        assert all(size.total <= 512 and size.rows <= slots for size in sizes)


def asked_of(random, draft, slots, most):
    """A step as planner, policy and drafter ask for it."""
    rows = int(random.integers(1, slots + 1))
    nodes = int(random.integers(1, most[rows - 1] + 1))
    levels = 0
    if draft.depth and random.random() < 0.7:
        depths = [each.depth for each in DraftShape(draft.depth, 1, draft.depth).declared()]
        levels = int(random.choice(depths))
    masked = int(random.random() < 0.2)
    reports = int(random.choice([0, 0, 1, 5, 20]))
    width = draft.width if levels else 0
    if nodes > 1 + draft.nodes:
        masked = 1  # Only a grammar knows so much.
    return Size(rows, nodes, levels, width, int(random.integers(0, 3)), masked, reports)


@pytest.mark.parametrize(
    ("draft", "slots"),
    thinned(every([PLAIN, NGRAM, CHAIN, LONG, BOTH, TREE], [1, 3, 16, 64, 100]), values),
)
def test_every_step_runs_as_a_declared_size(draft, slots):
    sizes, most = declared(limits(slots), draft), row_nodes(limits(slots), draft)
    random, covered = np.random.default_rng(0), {}
    assert len(most) == slots
    for _ in range(1_000):
        size = asked_of(random, draft, slots, most)
        captured_size = covered[size] = covered.get(size) or covering(size, sizes)
        assert captured_size is not None, size
        assert captured_size.rows >= size.rows and captured_size.nodes >= size.nodes
        assert captured_size.levels >= size.levels
        assert captured_size[4:] >= size[4:]


@pytest.mark.parametrize("draft", [NGRAM, LONG])
def test_steps_with_no_wishes_are_hardly_padded(draft):
    """Beyond eight rows: rows and nodes by MOST_PADDING each at most, where drafts are found on
    the host, or as long as a head grows them.
    """
    sizes = declared(limits(64), draft)
    counts = range(1, 10) if draft is NGRAM else (1, 2, 4, 6)
    depth = {1: 0, 2: 1, 4: 3, 6: 5}
    for rows in range(1, 65):
        for nodes in counts:
            levels = 0 if draft is NGRAM else depth[nodes]
            size = Size(rows, nodes, levels, int(levels > 0))
            if padded_rows(rows) * nodes > 512:
                continue
            captured_size = covering(size, sizes)
            assert captured_size.total <= max(8 * 9, MOST_PADDING**2 * size.total)
            assert captured_size.levels == levels
            if rows > 8:
                assert captured_size.rows <= MOST_PADDING * rows
                assert captured_size.nodes <= MOST_PADDING * nodes


def test_tables_rise_by_no_more_than_the_padding():
    for table in (ROWS, NODES):
        for one, two in pairwise(table):
            assert two <= max(MOST_PADDING * (one + 1), one + 4)


def test_a_row_with_eight_draft_tokens_among_many_is_cut_to_what_fits():
    """57 rows of nine nodes are more than 512: the whole step ran kernel by kernel."""
    most = row_nodes(limits(64), NGRAM)
    assert most[:4] == (FORCED, FORCED, FORCED, FORCED)
    assert [most[rows - 1] for rows in (8, 48, 49, 57, 64)] == [9, 9, 8, 8, 8]
    sizes = declared(limits(64), NGRAM)
    assert covering(Size(57, 8), sizes) == Size(64, 8)
    assert covering(Size(57, 9), sizes) is None


@pytest.mark.parametrize("scored", [64, 128, 512])
def test_where_scratch_is_short_rounds_grow_the_levels_that_fit(scored):
    """Three levels of trees 3 wide beside 64 rows are 384 nodes: rounds of 64 rows grew nothing."""

    def run(size):
        return size.rows * (size.levels - 1) * size.width

    def fits(size):
        return run(size) <= scored

    draft = DraftShape(9, 3, 3)
    sizes, most = declared(limits(64, scored), draft, fits), row_nodes(limits(64, scored), draft)
    assert all(fits(size) for size in sizes if size.levels)
    for rows in range(1, 65):
        nodes = most[rows - 1]
        deepest = covering(Size(rows, nodes, 1, 3), sizes)
        assert deepest is not None and deepest.nodes >= nodes
        full = covering(Size(rows, nodes, 3, 3), sizes)
        assert (full is not None) == (padded_rows(rows) * 6 <= scored and nodes > 2)
    assert covering(Size(64, 1, 1, 3, 1, 1, 20), sizes) is not None


def test_few_slots_declare_few_sizes():
    small = ExecutorLimits(16, 64, 2, 512, 512, 1000)
    assert {size.rows for size in declared(small, DraftShape(nodes=2))} == {1, 2}
    assert declared(small, DraftShape()) == (
        *(Size(1, 1), Size(2, 1), Size(1, 1, shaping=CUT), Size(2, 1, shaping=CUT)),
        *(Size(rows, 1, shaping=CUT, masked=1, reports=20) for rows in (1, 2)),
    )


def test_drafts_come_in_few_sizes():
    assert DraftShape(3, 1, 3).declared() == [(1, 1, 1), (3, 1, 3)]
    assert DraftShape(5, 1, 5).declared() == [(1, 1, 1), (3, 1, 3), (5, 1, 5)]
    assert DraftShape(15, 4, 5).declared() == [(1, 4, 1), (3, 4, 1), (9, 4, 3), (15, 4, 5)]
    assert DraftShape(8, 3, 3).declared() == [(1, 3, 1), (2, 3, 1), (8, 3, 3)]
    assert DraftShape(1, 1, 1).declared() == [(1, 1, 1)]


def test_whoever_asks_for_less_runs_along():
    captured = declared(limits(64), DraftShape(nodes=2, width=1, depth=2))
    for size in captured:
        assert covering(size, captured) == size
    edited, reported = Size(4, 2, 1, 1, shaping=1), Size(3, 1, reports=1)
    assert covering(edited, captured) == edited._replace(shaping=CUT)
    assert covering(reported, captured) == Size(4, 1, shaping=CUT, masked=1, reports=20)
    # Trees are grown as deep as they are wanted or deeper, and as wide.
    assert covering(Size(1, 1, 1, 1), captured) == Size(1, 2, 1, 1)
    assert covering(Size(1, 1, 3, 1), captured) is None
    assert covering(Size(1, 1, 1, 2), captured) is None
    assert covering(Size(65, 1), captured) is covering(Size(1, 18), captured) is None
