"""A draft head whose vocabulary lacks most of what a grammar wants: nothing becomes unreachable."""

import numpy as np
import pytest

from forerun.constrain.matcher.tree_mask import TreeGrammars
from forerun.control.policy import FixedPolicy
from forerun.draft_shape import DraftShape
from forerun.drafters.model_drafter import ModelDrafter
from forerun.engine.request import Finish
from forerun.engine.thread import Engine, EngineOptions
from forerun.executors.toy import ToyExecutor
from forerun.interface.draft_model import Candidates, DraftExtension, DraftLevel, DraftModelTraits
from forerun.interface.executor import ExecutorLimits
from forerun.interface.grammars import allowed
from tests.constrain.test_lossless import CASES, SAMPLINGS, completion_of, constrained, plain
from tests.constrain.tools import BYTES
from tests.engine.toys import run

VOCAB = BYTES.vocab_size + 13


class FixedHead:
    """A head device that always finds the same draft ids likeliest, whatever it is shown."""

    def __init__(self, ids) -> None:
        self.traits = DraftModelTraits("fixed", (), np.array(ids, np.int32), 64)
        self.passes = 0

    def extend(self, extension: DraftExtension, features: None) -> Candidates:
        return self._candidates(len(extension.scored), extension.candidates)

    def expand(self, level: DraftLevel) -> Candidates:
        return self._candidates(len(level.tokens), level.candidates)

    def _candidates(self, nodes: int, count: int) -> Candidates:
        self.passes += 1
        count = min(count, self.traits.vocab)
        ids = np.tile(np.arange(count, dtype=np.int32), (nodes, 1))
        return Candidates(ids, np.log(0.5 ** (1.0 + ids)).astype(np.float32))

    def describe(self) -> dict:
        return {}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("case", ["json", "choice", "city"])
@pytest.mark.parametrize(
    "ids",
    [
        [ord("#"), ord("~"), 0, 257],  # Nothing that any of the grammars allows.
        [ord("a"), ord("e"), ord('"'), ord(",")],  # A few letters of what is wanted.
        [VOCAB - 1, VOCAB - 2, ord("P"), ord("s")],  # Padding, which no tokenizer knows.
    ],
    ids=["illegal", "some", "padding"],
)
def test_a_reduced_draft_vocabulary_changes_no_token(ids, case, sampling):
    limits = ExecutorLimits(page_size=4, pages=400, slots=4, max_nodes=64, context=300, vocab=VOCAB)
    device, grammars = FixedHead(ids), TreeGrammars(VOCAB)
    drafter = ModelDrafter(device, limits, DraftShape(width=2, depth=3), grammars.mask)
    policy = FixedPolicy(6, 3, grammars)
    made = Engine(ToyExecutor(limits), drafter, policy, BYTES, grammars, EngineOptions())
    sink = run(made, constrained(case, "bytes", **SAMPLINGS[sampling]))
    assert completion_of(sink) == plain(case, "bytes", sampling)
    if sink.last().finish == Finish.STOP:
        assert CASES[case][1](sink.text())
    assert device.passes > 1, "the head ran"
    tokens, stats = sink.tokens(), sink.last().stats
    assert set(tokens) - set(ids), "tokens outside the draft's vocabulary were written"
    if len(tokens) > 2:
        assert stats.steps < len(tokens), "what is forced does not depend on the head"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_the_grammar_forbids_takes_no_place_among_the_guesses(sampling):
    """The head's two best tokens are always illegal: only with the mask do others get a turn."""
    limits = ExecutorLimits(page_size=4, pages=400, slots=4, max_nodes=64, context=300, vocab=VOCAB)
    ids = np.array([*b"#~", *range(ord("a"), ord("q"))], np.int32)
    draft_tokens = []
    for masked in (False, True):
        grammars = TreeGrammars(VOCAB)
        mask = grammars.mask if masked else lambda _: None
        drafter = ModelDrafter(FixedHead(ids), limits, DraftShape(width=2, depth=1), mask)
        made = Engine(
            ToyExecutor(limits), drafter, FixedPolicy(2, 1), BYTES, grammars, EngineOptions()
        )
        sink = run(made, constrained("letters", "bytes", **SAMPLINGS[sampling], n=8))
        draft_tokens.append(sum(sink.last(index=index).stats.draft_tokens for index in range(8)))
        assert completion_of(sink) == plain("letters", "bytes", sampling)
    assert draft_tokens[1] > draft_tokens[0]


def test_the_chance_of_what_is_illegal_is_divided():
    candidates = np.array([3, 1, 4], np.int32), np.log(np.array([0.5, 0.25, 0.125], np.float32))
    ids, log_probs = allowed(candidates, bytes([0b00010010]))
    assert ids.tolist() == [1, 4]
    assert np.exp(log_probs).tolist() == pytest.approx([0.5, 0.25])
    assert len(allowed(candidates, bytes([0]))[0]) == 0
    sure = np.array([0, 1], np.int32), np.log(np.array([0.999, 0.01], np.float32))
    assert np.exp(allowed(sure, bytes([2]))[1]) <= 1.0
