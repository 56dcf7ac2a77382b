"""Confidence of DSpark's tokens becomes a price by what happened, not by what the head says."""

from types import SimpleNamespace

import numpy as np
import pytest

from forerun.control.constants import DECAY, PRIOR
from forerun.draft_shape import DraftShape
from forerun.drafters.confidence import Confidence, scaled
from forerun.drafters.draft_passes import DraftPasses
from forerun.drafters.draft_state import DraftState
from forerun.drafters.map_coverage import ENOUGH, MapCoverage
from forerun.interface.draft_model import BlockCandidates, Children
from forerun.speculative.sampling import Sampling


def test_it_is_believed_until_outcomes_are_counted():
    confidence = Confidence()
    assert confidence.rate(False, 0, 0.93) == pytest.approx(0.93)
    for _ in range(200):
        confidence.learn(False, 0, 0.93, False)
    assert confidence.rate(False, 0, 0.93) < 0.01
    assert confidence.rate(False, 3, 0.93) == confidence.rate(False, 5, 0.93) < 0.1
    for other in ((True, 0, 0.93), (False, 0, 0.83)):  # Sampled texts, another tenth.
        assert confidence.rate(*other) == pytest.approx(other[2])


def test_it_is_described_while_the_engine_counts():
    confidence = Confidence()
    confidence.learn(False, 0, 0.93, True)
    (key,) = [key for key in confidence._counts if key[1] < 0]

    class ChangingCount:
        """A count; while it is read, others are made."""

        right = 1.0

        @property
        def tried(self):
            confidence.learn(True, 5, 0.2, True)
            return 1.0

    confidence._counts[key] = ChangingCount()
    assert confidence.describe() == {"greedy, confidence 0.9": 1.0}


def test_depths_differ_and_old_outcomes_fade():
    confidence = Confidence()
    for turn in range(400):
        confidence.learn(True, 0, 0.5, True)
        confidence.learn(True, 4, 0.5, turn % 4 == 0)
    assert confidence.rate(True, 0, 0.5) > 0.95
    assert confidence.rate(True, 4, 0.5) == pytest.approx(0.25, abs=0.07)
    assert confidence.describe() == {"sampled, confidence 0.5": pytest.approx(0.62, abs=0.05)}
    steps = 0
    while confidence.rate(True, 0, 0.5) > 0.5:
        confidence.learn(True, 0, 0.5, False)
        steps += 1
    assert steps < 2 * np.log(0.5) / np.log(DECAY) + PRIOR


def test_siblings_keep_their_ratio_and_sum_to_one_at_most():
    log_probs = np.log(np.array([0.5, 0.25, 0.1], np.float32))
    assert scaled(log_probs, 0.4) == pytest.approx([0.4, 0.2, 0.08])
    assert sum(scaled(log_probs, 1.0)) == pytest.approx(1.0)
    assert scaled(log_probs[:0], 0.4) == []


class ConfidentBlocks:
    """Blocks of two tokens: below token t come t + 1, t + 2; sure by `levels`."""

    traits = SimpleNamespace(block_size=2, target_ids=np.arange(100, dtype=np.int32))

    def __init__(self, *levels):
        self._levels = levels

    def block(self, block):
        self._root = int(block.roots[0])
        return BlockCandidates(*np.zeros((2, 1, 2, 2)), pairs=self)

    def below(self, row, path):
        above = path[-1] if path else self._root
        ids = np.array([above + 1, above + 2], np.int32)
        values = np.log(np.array([0.6, 0.3], np.float32))
        return Children(ids, values, self._levels[len(path)])


def test_nodes_cost_what_outcomes_say(monkeypatch):
    """The best child of a node is worth its path and the chance of such tokens; what was emitted
    is counted along its path alone, whether it was verified or not.
    """
    passes = DraftPasses(ConfidentBlocks(0.9, 0.4), DraftShape(8, 2, 2), lambda _: None)
    state = DraftState(None, 0, Sampling(temperature=0.0))
    one = np.ones(1, np.int32)
    plan = SimpleNamespace(
        max_depth=2 * one, max_nodes=5 * one, known=[np.array([10])], kv_len=one,
        slots=one, page_table=one[None], constrained=one == 0,
    )  # fmt: skip
    draft = passes.drafts(plan, [state], [0])[0]
    paths = dict(zip(map(tuple, paths_of(draft)), draft.score.tolist(), strict=True))
    assert paths == pytest.approx({
        (11,): 0.9 / 1.35, (12,): 0.45 / 1.35, (11, 12): 0.9 / 1.35 * 0.4,
        (11, 13): 0.9 / 1.35 * 0.2, (12, 13): 0.45 / 1.35 * 0.4,
    })  # fmt: skip
    for _ in range(50):
        passes.drafts(plan, [state], [0])
        passes.learn([state], SimpleNamespace(output_tokens=[[12, 13, 99]]))
        passes.learn([state], SimpleNamespace(output_tokens=[[11]]))  # Of a step without a draft.
    assert passes.confidence.rate(False, 0, 0.9) < 0.05
    assert passes.confidence.rate(False, 1, 0.4) > 0.9
    draft = passes.drafts(plan, [state], [0])[0]
    assert draft.score.max() < 0.05


def paths_of(draft):
    paths = {-1: []}
    for node, (token, above) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        paths[node] = [*paths[int(above)], int(token)]
        yield paths[node]


# --- map coverage --------------------------------------------------------------------------------


def step(*rows):
    """A step's outcome: what each row emitted."""
    return SimpleNamespace(output_tokens=[*map(list, rows)])


def test_tokens_outside_a_map_are_counted_and_said_once(caplog):
    coverage = MapCoverage(np.array([1, 2, 5], np.int32), 10)
    assert coverage.describe() == {"size": 3, "left_out": 0.0}
    coverage.count(step([1, 2, 9], [5], []))
    assert coverage.describe() == {"size": 3, "left_out": 0.25} and not caplog.records
    for _ in range(2 * ENOUGH):
        coverage.count(step([9]))
    (said,) = caplog.records
    assert "outside the draft's vocabulary of 3" in said.getMessage()


def test_a_map_that_holds_what_is_written_says_nothing(caplog):
    coverage = MapCoverage(np.array([1, 2], np.int32), 10)
    for _ in range(2 * ENOUGH):
        coverage.count(step([1], [2]))
    assert coverage.describe()["left_out"] == 0 and not caplog.records
