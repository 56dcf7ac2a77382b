"""The toy target: the worked example of its docstring, and that it notices wrong pages."""

import numpy as np
import pytest

from forerun.errors import ConfigError, EngineError
from forerun.executors.toy import ToyExecutor
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, batch
from tests.engine.toys import GREEDY, best, following, limits, logits


def ints(*values):
    return np.array(values, np.int32)


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


def test_end_where_the_sum_is_divisible_by_256():
    assert step(opened([200, 56]), plan([200, 56], 0, [0])).tokens.tolist() == [[257]]


def test_logits_shape():
    toy = opened(b"Hi")
    np.testing.assert_array_equal(toy._logits(100), logits(list(b"Hi")))
    share = np.exp(logits(list(b"Hi"))) / np.exp(logits(list(b"Hi"))).sum()
    assert share[best(list(b"Hi"))] == pytest.approx(0.393, abs=1e-3)


def test_a_tree_is_accepted_along_the_right_path_and_only_that_is_written():
    toy = opened(b"Hi")
    step(toy, plan(b"Hi", 0, [7, 9]))
    # root d; draft tokens: z, j (right), e below z (wrong parent), e below j (right)
    draft = Draft(ints(122, 106, 101, 101), ints(-1, -1, 0, 1), np.zeros(4, np.float32))
    outcome = step(toy, plan(b"d", 2, [7, 9], depth=2), draft)
    assert bytes(outcome.tokens[0].tolist()) == b"jel" and outcome.n_draft_tokens.tolist() == [4]
    assert toy._values[7].tolist() == list(b"Hidj")
    assert toy._values[9].tolist() == [ord("e"), 0, 0, 0]


def test_chunks_do_not_matter():
    toy = opened(b"Hello")
    assert step(toy, plan(b"Hel", 0, [3, 1], samples=False)).n_tokens.tolist() == [0]
    assert step(toy, plan(b"lo", 3, [3, 1])).tokens.tolist() == [following(b"Hello", 1)]


@pytest.mark.parametrize("pages", [[5], [-1], [0]])
def test_a_wrong_page_is_noticed(pages):
    toy = opened(b"Hello")
    step(toy, plan(b"Hell", 0, [3, 0], samples=False))
    with pytest.raises(EngineError, match="positions"):
        step(toy, plan(b"o", 4, [*pages, 1]))


def test_writing_where_no_page_was_reserved_is_noticed():
    with pytest.raises(EngineError, match="no page"):
        step(opened(b"Hello"), plan(b"Hello", 0, [3, -1]))


def test_seed_decides():
    def emitted(seed):
        sampling = Sampling(temperature=1.0, seed=seed)
        return step(opened(b"Hi", sampling), plan(b"Hi", 0, [0])).tokens[0, 0]

    assert len({emitted(seed) for seed in range(20)}) > 2
    assert emitted(3) == emitted(3)


def test_vocabulary_bounds():
    with pytest.raises(ConfigError):
        ToyExecutor(limits().__class__(4, 8, 1, 4, 16, 257))
