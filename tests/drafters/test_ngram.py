"""N-gram lookup: its index against brute force, and the shape of what it proposes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.drafters import ngram
from forerun.drafters.ngram import NgramDrafter, coupled, coupling
from forerun.interface.plan import Outcome, Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.noise import gumbel
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import DraftSource, batch
from tests.engine.toys import GREEDY, ints

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def begun(tokens, min_prob=0.0):
    drafter = NgramDrafter(2, min_prob)
    begin(drafter, SlotInit(1, TokenText(tokens), len(tokens), GREEDY))
    return drafter


def begin(drafter, slot_init):
    """Begin, and keep the text for `emit`."""
    drafter.begin(slot_init)
    drafter.text = slot_init.text


def plan(nodes, depth):
    return Plan(
        slots=ints(1), kv_len=ints(0), known=(ints(0),), samples=np.array([True]),
        max_nodes=ints(nodes), max_depth=ints(depth), page_table=ints(0).reshape(1, 1),
        constrained=np.array([False]),
    )  # fmt: skip


def propose(drafter, nodes=8, depth=8):
    (draft,) = drafter.propose(plan(nodes, depth))
    return draft


def emit(drafter, tokens):
    """The target said `tokens`."""
    step = plan(0, 0)
    outcome = Outcome(ints(len(tokens)), ints(*tokens).reshape(1, -1), ints(0), np.array([True]))
    trees = batch(list(step.known), drafter.propose(step))
    drafter.text.append(tokens)
    drafter.observe(step, trees, outcome)


def paths(draft):
    """Every root-to-node path as a tuple of tokens."""
    result = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        result.append((result[parent] if parent >= 0 else ()) + (token,))
    return result


@given(TEXTS, TEXTS, st.integers(1, 4))
def test_chains_link_equal_runs(prompt, output, order):
    chains = ngram._Chains(order, np.array(prompt, np.int32))
    text = list(prompt)
    for step, token in enumerate(output):
        text.append(token)
        if step % 3:
            chains.extend(text)
    chains.extend(text)
    for end in range(len(text) + 1):
        run = text[end - order : end]
        earlier = [
            place for place in range(order, end) if text[place - order : place] == run
        ] if end >= order else []  # fmt: skip
        assert chains.before[end] == max(earlier, default=-1)


@given(TEXTS, TEXTS, st.integers(0, 6), st.integers(1, 5))
def test_guesses_are_continuations_that_came_before(prompt, output, nodes, depth):
    text = [*prompt, 9, *output] if prompt else [9, *output]
    drafter = begun([*prompt, 9] if prompt else [9])
    for token in output:
        emit(drafter, [token])
    draft = propose(drafter, nodes, min(nodes, depth))
    assert len(draft) <= nodes
    actual = paths(draft)
    assert len(set(actual)) == len(actual), "siblings are distinct"
    for index, path in enumerate(actual):
        assert draft.parents[index] < index and len(path) <= depth
        upper = draft.score[draft.parents[index]] if draft.parents[index] >= 0 else 1.0
        assert 0 < draft.score[index] <= upper
        wanted = [text[-1], *path]
        assert any(text[i : i + len(wanted)] == wanted for i in range(len(text)))


@pytest.mark.parametrize(("agree", "sure"), [(15, 0.93), (16, 0.97), (30, 0.97)])
def test_a_copy_is_surer_than_a_phrase(agree, sure):
    """A copy's draft tokens are worth verifying deep below the root."""
    draft = propose(begun([*range(100, 160), *range(100, 100 + agree)]), 12, 12)
    votes = [min(agree, 16) + depth for depth in range(12)]
    highest = [0.97 if each >= 16 else 0.93 for each in votes]
    expected = [one * each**2 / (7 + each**2) for one, each in zip(highest, votes, strict=True)]
    assert draft.score == pytest.approx(np.cumprod(expected), rel=1e-5)
    assert expected[0] == pytest.approx(sure * votes[0] ** 2 / (7 + votes[0] ** 2))


def test_nothing_came_before():
    assert len(propose(begun([1, 2, 3, 4, 5]))) == 0
    assert len(propose(begun([1]))) == 0


def test_the_longest_agreement_comes_first():
    # "2 3 4" was followed by 7, and "4" alone, more recently, by 8.
    draft = propose(begun([1, 2, 3, 4, 7, 5, 4, 8, 1, 2, 3, 4]), nodes=32)
    assert paths(draft)[0] == (7,) and (8,) in paths(draft)


def test_competing_continuations_make_a_tree():
    draft = propose(begun([5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2, 3, 8, 1, 2]))
    assert {(3,), (4,), (3, 8)} <= set(paths(draft))
    assert paths(draft)[0] == (3,), "twice beats once"
    assert draft.score[0] > draft.score[paths(draft).index((4,))]


def test_a_recent_place_beats_an_old_one():
    draft = propose(begun([1, 2, 5, 1, 2, 6, 1, 2]), nodes=1)
    assert paths(draft) == [(6,)]


