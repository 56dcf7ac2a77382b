"""What grammars know of the coming tokens is bought like everything else: live costs, one price."""

import numpy as np
import pytest

from forerun.control.adaptive import AdaptivePolicy
from forerun.control.constants import MIN_PROB
from forerun.control.policy import FIXED_MIN_PROB, FixedPolicy
from forerun.control.step_costs import StepCosts
from forerun.speculative.tree import Draft, DraftSource
from tests.control.steps import FREE, MODEL, arrays, chain, reached, report_of, seen

COSTS = StepCosts(nodes=(1, 2, 4, 8, 16), verify_ms=(4.0, 4.4, 5.2, 10.1, 20.1))


class FixedLookahead:
    """A Lookahead that knows these probabilities; remembers how likely they had to be."""

    def __init__(self, *scores):
        self.scores, self.min_probs = list(scores), []

    def predicted(self, slots, min_prob):
        self.min_probs.append(min_prob)
        return [
            [score for score in row if score >= min_prob]
            for row in [*self.scores, *[[]] * len(slots)][: len(slots)]
        ]


def held(rows):
    """Arguments of `budget` where a grammar holds some row."""
    return *arrays(rows), True


def opened(costs, rows, lookahead, nodes=2, free=True):
    policy = AdaptivePolicy(costs, nodes, nodes, FREE if free else MODEL, lookahead)
    policy.account.main.credit = 1e12  # Nothing is too dear to be tried.
    return seen(policy)


def bought(policy, *rows):
    """How many of each row's tokens are verified, given their chances."""
    drafts = [chain_of(row) for row in rows]
    return list(map(len, policy.decide(*arrays(len(rows))).select(drafts)))


def chain_of(scores):
    count = len(scores)
    tokens, parents = np.arange(count, dtype=np.int32), np.arange(-1, count - 1, dtype=np.int32)
    source = np.full(count, DraftSource.GRAMMAR)
    return Draft(tokens, parents, np.array(scores, np.float32), source)


def test_where_nodes_are_dear_only_what_is_certain_enters():
    costs = StepCosts(nodes=(1, 3, 64, 512), verify_ms=(4.0, 4.2, 54.0, 440.0))
    chances = []
    for rows in (1, 8, 64):
        known = FixedLookahead()
        policy = opened(costs, rows, known)
        reached(policy, rows, 1.0)
        policy.decide(*held(rows))
        chances += known.min_probs
    assert chances == sorted(chances)
    assert chances[0] == MIN_PROB < chances[1] and chances[2] > 0.9
    known = FixedLookahead()
    FixedPolicy(4, 4, known).decide(*held(64))
    assert known.min_probs == [FIXED_MIN_PROB]
    steep, known = StepCosts(nodes=(1, 2), verify_ms=(1.0, 9.0)), FixedLookahead()
    opened(steep, 4, known).decide(*held(4))
    assert known.min_probs == [1.0], "a forced token has probability 1"


def test_as_much_is_drafted_as_wins_more_time_than_it_costs():
    """Against every other choice, at the speed that is reached on average."""
    random = np.random.default_rng(0)
    for _ in range(40):
        sizes = random.integers(0, 7, 2)
        chains = [np.sort(random.uniform(0.02, 1.0, size))[::-1].tolist() for size in sizes]
        policy = opened(COSTS, 2, None)
        speed = float(random.uniform(1.0, 3.0))
        reached(policy, 2, speed)
        per_ms = speed * 2 / float(COSTS.verify(np.array(2)))

        def won(counts, chains=chains, per_ms=per_ms):
            tokens = sum(sum(chain[:n]) for chain, n in zip(chains, counts, strict=True))
            return tokens - per_ms * float(COSTS.verify(np.array(2 + sum(counts))))

        every = [(a, b) for a in range(sizes[0] + 1) for b in range(sizes[1] + 1)]
        assert won(bought(policy, *chains)) >= max(map(won, every)) - 1e-5
    assert bought(opened(COSTS, 2, None), [], []) == [0, 0]


def test_a_row_gets_room_for_what_would_be_bought_and_its_reason():
    policy = opened(COSTS, 2, FixedLookahead([], [1.0, 0.9, 0.9]))
    budgets = policy.decide(*held(2)).rows
    assert [(b.nodes, b.depth) for b in budgets] == [(2, 2), (3, 3)]
    assert budgets[1].reason.endswith("; 3 tokens known from the grammar")
    fixed = FixedPolicy(2, 2, FixedLookahead([1.0], [1.0, 0.9, 0.9])).decide(*held(2)).rows
    assert [(b.nodes, b.depth) for b in fixed] == [(2, 2), (3, 3)]


