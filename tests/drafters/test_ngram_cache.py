"""Counting what follows in finished answers: against brute force, within bounds, for drafts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.drafters.native_ngram import CpuNgramDrafter
from forerun.drafters.ngram import COUNTED, NgramDrafter
from forerun.drafters.ngram_cache import DISCOUNT, FOLLOWERS, LONGEST, MOST_COUNT, NgramCache
from forerun.drafts.ngram_table import interpolated
from forerun.speculative.tree import DraftSource
from tests.cpu.test_ngram import outcome_of, plan_of, slot_init
from tests.cpu.test_ngram import table_of as table_of_answers

ANSWERS = st.lists(st.lists(st.integers(0, FOLLOWERS - 1), max_size=30), max_size=6)


def follow(cache, text):
    return interpolated(cache.levels(text))


BOTH = pytest.mark.parametrize("kind", [NgramDrafter, CpuNgramDrafter])


def discounted(answers, text):
    """What the docstring says, by counting everything again: no token is ever left out, because
    there are only FOLLOWERS kinds.
    """
    chances = {}
    for length in range(1, LONGEST + 1):
        context = text[len(text) - length :]
        if len(text) < length:
            break
        counts = Counter(
            answer[end]
            for answer in answers
            for end in range(length, len(answer))
            if answer[end - length : end] == context
        )
        if not counts:
            break
        rest = DISCOUNT * len(counts) / counts.total()
        chances = {token: rest * chance for token, chance in chances.items()}
        for token, count in counts.items():
            share = (count - DISCOUNT) / counts.total()
            chances[token] = chances.get(token, 0.0) + share
    return chances


@given(ANSWERS, st.lists(st.integers(0, FOLLOWERS - 1), max_size=6))
def test_chances_are_counts_with_a_discount(answers, text):
    cache = NgramCache(1 << 20)
    for answer in answers:
        cache.learn(answer, 0)
    assert follow(cache, text) == pytest.approx(discounted(answers, text))
    assert sum(follow(cache, text).values()) <= 1.0 + 1e-9


def test_only_what_is_new_is_counted():
    cache = NgramCache(100)
    cache.learn([1, 2, 3, 4], 3)
    assert follow(cache, [3]) == {4: 0.25} and not follow(cache, [2])
    assert cache.contexts == 3


def test_a_rare_follower_gives_way():
    cache = NgramCache(100)
    for token in (5, 5, 6, 6, 7, 7, 8):
        cache.learn([1, token], 1)
    assert set(follow(cache, [1])) == {5, 6, 7, 8}
    cache.learn([1, 9], 1)
    assert set(follow(cache, [1])) == {5, 6, 7, 9}
    assert follow(cache, [1])[5] == (2 - DISCOUNT) / 8


def test_counts_stay_small():
    cache = NgramCache(100)
    for _ in range(MOST_COUNT + 10):
        cache.learn([1, 2], 1)
    assert cache._recent[0, 1].total < MOST_COUNT
    assert follow(cache, [1])[2] > 0.999


def test_what_was_not_counted_for_long_is_forgotten():
    cache = NgramCache(40)
    cache.learn([1, 2], 1)
    for token in range(100, 130):
        cache.learn([token, 3], 1)
        cache.learn([token + 1000, 3], 1)
        assert cache.contexts <= 40
        cache.learn([7, 8], 1)
    assert not follow(cache, [1])
    assert follow(cache, [7]) == {8: pytest.approx(1.0, abs=0.05)}


def test_nothing_is_kept_without_capacity():
    cache = NgramCache(0)
    cache.learn([1, 2, 3], 0)
    assert not cache.contexts and not follow(cache, [1])


def answered(drafter, prompt, answer, steps=True):
    """Serve one answer; returns the draft tokens of its first step."""
    opened = slot_init(0, prompt)
    drafter.begin(opened)
    plan = plan_of([0], [8], [8])
    (draft,) = drafter.propose(plan)
    if steps:
        opened.text.append(answer)
        drafter.observe(plan, None, outcome_of([answer]))
    drafter.end(0)
    return draft


def begun(drafter, opened):
    """Begin, and return the text, which grows."""
    drafter.begin(opened)
    return opened.text


def say(drafter, text, tokens):
    """What the target said in a step that might have had a draft token."""
    plan = plan_of([0], [1], [1])
    drafter.propose(plan)
    text.append(tokens)
    drafter.observe(plan, None, outcome_of([tokens]))


@BOTH
def test_counting_costs_a_part_of_looking(kind):
    """Nothing without a lookup; the end of an answer where there is one now and then."""
    drafter, resting = kind(1, 0.0, None, 1000), plan_of([0], [0], [0])
    text = [*range(100, 140)]
    for looks, known in ((0, 0), (1, 4 * COUNTED)):
        said = begun(drafter, slot_init(0, [1, 2, 3, 4]))
        for _ in range(looks):
            drafter.propose(plan_of([0], [1], [1]))
        for token in text:
            drafter.propose(resting)
            said.append([token])
            drafter.observe(resting, None, outcome_of([[token]]))
        drafter.end(0)
        assert drafter.describe()["cache"] == known


@BOTH
def test_the_next_sequence_profits(kind):
    drafter = kind(1, 0.05, None, 1000)
    assert not len(answered(drafter, [1, 2, 3], [4, 5, 6, 7]))
    draft = answered(drafter, [9, 2, 3], [], steps=False)
    assert draft.tokens.tolist()[0] == 4 and set(draft.sources()) == {DraftSource.TABLE}
    # The prompt was not counted.
    assert not len(answered(drafter, [9, 2], [], steps=False))


@BOTH
def test_an_answer_that_is_interrupted_is_counted_once(kind):
    """A preempted sequence ends, and begins again with what it has said so far."""
    drafter = kind(1, 0.0, None, 1000)
    text = begun(drafter, slot_init(0, [1]))
    say(drafter, text, [2, 3])
    drafter.end(0)
    before = drafter.describe()["cache"]
    drafter.begin(slot_init(0, [1, 2, 3], output=2))
    drafter.end(0)
    assert drafter.describe()["cache"] == before == 3
    (draft,) = answered(drafter, [1], []).score.tolist()[:1]
    assert draft == pytest.approx(1 - DISCOUNT)


@BOTH
@pytest.mark.parametrize("other", [0, 2, (1 << 64) - 1])
def test_answers_of_one_tenant_draft_for_no_other(kind, other):
    """Neither drafts nor their speed may show what another tenant's answers were."""
    drafter = kind(1, 0.0, None, 1000)

    def first_draft(tenant, prompt):
        drafter.begin(replace(slot_init(0, prompt), tenant=tenant))
        (draft,) = drafter.propose(plan_of([0], [8], [8]))
        drafter.end(0)
        return draft.tokens.tolist()

    text = begun(drafter, replace(slot_init(0, [1]), tenant=1))
    say(drafter, text, [2, 3])
    drafter.end(0)
    assert drafter.describe()["cache"] == 3
    assert first_draft(other, [1]) == [] and first_draft(1, [1]) == [2, 3]
    # The same tokens of two tenants are counted apart.
    text = begun(drafter, replace(slot_init(0, [1]), tenant=other))
    say(drafter, text, [7, 8])
    drafter.end(0)
    assert drafter.describe()["cache"] == 6
    assert first_draft(other, [1]) == [7, 8] and first_draft(1, [1]) == [2, 3]


