"""The host sampler: several rows, reports, chunks, failures, and an executor's own fast way."""

import math

import numpy as np
import pytest

from forerun.errors import EngineError
from forerun.executors.host_sampler import HostSampler
from forerun.interface.plan import Round
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.accept import choose
from forerun.speculative.sampling import History, Sampling, process
from forerun.speculative.tree import NodeMasks, batch
from tests.speculative.worlds import NO_DRAFT, V, as_draft, bits, plan_of

GREEDY = Sampling(temperature=0.0)


def slot_init(
    slot: int, tokens: list[int], prompt_len: int, sampling: Sampling = GREEDY
) -> SlotInit:
    return SlotInit(slot, TokenText(tokens), prompt_len, sampling)


def next_is(*tokens: int):
    """Logits of flat node i peak at tokens[i]."""
    table = np.zeros((len(tokens), V), np.float32)
    table[np.arange(len(tokens)), tokens] = 5.0
    return table


def run(sampler, plan, drafts, table, masks=None):
    trees = batch(list(plan.known), drafts)
    nodes: set[int] = set()

    def logits(node):
        nodes.add(node)
        return table[node]

    outcome = sampler.finish(Round(plan, trees), logits, masks)
    for row, tokens in enumerate(outcome.output_tokens):
        sampler.of_row(plan, row).text.append(tokens)
    assert nodes <= set(sampler.scored(plan, trees).tolist())
    return [outcome.permanent(trees, row) for row in range(plan.rows)], outcome


def test_rows_of_every_kind_in_one_step():
    """A chunk that stops short, a chunk that ends, plain decoding, a chain half right."""
    sampler = HostSampler(6, V)
    sampler.open(slot_init(0, [1, 2, 3, 4, 5], 5))
    sampler.open(slot_init(5, [1, 2, 3], 3))
    sampler.open(slot_init(2, [1, 2], 1))
    sampler.open(slot_init(3, [7, 7], 2))
    plan = plan_of(
        [0, 5, 2, 3], [1, 0, 1, 1], [[2, 3], [1, 2, 3], [2], [7]], [False, True, True, True]
    )
    drafts = [NO_DRAFT, NO_DRAFT, NO_DRAFT, as_draft([4, 5, 6], [-1, 0, 1])]
    #                  chunk | chunk    | plain | root, its three draft tokens
    table = next_is(0, 0, 0, 0, 6, 3, 4, 5, 0, 1)
    paths, outcome = run(sampler, plan, drafts, table)
    assert [path.tolist() for path in paths] == [[0, 1], [2, 3, 4], [5], [6, 7, 8]]
    assert [path.tolist() for path in outcome.paths] == [[], [], [], [7, 8]]
    assert all(path.dtype == np.int32 for path in paths)
    assert outcome.n_tokens.tolist() == [0, 1, 1, 3]
    assert outcome.tokens.tolist() == [[-1, -1, -1], [6, -1, -1], [3, -1, -1], [4, 5, 0]]
    assert outcome.n_draft_tokens.tolist() == [0, 0, 0, 3]
    assert outcome.finite.tolist() == [True] * 4
    assert outcome.logprobs == outcome.prompt_logprobs == ((),) * 4
    assert outcome.committed(plan) == [2, 3, 1, 3]


def test_only_what_is_needed_is_scored():
    sampler = HostSampler(4, V)
    for slot, echo in enumerate([None, None, 0, 0]):
        sampler.open(slot_init(slot, [1, 2, 3], 3, Sampling(prompt_logprobs=echo)))
    plan = plan_of([0, 1, 2, 3], [0, 1, 0, 1], [[1, 2], [2, 3], [1, 2], [2, 3]], [False, True] * 2)
    draft_token = as_draft([1], [-1])
    trees = batch(list(plan.known), [NO_DRAFT, draft_token, NO_DRAFT, draft_token])
    #                                              0 1 | 2 3 4 | 5 6 | 7 8 9
    assert sampler.scored(plan, trees).tolist() == [3, 4, 5, 6, 7, 8, 9]