def test_costs_that_were_corrected_price_what_a_grammar_knows_too():
    """Start-up said that a node costs next to nothing; steps say that it costs a step."""
    cheap = StepCosts((1, 2, 4, 8, 16), (4.0, 4.0, 4.0, 4.0, 4.0))
    known = FixedLookahead([0.6, 0.6, 0.6])
    policy = opened(cheap, 1, known, nodes=1)
    assert policy.decide(*held(1)).rows[0].nodes == 3
    for step in range(600):
        nodes = (1, 2, 4)[step % 3]
        if nodes == 1:
            policy.account.costs.learn_plain(1, 64, False, 4.0)
        else:
            policy.account.costs.learn(1, nodes, 64, nodes)
    for _ in range(20):
        room = policy.decide(*held(1)).rows[0].nodes
    assert room <= 1 and known.min_probs[-1] > 0.6


def test_while_speculation_is_disabled_only_what_is_certain_is_drafted():
    """What a grammar forces cannot be wrong, so it loses nothing, whatever the credit."""
    known = FixedLookahead([1.0, 1.0, 0.9])
    policy = opened(COSTS, 2, known)
    policy.account.main.credit, policy.account.main.empty = -0.1, True
    budgets = policy.decide(*held(2)).rows
    assert [budget.nodes for budget in budgets] == [2, 0] and known.min_probs == [1.0]
    assert bought(policy, [1.0, 1.0, 0.9], [0.9]) == [2, 0]
    policy.account.main.credit, policy.account.main.empty = 8.0, False
    policy.disable("speculation is off: it failed")
    budgets = policy.decide(*held(2)).rows
    assert [budget.nodes for budget in budgets] == [3, 0]
    assert budgets[1].reason == "speculation is off: it failed"


def test_easy_text_makes_a_doubtful_draft_token_dear():
    """Where most steps bring much, their time is worth more."""
    easy, hard = opened(COSTS, 1, None), opened(COSTS, 1, None)
    for policy, tokens in ((easy, 4), (hard, 1)):
        for _ in range(100):
            policy.observe(report_of([[0] * tokens], [3], 5.2, cached=0))
        policy.account.main.credit = 1e12
    assert bought(easy, [0.3]) == [0] and bought(hard, [0.3]) == [1]
    assert bought(easy, [1.0] * 6) == [6], "what is certain is worth it"
    assert easy.account.main.of(1).speed == pytest.approx(4 / 1.3, rel=0.05)


def test_over_many_steps_the_price_is_faster_than_any_step_by_itself():
    """Steps of two kinds in turns, sure and doubtful: more tokens per millisecond than with as
    many draft tokens as make each step the fastest.
    """
    kinds = ([1.0] * 3 + [0.85] * 4, [0.2, 0.15, 0.12])

    def greedy(scores):
        ms = COSTS.verify(1 + np.arange(len(scores) + 1))
        return int(np.argmax((1 + np.append(0, np.cumsum(scores))) / ms))

    def speed(choose, policy=None):
        tokens = ms = over = 0.0
        for step in range(400):
            scores = kinds[step % 2]
            count = choose(scores)
            brought, time = 1 + sum(scores[:count]), float(COSTS.verify(np.array(1 + count)))
            if policy is not None:
                over += brought
                policy.observe(report_of([[0] * int(over)], [count], time, allowed=[8], cached=0))
                over -= int(over)
            if step >= 200:
                tokens, ms = tokens + brought, ms + time
        return tokens / ms

    policy = opened(COSTS, 1, None)
    assert speed(lambda scores: bought(policy, scores)[0], policy) > 1.03 * speed(greedy)


@pytest.mark.parametrize("free", [True, False])
def test_what_is_forced_teaches_the_policy_nothing_about_its_drafter(free):
    policy = opened(COSTS, 2, FixedLookahead([], [1.0] * 3), free=free)

    def learned():
        rates = [] if policy.shapes is None else policy.shapes.rates()
        return policy.drafts.calibration.share, rates

    before = learned()
    nothing, facts = chain([]), {"allowed": [2, 3]}
    forced = chain_of([1.0] * 3)
    policy.observe(report_of([[1], [1, 2, 3, 4]], [0, 3], 5.2, proposed=[nothing, forced], **facts))
    assert learned() == before
    both = [nothing, joined(chain([0.5, 0.5]), forced)]
    policy.observe(report_of([[1], [0, 8]], [0, 3], 5.2, proposed=both, **facts))
    assert policy.drafts.calibration.share < before[0], "the grammar was right, not the drafter"


def joined(drafted, known):
    """One draft with what a drafter and what a grammar says of the same place."""
    sources = [*drafted.sources(), *known.sources()]
    parents = np.append(drafted.parents, np.where(known.parents < 0, -1, known.parents + 2))
    return Draft(
        np.append(drafted.tokens, known.tokens),
        parents.astype(np.int32),
        np.append(drafted.score, known.score),
        np.array(sources, np.int32),
    )
