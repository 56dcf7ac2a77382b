"""Traces of steps: what they say is what the step did, within bounds, and only where they are
wanted.
"""

from dataclasses import replace
from queue import Queue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.build.engine import load
from forerun.client.completion import make_request
from forerun.engine import output
from forerun.engine.request import Speculation
from forerun.engine.trace import MAX_NODES, DraftRow, bounded, draft_row
from forerun.options.config import EngineConfig
from forerun.speculative.tree import Draft, DraftSource, TreeBatch, batch
from tests.engine.toys import ints
from tests.speculative.worlds import as_draft, drafts


@pytest.fixture(scope="module")
def loaded():
    engine = load(EngineConfig(model="toy"))
    yield engine
    engine.close()


def deltas(loaded, trace, n=1, **options):
    """All news of a request, by choice."""
    request = make_request(loaded.tokenizer.encode("abcabcabc"), n=n, **options)
    request = replace(request, speculation=Speculation(trace=trace))
    queue, result = Queue(), [[] for _ in range(n)]
    loaded.engine.submit(request, queue.put)
    while not all(news and news[-1].finish is not None for news in result):
        delta = queue.get(timeout=60)
        result[delta.index].append(delta)
    return result


def test_a_trace_tells_every_token_and_changes_none(loaded):
    (plain,), (news,) = (deltas(loaded, trace, max_tokens=300) for trace in (False, True))
    emitted = [token for delta in plain for token in delta.tokens]
    assert not any(delta.trace for delta in plain)
    steps = [step for delta in news for step in delta.trace]
    assert [token for step in steps for token in step.tokens] == emitted
    assert [step.number for step in steps] == list(range(len(steps)))
    place = 0
    for step in steps:
        assert step.position == place
        place += len(step.tokens)
    stats = news[-1].stats
    assert stats.steps == len(steps) < len(emitted), "the toy repeats itself: some drafts are right"
    assert stats.accepted == sum(len(step.nodes.accepted) for step in steps)
    assert stats.draft_tokens == sum(len(step.nodes.tokens) for step in steps)


def test_the_accepted_path_is_a_path_and_says_the_tokens(loaded):
    (news,) = deltas(loaded, True, max_tokens=300)
    for step in (step for delta in news for step in delta.trace):
        row, above = step.nodes, -1
        for node, token in zip(row.accepted, step.tokens, strict=False):
            assert row.parents[node] == above and row.tokens[node] == token
            above = node
        assert set(row.sources) <= {DraftSource.NGRAM, DraftSource.TABLE}
        assert len(row.tokens) <= step.allowed and step.ms > 0 and step.left_out == 0


def test_long_answers_are_traced_up_to_a_bound(loaded, monkeypatch):
    monkeypatch.setattr(output, "MAX_STEPS", 7)
    (news,) = deltas(loaded, True, max_tokens=300)
    assert [step.number for delta in news for step in delta.trace] == list(range(7))


def test_rows_of_a_step_with_and_without_the_drafts():
    source = ints(DraftSource.NGRAM, DraftSource.TABLE, DraftSource.GRAMMAR)
    draft = Draft(ints(7, 8, 9), ints(-1, -1, 1), np.array([0.5, 0.4, 0.2], np.float32), source)
    trees = batch([ints(1, 2), ints(3)], [Draft(), draft])
    row = draft_row(trees, 1, ints(4, 5))
    assert row.tokens == [7, 8, 9] and row.parents == [-1, -1, 1] and row.depth == [1, 1, 2]
    assert row.sources == [1, 2, 4] and row.accepted == [1, 2]
    bare = TreeBatch(trees.tokens, trees.parents, trees.start, trees.known, trees.depth)
    other = draft_row(bare, 1, ints(4, 5))
    unknown = {"scores": [0.0] * 3, "sources": [0] * 3}
    assert other == row._replace(**unknown)
    assert (
        draft_row(bare, 0, ints())
        == draft_row(trees, 0, ints())
        == DraftRow([], [], [], [], [], [])
    )


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), drafts(), st.data())
def test_a_row_says_what_became_of_its_drafts(chain, draft, data):
    count = len(draft)
    scores = data.draw(st.lists(st.floats(0, 1, width=32), min_size=count, max_size=count))
    sources = data.draw(
        st.lists(st.sampled_from(list(DraftSource)), min_size=count, max_size=count)
    )
    draft = Draft(
        draft.tokens, draft.parents, np.array(scores, np.float32), np.array(sources, np.int32)
    )
    # A row before and one after it, so that its flat indices are not its own.
    beside = as_draft([1, 2], [-1, 0])
    trees = batch([ints(0, 0), ints(*chain), ints(0)], [beside, draft, beside])
    path, children = [], np.flatnonzero(draft.parents == -1)
    while len(children) and data.draw(st.booleans()):
        path.append(int(data.draw(st.sampled_from(children.tolist()))))
        children = np.flatnonzero(draft.parents == path[-1])
    root = trees.root(1)
    accepted = root + 1 + ints(*path)
    row = draft_row(trees, 1, accepted)
    assert row.tokens == draft.tokens.tolist() and row.parents == draft.parents.tolist()
    assert row.scores == scores and row.sources == sources
    assert row.accepted == path
    assert row.depth == (trees.depth[root + 1 : root + 1 + count] - trees.depth[root]).tolist()
    device = TreeBatch(trees.tokens, trees.parents, trees.start, trees.known, trees.depth)
    unknown = row._replace(scores=[0.0] * count, sources=[DraftSource.UNKNOWN] * count)
    assert draft_row(device, 1, accepted) == unknown


def test_a_wide_tree_is_cut_and_keeps_its_accepted_path():
    # A hundred children of the root; below the last one a chain that was accepted.
    parents = [-1] * 100 + [99, 100, 101]
    row = DraftRow(
        tokens=list(range(103)),
        parents=parents,
        depth=[1] * 100 + [2, 3, 4],
        scores=[0.5] * 103,
        sources=[1] * 103,
        accepted=[99, 100, 101, 102],
    )
    cut = bounded(row)
    assert len(cut.tokens) == MAX_NODES
    assert [cut.tokens[node] for node in cut.accepted] == [99, 100, 101, 102]
    assert all(parent < node for node, parent in enumerate(cut.parents))
    assert [cut.tokens[cut.parents[node]] for node in cut.accepted[1:]] == [99, 100, 101]
    assert bounded(row, 200) is row


def test_sources_are_counted_by_depth(loaded):
    before = {(c.source, c.depth): c for c in loaded.engine.stats().by_source}
    (news,) = deltas(loaded, True, max_tokens=200)
    after = {(c.source, c.depth): c for c in loaded.engine.stats().by_source}
    rows = [step.nodes for delta in news for step in delta.trace]
    for (source, depth), count in after.items():
        mine = [
            [node for node, of in enumerate(row.sources) if of.name.lower() == source]
            for row in rows
        ]
        verified = [
            node
            for row, own in zip(rows, mine, strict=True)
            for node in own
            if row.depth[node] == depth
        ]
        accepted = [
            row
            for row, own in zip(rows, mine, strict=True)
            if len(row.accepted) >= depth and row.accepted[depth - 1] in own
        ]
        was = before.get((source, depth))
        assert source in ("ngram", "table")
        assert count.verified - (was.verified if was else 0) == len(verified)
        assert count.accepted - (was.accepted if was else 0) == len(accepted)