def test_a_resumed_sequence_goes_on_as_if_never_interrupted():
    """After preemption `tokens` holds output too; positions and penalties must continue."""
    sampling = Sampling(seed=11, frequency_penalty=1.0, temperature=1.5)
    logits = np.random.default_rng(0).normal(size=(1, V)).astype(np.float32)
    whole, resumed = HostSampler(1, V), HostSampler(1, V)
    whole.open(slot_init(0, [1, 2], 2, sampling))
    text = [1, 2]
    for _ in range(20):
        plan = plan_of([0], [len(text) - 1], [text[-1:]], [True])
        resumed.close(0)
        resumed.open(slot_init(0, text, 2, sampling))
        _, outcome = run(whole, plan, [NO_DRAFT], logits)
        _, other = run(resumed, plan, [NO_DRAFT], logits)
        assert outcome.tokens.tolist() == other.tokens.tolist()
        text += outcome.tokens[0].tolist()
    assert len(set(text)) > 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=2), Sampling(logit_bias=((5, -9.0),))])
def test_a_failing_root_fails_its_row_alone(bad, sampling):
    sampler = HostSampler(3, V)
    for slot in range(3):
        sampler.open(slot_init(slot, [1, 2], 2, sampling))
    plan = plan_of([0, 1, 2], [0, 0, 0], [[1, 2]] * 3, [True] * 3)
    table = next_is(0, 3, 0, 3, 0, 3)
    table[3, 5] = bad
    paths, outcome = run(sampler, plan, [NO_DRAFT] * 3, table)
    assert outcome.finite.tolist() == [True, False, True]
    assert outcome.n_tokens.tolist() == [1, 0, 1]
    assert paths[1].tolist() == [2, 3]


def test_a_failing_guess_ends_the_path_before_it():
    """Plain decoding would emit 4 and then fail: so the step emits 4, and the next one fails."""
    sampler = HostSampler(1, V)
    sampler.open(slot_init(0, [1], 1, Sampling(temperature=0.0, logprobs=1)))
    table = next_is(4, 5, 6)
    table[1, 0] = np.nan
    paths, outcome = run(
        sampler, plan_of([0], [0], [[1]], [True]), [as_draft([4, 5], [-1, 0])], table
    )
    assert outcome.finite.tolist() == [True]
    assert outcome.tokens.tolist() == [[4]]
    assert paths[0].tolist() == [0]
    assert [entry.token for entry in outcome.logprobs[0]] == [4]
    _, outcome = run(sampler, plan_of([0], [1], [[4]], [True]), [NO_DRAFT], table[1:])
    assert outcome.finite.tolist() == [False]


def test_a_mask_that_allows_nothing_fails_its_row():
    sampler = HostSampler(1, V)
    sampler.open(slot_init(0, [1], 1))
    masks = NodeMasks(np.array([0], np.int32), bits([])[None])
    _, outcome = run(sampler, plan_of([0], [0], [[1]], [True]), [NO_DRAFT], next_is(4), masks)
    assert (outcome.finite[0], outcome.n_tokens[0]) == (False, 0)


def exact(logits):
    z = logits.astype(np.float64)
    return z - np.log(np.exp(z).sum())


def test_logprobs_are_the_models_own_and_ties_go_to_the_lowest_id():
    """Temperature, bias and cut-offs shape the choice, not the report."""
    sampler = HostSampler(1, V)
    sampling = Sampling(temperature=0.5, top_k=1, logit_bias=((6, 50.0),), logprobs=3, seed=4)
    sampler.open(slot_init(0, [1], 1, sampling))
    table = np.array([[0, 3, 1, 3, 1, 1, 2, -4], [1] * V], np.float32)
    plan = plan_of([0], [0], [[1]], [True])
    _, outcome = run(sampler, plan, [as_draft([6], [-1])], table)
    first, second = outcome.logprobs[0]
    assert [first.token, second.token] == [6, 6]
    assert first.logprob == pytest.approx(exact(table[0])[6], abs=1e-6)
    assert [token for token, _ in first.top] == [1, 3, 6]
    assert [token for token, _ in second.top] == [0, 1, 2]
    for token, value in first.top:
        assert value == pytest.approx(exact(table[0])[token], abs=1e-6)
    assert second.logprob == pytest.approx(-math.log(V), abs=1e-6)


@pytest.mark.parametrize("cuts", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_prompt_logprobs_of_chunks_join_up(cuts):
    """However a prompt is cut, each token after the first is reported exactly once."""
    prompt, sampling = [1, 2, 3, 4, 5], Sampling(temperature=0.0, prompt_logprobs=2)
    table = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)
    sampler = HostSampler(1, V)
    sampler.open(slot_init(0, prompt, 5, sampling))
    entries, at = [], 0
    for length in cuts:
        chunk = prompt[at : at + length]
        plan = plan_of([0], [at], [chunk], [at + length == 5])
        _, outcome = run(sampler, plan, [NO_DRAFT], table[chunk])
        entries += outcome.prompt_logprobs[0]
        at += length
    assert [entry.token for entry in entries] == prompt[1:]
    for before, entry in zip(prompt, entries, strict=False):
        assert entry.logprob == pytest.approx(exact(table[before])[entry.token], abs=1e-6)
        assert [t for t, _ in entry.top] == np.argsort(-table[before])[:2].tolist()


