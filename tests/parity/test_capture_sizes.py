"""What captured rounds are padded to, and which of them are captured before the first."""

import numpy as np
import pytest

from forerun.executors.torch.captured.buffers import Size
from forerun.executors.torch.captured.declared import ASKED, covering, declared
from forerun.executors.torch.captured.sizes import FREE, MOST_PADDING, ROWS, padded_size
from forerun.interface.executor import DraftShape, ExecutorLimits

LIMITS = ExecutorLimits(page_size=16, pages=4096, slots=64, max_nodes=512, context=4096, vocab=1000)


def test_up_to_eight_draft_tokens_run_exactly():
    for rows in ROWS:
        for nodes in range(1, 10):
            if rows * nodes <= 512:
                assert padded_size(rows, nodes, 512)[:2] == (rows, nodes)


@pytest.mark.parametrize("most", [64, 512, 4096])
def test_no_step_is_padded_beyond_the_bound(most):
    for rows in range(1, 200):
        for nodes in range(1, 70):
            size = padded_size(rows, nodes, most)
            if size is None:
                assert nodes > 64 or rows * nodes > most
                continue
            assert size.rows >= rows and size.nodes >= nodes and size.total <= most
            assert size.total <= max(FREE, MOST_PADDING * rows * nodes)


def test_the_example_that_was_wrong():
    """33 rows of 5 nodes are 165; they ran as 512."""
    assert padded_size(33, 5, 512)[:2] == (48, 5)


def test_mixed_steps_need_no_size_that_was_not_declared():
    sizes = set(declared(LIMITS, DraftShape(nodes=8)))
    assert len(sizes) <= 100 * len(ASKED)
    random = np.random.default_rng(0)
    for _ in range(10_000):
        rows, nodes = int(random.integers(1, 65)), int(random.integers(1, 10))
        size = padded_size(rows, nodes, LIMITS.max_nodes)
        assert size is None or size in sizes
        assert (size is None) == (rows * nodes > LIMITS.max_nodes)


def test_rounds_that_draft_are_declared_with_their_levels():
    sizes = declared(LIMITS, DraftShape(nodes=4, width=1, levels=4))
    assert len(sizes) == len(set(sizes)) <= 200 * len(ASKED)
    found = {(size.nodes, size.levels) for size in sizes if size.rows == 8}
    plain, begun = {(n, 0) for n in range(1, 6)}, {(1, levels) for levels in range(1, 5)}
    assert found == plain | begun | {(n, n - 1) for n in range(2, 6)}
    assert {size.width for size in sizes if size.levels} == {1}


def test_few_slots_declare_few_sizes():
    small = ExecutorLimits(16, 64, 2, 512, 512, 1000)
    assert {size.rows for size in declared(small, DraftShape(nodes=2))} == {1, 2}
    sizes = declared(small, DraftShape())
    assert [size[:3] for size in sizes] == [(1, 1, 0), (2, 1, 0)] * len(ASKED)
    # Plain ones first: they are captured, whatever the time is.
    assert [size[4:] for size in sizes[:2]] == [(0, 0, 0)] * 2


def test_whoever_asks_for_less_runs_along():
    captured = declared(LIMITS, DraftShape(nodes=2, width=1, levels=2))
    for size in captured:
        assert covering(size, captured) == size
    edited, told = Size(4, 2, 1, 1, shaping=1), Size(3, 1, reports=1)
    assert covering(edited, captured) == edited._replace(shaping=2)
    assert covering(told, captured) == Size(4, 1, masked=1, reports=20)
    assert covering(told._replace(shaping=1), captured)[4:] == (2, 1, 20)
    # What is grown is another thing: no round grows more than is asked for, or less.
    assert covering(Size(1, 1, 3, 1), captured) is None
    assert covering(Size(65, 1), captured) is covering(Size(1, 4), captured) is None
