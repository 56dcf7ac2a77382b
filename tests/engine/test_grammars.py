"""The engine's side of structured output, with a grammar simple enough to read here."""

from dataclasses import dataclass

import numpy as np
import pytest

from forerun.control.policy import FixedPolicy
from forerun.engine.request import GRAMMAR_LIMIT, Finish
from forerun.engine.thread import Engine, EngineOptions
from forerun.errors import RequestError
from forerun.executors.toy import ToyExecutor
from forerun.interface.grammars import Committed
from forerun.speculative.tree import NodeMasks
from tests.engine.toys import TOKENIZER, VOCAB, ask, drafter, limits, run

DIGITS = range(48, 58)


@dataclass(frozen=True)
class Digits:
    """So many digits and nothing else. `trouble`: where the matcher breaks down."""

    count: int
    trouble: str = ""


class DigitGrammars:
    def __init__(self):
        self.left: dict[int, int] = {}
        self.trouble: dict[int, str] = {}

    def open(self, slot, grammar, output, tenant=0):
        assert slot not in self.left
        if grammar.trouble == "open":
            raise RequestError("no such grammar", "grammar")
        self.left[slot] = grammar.count - sum(1 for token in output if token in DIGITS)
        self.trouble[slot] = grammar.trouble

    def close(self, slot):
        self.left.pop(slot, None)
        self.trouble.pop(slot, None)

    def ready(self, slot, grammar):
        return True

    def filter_and_extend_drafts(self, slots, drafts, nodes, depth):
        return drafts

    def masks(self, slots, trees):
        """Mask 0 allows digits, mask 1 the end: for nodes with no digit left to come."""
        allowed = np.zeros((2, -(-VOCAB // 32) * 32), np.uint8)
        allowed[0, list(DIGITS)] = 1
        allowed[1, 257] = 1
        row = np.full(len(trees.tokens), -1, np.int32)
        for b, slot in enumerate(slots.tolist()):
            if slot not in self.left:
                continue
            for node in trees.nodes(b):
                draft_tokens = int(trees.depth[node] - trees.depth[trees.root(b)])
                row[node] = self.left[slot] <= draft_tokens
        bits = np.packbits(allowed, axis=1, bitorder="little")
        return NodeMasks(row, bits.view(np.uint32))

    def commit(self, slot, tokens):
        if self.trouble[slot] == "commit":
            raise RequestError("the matcher lost its way", "grammar")
        if self.trouble[slot] == "limit":
            return Committed(0, error="the matcher is stuck")
        left = self.left[slot]
        digits = tokens[:left]
        assert all(token in DIGITS for token in digits)
        self.left[slot] -= len(digits)
        return Committed(len(digits), complete=not self.left[slot])


def engine(name="none", **shape):
    executor = ToyExecutor(limits(**shape))
    policy = FixedPolicy(4, 1) if name != "none" else FixedPolicy(0, 0)
    grammars = DigitGrammars()
    made = Engine(
        executor, drafter(name, executor.limits.slots), policy, TOKENIZER, grammars, EngineOptions()
    )
    return made, grammars


@pytest.mark.parametrize("name", ["none", "erratic"])
def test_text_follows_the_grammar_and_ends_with_it(name):
    made, grammars = engine(name)
    free = ask("free")
    sink = run(made, ask("digits", grammar=Digits(6), max_tokens=30), free)
    sink.expect(free)
    assert sink.text("digits").isdigit() and sink.last("digits").finish == Finish.STOP
    assert len(sink.text("digits")) == 6
    assert not grammars.left


@pytest.mark.parametrize("trouble", ["open", "limit", "commit"])
def test_a_failing_grammar_ends_its_request_only(trouble):
    made, grammars = engine()
    good = ask("good")
    sink = run(made, ask("bad", grammar=Digits(5, trouble), n=2), good)
    sink.expect(good)
    for index in range(2):
        assert sink.last("bad", index).finish == Finish.ERROR and sink.last("bad", index).error
    assert sink.text("bad") == ""
    assert not grammars.left and made.alive


@pytest.mark.parametrize("name", ["none", "erratic"])
def test_what_came_before_a_limit_is_delivered_and_the_limit_named(name):
    """Wherever in a step it is reached."""
    made, grammars = engine(name)
    commit = grammars.commit

    def limited(slot, tokens):
        decided = 20 - grammars.left[slot]
        if decided + len(tokens) > 7:
            return Committed(7 - decided, error="Too many items (limit 200000)")
        return commit(slot, tokens)

    grammars.commit = limited
    free = ask("free")
    sink = run(made, ask("digits", grammar=Digits(20), max_tokens=30), free)
    sink.expect(free)
    last = sink.last("digits")
    assert len(sink.text("digits")) == 7 == len(sink.tokens("digits"))
    assert last.finish == Finish.ERROR and last.code == GRAMMAR_LIMIT
    assert "after 7 tokens" in last.error and "Too many items (limit 200000)" in last.error