@BOTH
def test_a_prediction_is_no_answer(kind):
    drafter = kind(1, 0.0, None, 1000)
    text = begun(drafter, slot_init(0, [1, 2], [3, 4, 5, 6]))
    say(drafter, text, [7, 8])
    drafter.end(0)
    # After 2 and 1, 2; after 7, 2 7 and 1 2 7.
    assert drafter.describe()["cache"] == 5


@BOTH
def test_answers_are_counted_beside_a_table(kind):
    """What one's own answers say of a context weighs more than what the table does, as far as it
    was seen; the table speaks where nothing was.
    """
    drafter = kind(1, 0.0, table_of_answers([[1, 2, 3]] * 3, 10), 1000)
    assert answered(drafter, [1], [7, 8, 9]).tokens.tolist()[:2] == [2, 3]
    for _ in range(3):
        answered(drafter, [1], [7, 8, 9])
    assert drafter.describe()["table"] > 0 and drafter.describe()["cache"] == 6
    draft = answered(drafter, [1], [], steps=False)
    assert draft.tokens.tolist()[0] == 7 and 2 in draft.tokens.tolist()


@BOTH
def test_a_table_may_come_later(kind):
    drafter = kind(1, 0.0, None, 0)
    assert not len(answered(drafter, [1], [], steps=False))
    drafter.use(table_of_answers([[1, 2, 3]] * 3, 10))
    assert answered(drafter, [1], [], steps=False).tokens.tolist() == [2, 3]
    assert drafter.describe()["table"] > 0


def test_a_language_is_learned():
    """Acceptance: of a source whose every token depends on two before, two in three of which are
    the likely one.
    """
    random = np.random.default_rng(3)
    likely = random.integers(0, 20, (20, 20))

    def answer():
        text = random.integers(0, 20, 2).tolist()
        while len(text) < 120:
            sure = random.random() < 0.67
            text.append(int(likely[text[-2], text[-1]] if sure else random.integers(0, 20)))
        return text

    def tokens_per_step(drafter, text):
        known = begun(drafter, slot_init(0, text[:2]))
        at, steps = 2, 0
        plan = plan_of([0], [8], [8])
        while at < len(text):
            (draft,) = drafter.propose(plan)
            node, taken = -1, 0
            children = {
                (parent, token): index
                for index, (token, parent) in enumerate(
                    zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)
                )
            }
            while at + taken < len(text):
                node = children.get((node, text[at + taken]))
                taken += 1
                if node is None:
                    break
            known.append(text[at : at + taken])
            drafter.observe(plan, None, outcome_of([text[at : at + taken]]))
            at, steps = at + taken, steps + 1
        drafter.end(0)
        return (len(text) - 2) / steps

    plain, learning = CpuNgramDrafter(1, 0.05), CpuNgramDrafter(1, 0.05, None, 1 << 16)
    texts = [answer() for _ in range(80)]
    alone = np.mean([tokens_per_step(plain, text) for text in texts[60:]])
    early = np.mean([tokens_per_step(learning, text) for text in texts[:60]])
    later = np.mean([tokens_per_step(learning, text) for text in texts[60:]])
    assert alone < 1.4 < early < later
    assert later > 2.0
