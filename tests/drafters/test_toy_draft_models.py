"""The same contract on the toy: a draft model with a cache of its own, and one without any."""

import numpy as np
import pytest

from forerun.control.policy import FixedPolicy
from forerun.drafters.model_drafter import ModelDrafter
from forerun.engine.options import EngineOptions
from forerun.engine.thread import Engine
from forerun.executors.toy import ToyExecutor
from forerun.interface.draft_model import BlockCandidates, Candidates, DraftModelTraits
from forerun.interface.grammars import NoGrammars
from forerun.models.cache_layer import CacheLayer
from forerun.speculative.draft_tree import TreeShape
from tests.engine.toys import TOKENIZER, VOCAB, ask, best, limits, logits, run

DEPTH = 3


class ToySelf:
    """The toy once more: an entry is a token, and what it says hangs on all of them.

    off  added to what it finds likeliest: 1 is never right
    """

    def __init__(self, shape, off=0):
        ids = np.arange(VOCAB, dtype=np.int32)
        self.traits = DraftModelTraits("toy self", (CacheLayer(1, 1),), ids, shape.max_nodes)
        self.entries = np.full((shape.pages, shape.page_size), -1, np.int32)
        self.roots = np.zeros(shape.slots, np.int32)
        self.paths = {}
        self.off = off

    def extend(self, extension, features):
        assert features is None
        for row, slot in enumerate(extension.slots):
            part = slice(extension.start[row], extension.start[row + 1])
            where = self._places(extension, row, extension.kv_len[row] + part.stop - part.start)
            self.entries[tuple(at[extension.kv_len[row] :] for at in where)] = extension.tokens[
                part
            ]
            self.roots[slot] = extension.next_tokens[part][-1]
        return self._candidates(
            [self._text(extension, row, int(extension.kv_len[row]) + self._length(extension, row))
             for row in np.searchsorted(extension.start, extension.scored, side="right") - 1]
        )  # fmt: skip

    def expand(self, level):
        texts = []
        for row in range(len(level.slots)):
            text = self._text(level, row, int(level.kv_len[row]))
            for node in range(level.start[row], level.start[row + 1]):
                above = self.paths[int(level.parents[node])] if level.parents[node] >= 0 else []
                self.paths[level.first + node] = [*above, int(level.tokens[node])]
                texts.append(text + self.paths[level.first + node])
        return self._candidates(texts)

    def _length(self, work, row):
        return int(work.start[row + 1] - work.start[row])

    def _places(self, work, row, length):
        position, size = np.arange(length), self.entries.shape[1]
        return work.pages[row, position // size], position % size

    def _text(self, work, row, length):
        entries = self.entries[self._places(work, row, length)]
        assert (entries >= 0).all(), "an entry is missing"
        return [*entries.tolist(), int(self.roots[work.slots[row]])]

    def _candidates(self, texts):
        found = np.array([logits(text) for text in texts], np.float32).reshape(-1, VOCAB)
        found -= np.log(np.exp(found).sum(1, keepdims=True))
        ids = np.argsort(-found, kind="stable", axis=1)
        return Candidates(
            ((ids + self.off) % VOCAB).astype(np.int32), np.take_along_axis(found, ids, 1)
        )

    def describe(self):
        return {}


class ToyBlock(ToySelf):
    """Proposes a block at once: what the toy would say greedily, and at each depth what is near."""

    def __init__(self, shape, off=0):
        super().__init__(shape, off)
        traits = self.traits
        self.traits = DraftModelTraits(
            "toy block", traits.cache, traits.target_ids, traits.max_nodes, block_size=DEPTH
        )

    def block(self, block):
        found = []
        for row in range(len(block.slots)):
            text = self._text(block, row, int(block.kv_len[row]))
            assert text[-1] == block.roots[row]
            for _ in range(block.depth):
                found.append(self._candidates([text]))
                text.append(best(text))
        shape = len(block.slots), block.depth, VOCAB
        return BlockCandidates(
            np.stack([each.ids for each in found]).reshape(shape),
            np.stack([each.log_probs for each in found]).reshape(shape),
        )


def served(kind, off=0, width=1, nodes=DEPTH, **sampling):
    """All finished choices of some requests, each as it should be; page tables of any size."""
    executor = ToyExecutor(limits(pages=120, page_size=2, max_nodes=20))
    drafter = ModelDrafter(kind(executor.limits, off), executor.limits, TreeShape(width, DEPTH))
    policy = FixedPolicy(nodes, DEPTH)
    made = Engine(executor, drafter, policy, TOKENIZER, NoGrammars(), EngineOptions())
    prompts = ["Hello", "A prompt that takes more than one step to read", "Hello there", "x"]
    requests = [ask(str(n), prompt, 23, **sampling) for n, prompt in enumerate(prompts)]
    ear = run(made, *requests)
    for request in requests:
        ear.expect(request)
    assert made.stats().failed_steps == 0
    return [(ear.tokens(request.id), ear.last(request.id).stats) for request in requests]


def counted(done):
    """Every token is accounted for: a stop token may cut what the last step said."""
    for tokens, stats in done:
        emitted = sum((a + 1) * steps for a, steps in enumerate(stats.histogram))
        cut = emitted - len(tokens)
        assert 0 <= cut <= DEPTH and stats.accepted == emitted - stats.steps
        assert cut == 0 or len(tokens) < 23
    return [sum(getattr(stats, name) for _, stats in done) for name in ("accepted", "draft_tokens")]


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_the_toy_as_its_own_draft_accepts_everything(temperature):
    accepted, draft_tokens = counted(served(ToySelf, temperature=temperature, seed=11))
    assert accepted == draft_tokens > 40


@pytest.mark.parametrize("kind", [ToySelf, ToyBlock])
def test_what_is_never_right_is_never_accepted(kind):
    accepted, draft_tokens = counted(served(kind, off=1))
    assert accepted == 0 < draft_tokens


def test_a_greedy_block_accepts_everything_at_temperature_zero():
    accepted, draft_tokens = counted(served(ToyBlock))
    assert accepted == draft_tokens > 40


@pytest.mark.parametrize("kind", [ToySelf, ToyBlock])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_change_no_text(kind, temperature):
    shape = {"width": 3, "nodes": 9}
    accepted, draft_tokens = counted(served(kind, **shape, temperature=temperature, seed=5))
    assert 0 < accepted < draft_tokens