def test_repetition_is_followed_all_the_way():
    draft = propose(begun([1, 2, 3, 4, 5, 6] * 3), nodes=5, depth=5)
    assert paths(draft)[-1] == (1, 2, 3, 4, 5)
    score = 1.0
    for level, log_prob in enumerate(draft.score.tolist()):
        # Two places agree, in 12 tokens and in 6, and in one more at every level.
        votes = (12 + level) ** 2 + (6 + level) ** 2
        sure = ngram.SUREST if 12 + level >= ngram.LONGEST else ngram.SURE
        score *= sure * votes / (votes + ngram.DOUBT)
        assert log_prob == pytest.approx(score, rel=1e-5)


@pytest.mark.parametrize(("nodes", "depth", "count"), [(0, 0, 0), (8, 3, 3), (2, 8, 2)])
def test_limits(nodes, depth, count):
    assert len(propose(begun(list(range(9)) * 3), nodes, depth)) == count


def test_weak_guesses_are_left_out():
    tokens = [1, 2, 3, 1, 4, 5, 1]
    assert len(propose(begun(tokens))) > len(propose(begun(tokens, min_prob=0.3)))
    assert propose(begun(tokens, min_prob=0.1)).score.min() >= 0.1


def test_slots_are_independent_and_end():
    drafter = begun([1, 2, 1, 2])
    drafter.begin(SlotInit(0, TokenText([5]), 1, GREEDY))
    drafter.end(1)
    begin(drafter, SlotInit(1, TokenText([7, 8, 9]), 3, GREEDY))
    assert len(propose(drafter)) == 0
    emit(drafter, [7])
    assert paths(propose(drafter))[0] == (8,)


def predicted(prediction, tokens):
    drafter = NgramDrafter(2, 0.0)
    begin(drafter, SlotInit(1, TokenText(tokens), len(tokens), GREEDY, ints(*prediction)))
    return drafter


def test_a_prediction_is_what_follows_the_prompt():
    drafter = predicted([7, 8, 9, 10], [1, 2, 3])
    draft = propose(drafter)
    assert paths(draft)[-1] == (7, 8, 9, 10), "and nothing behind its end"
    assert set(draft.sources()) == {DraftSource.PREDICTION}
    emit(drafter, [7, 8, 5])
    assert len(propose(drafter)) == 0
    emit(drafter, [9])
    assert paths(propose(drafter)) == [(10,)]


def test_what_the_text_says_counts_beside_a_prediction():
    draft = propose(predicted([7, 1, 2, 8], [1, 2, 9, 1, 2]), nodes=64)
    sources = dict(zip(paths(draft), draft.sources(), strict=True))
    assert sources[(7,)] == sources[(8,)] == DraftSource.PREDICTION
    assert sources[(9,)] == DraftSource.NGRAM


@pytest.mark.parametrize(
    ("temperature", "wins"),
    [
        (0.8, 0.05),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.4, 0.01), (1.0, 0.08))),
    ],
)
def test_noise_tells_what_comes(temperature, wins):
    """A text of which the chances are known about: what the target chose, by noise, is likelier
    once the noise is known, and by as much as is said of it.
    """
    random, sampling = np.random.default_rng(3), Sampling(temperature=temperature, seed=11)
    noise = coupling(sampling)
    before = after = said = best = 0.0
    for position in range(3000):
        believed = random.dirichlet(np.full(8, 0.5))
        logits = np.log(believed + 1e-9) + random.normal(0.0, 1.0 / temperature, 8)
        chosen = int(np.argmax(logits + gumbel(11, position, 8)))
        chances = coupled(believed[:6].tolist(), 1.0, noise, position, list(range(6)))
        assert sum(chances) < 1.0
        if chosen < 6:
            before += np.log(believed[chosen] + 1e-9)
            after += np.log(chances[chosen] + 1e-9)
        said += max(chances)
        best += chances.index(max(chances)) == chosen
    assert (after - before) / 3000 > wins
    assert best / 3000 == pytest.approx(said / 3000, abs=0.1)


def test_greedy_answers_know_no_noise():
    assert coupling(GREEDY).strength == 0.0 and coupling(Sampling(temperature=2.0)).strength == 0.5


@pytest.mark.parametrize("output", [0, 2])
def test_noise_is_of_the_output_position(output):
    """What was written before a preemption is no prompt; each level is a position further."""
    tokens, sampling = [1, 2, 1, 3, 1, 2, 1, 3, 1], Sampling(temperature=0.8, seed=5)
    made = {}
    for heat in (GREEDY, sampling):
        drafter = NgramDrafter(2, 0.0)
        drafter.begin(SlotInit(1, TokenText(tokens), len(tokens) - output, heat))
        made[heat] = propose(drafter, 64, 2)
    plain, warm = (
        dict(zip(paths(made[heat]), made[heat].score.tolist(), strict=True)) for heat in made
    )
    noise, first = coupling(sampling), sorted(path[0] for path in plain if len(path) == 1)
    chances = [plain[(token,)] for token in first]
    expected = coupled(chances, 1.0, noise, output, first)
    assert [warm[(token,)] for token in first] == pytest.approx(expected, rel=1e-5)
    below = sorted(path[1] for path in plain if len(path) == 2 and path[0] == first[0])
    chances = [plain[first[0], token] / plain[(first[0],)] for token in below]
    after = warm[(first[0],)]
    expected = [after * each for each in coupled(chances, 1.0, noise, output + 1, below)]
    assert below and [warm[first[0], token] for token in below] == pytest.approx(expected, rel=1e-5)