def test_a_prompt_node_that_is_not_finite_fails_where_it_is_reported():
    sampler = HostSampler(2, V)
    sampler.open(slot_init(0, [1, 2, 3], 3, Sampling(prompt_logprobs=0)))
    sampler.open(slot_init(1, [1, 2, 3], 3))
    plan = plan_of([0, 1], [0, 0], [[1, 2], [1, 2]], [False, False])
    table = next_is(1, 1, 1, 1)
    table[[0, 2], 3] = np.nan
    _, outcome = run(sampler, plan, [NO_DRAFT] * 2, table)
    assert outcome.finite.tolist() == [False, True]


@pytest.mark.parametrize("few", [0, 3, 99])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_grammar_leaves_the_choice_that_the_specification_makes(monkeypatch, few, temperature):
    """However it is computed: among few tokens or by the specification."""
    for module in ("executors.host_choice", "speculative.accept"):
        monkeypatch.setattr(f"forerun.{module}.FEW", few)
    random, history = np.random.default_rng(few), History(np.array([1, 2], np.int32), 1)

    sampler = HostSampler(1, V)
    odd = [np.nan, np.inf, -np.inf] + 7 * [0.0]
    for seed in range(80):
        cut = {"top_k": seed % 4, "top_p": (1.0, 0.7)[seed % 3 == 1]}
        sampling = Sampling(temperature=temperature, seed=seed, **cut)
        table = random.normal(0, 2, (1, V)).astype(np.float32).round(1)
        table[0, random.integers(V)] = random.choice(odd)
        allowed = np.flatnonzero(random.random(V) < 0.5).tolist()
        masks = NodeMasks(np.zeros(1, np.int32), bits(allowed)[None])
        sampler.open(slot_init(0, [1, 2], 1, sampling))
        _, outcome = run(sampler, plan_of([0], [1], [[2]], [True]), [NO_DRAFT], table, masks)
        sampler.close(0)
        wanted = choose(process(table[0], sampling, history, (), masks.bits[0]), sampling, 1)
        wanted = wanted if np.isfinite(table[0].max()) else -1
        actual = outcome.tokens[0, 0] if outcome.n_tokens[0] else -1
        assert (actual, outcome.finite[0]) == (wanted, wanted >= 0), (seed, allowed)


def test_misuse_is_named():
    sampler = HostSampler(2, V)
    sampler.open(slot_init(0, [1, 2], 2))
    with pytest.raises(EngineError, match="slot 0 is already open"):
        sampler.open(slot_init(0, [1], 1))
    with pytest.raises(EngineError, match=r"outside 0\.\.7"):
        sampler.open(slot_init(1, [1, 8], 2))
    with pytest.raises(EngineError, match="slot 1, which is not open"):
        run(sampler, plan_of([1], [0], [[1]], [True]), [NO_DRAFT], next_is(1))
    with pytest.raises(EngineError, match="after 1 tokens, but slot 0 holds 2"):
        run(sampler, plan_of([0], [0], [[1]], [True]), [NO_DRAFT], next_is(1))
    sampler.close(0)
    sampler.close(0)
    sampler.open(slot_init(0, [1], 1))


def test_the_accepted_path_goes_by_the_first_of_equal_children():
    """As flat nodes: no walk of the tree is needed again."""
    sampler = HostSampler(2, V)
    sampler.open(slot_init(0, [1, 2], 2))
    sampler.open(slot_init(1, [3], 1))
    plan = plan_of([0, 1], [0, 0], [[1, 2], [3]], [True, True])
    drafts = [as_draft([4, 4, 7, 6], [-1, -1, 0, 1]), as_draft([5, 4], [-1, -1])]
    #                  known, root, 4, 4, 7, 6 | root, 5, 4
    _, outcome = run(sampler, plan, drafts, next_is(2, 4, 7, 6, 1, 1, 4, 1, 2))
    assert outcome.output_tokens == [[4, 7, 1], [4, 2]]
    assert outcome.accepted.tolist() == [2, 4, 8]
    assert [path.tolist() for path in outcome.paths] == [[2, 4], [8]]
