"""The toy target: the worked example of its docstring, and that it notices wrong pages."""

import numpy as np
import pytest

from forerun.errors import ConfigError, EngineError
from forerun.executors.toy import ToyExecutor
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.tree import Draft, batch
from tests.engine.toys import GREEDY, following, ints, limits


def plan(tokens, kv_len, pages, depth=0, samples=True):
    return Plan(
        slots=ints(0), kv_len=ints(kv_len), known=(ints(*tokens),),
        samples=np.array([samples]), max_nodes=ints(depth), max_depth=ints(depth),
        page_table=ints(*pages).reshape(1, -1), constrained=np.array([False]),
    )  # fmt: skip


def step(toy, step_plan, draft=None):
    trees = batch(list(step_plan.known), [draft or Draft()])
    outcome = toy.finish(toy.begin(step_plan, trees))
    toy.text.append(outcome.output_tokens[0])
    return outcome


def opened(tokens, sampling=GREEDY):
    toy = ToyExecutor(limits())
    toy.text = TokenText(list(tokens))
    toy.open(SlotInit(0, toy.text, len(tokens), sampling))
    return toy


def test_worked_example():
    assert bytes(following(b"Hi", 3)) == b"dje"
    toy = opened(b"Hi")
    assert step(toy, plan(b"Hi", 0, [7])).tokens.tolist() == [[ord("d")]]
    assert step(toy, plan(b"d", 2, [7])).tokens.tolist() == [[ord("j")]]


@pytest.mark.parametrize("pages", [[5], [-1], [0]])
def test_a_wrong_page_is_noticed(pages):
    toy = opened(b"Hello")
    step(toy, plan(b"Hell", 0, [3, 0], samples=False))
    with pytest.raises(EngineError, match="positions"):
        step(toy, plan(b"o", 4, [*pages, 1]))


def test_vocabulary_bounds():
    with pytest.raises(ConfigError):
        ToyExecutor(limits().__class__(4, 8, 1, 4, 16, 257))
