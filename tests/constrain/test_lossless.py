"""Constrained text through the real engine: always valid, and the same with any drafter."""

import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from forerun.constrain.grammar_policy import GrammarPolicy
from forerun.control.grammar_budget import DECAY, LIKELY, MIN_PROB, GrammarBudget, least_chance

from forerun.constrain.grammar import Grammar
from forerun.constrain.tree_mask import TreeGrammars
from forerun.control.cost_model import StepCosts
from forerun.control.policy import FixedPolicy
from forerun.drafters.none import NoDrafter
from forerun.engine.request import Finish, Request
from forerun.engine.thread import Engine, EngineOptions
from forerun.executors.toy import ToyExecutor
from forerun.interface.executor import ExecutorLimits
from tests.constrain.tools import (
    BYTES,
    PERSON,
    TOKENIZERS,
    RandomDrafter,
    chosen,
    compiled,
    is_person,
)
from tests.engine.toys import ask, drafter, run

pytestmark = pytest.mark.usefixtures("library")

CITY = Grammar.regex("(Paris|Amsterdam)")
CASES = {
    "city": (CITY, lambda text: text in ("Paris", "Amsterdam")),
    "choice": (Grammar.choice(["yes", "no", "perhaps"]), ["yes", "no", "perhaps"].__contains__),
    "json": (Grammar.json_schema(PERSON), is_person),
    "letters": (Grammar.regex("[a-p]{3,12}"), re.compile("[a-p]{3,12}").fullmatch),
    "nested": (Grammar.grammar('root ::= "a" root "b" | "c"'), re.compile("a*cb*").fullmatch),
}
SAMPLINGS = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 11}}


def engine(name: str, kind: str, nodes=6, depth=5, **shape) -> Engine:
    tokenizer = TOKENIZERS[kind]
    vocab = max(tokenizer.vocab_size, 259) + 13  # padded, as models are
    sizes = {"page_size": 4, "pages": 400, "slots": 4, "max_nodes": 48, "context": 300} | shape
    executor = ToyExecutor(ExecutorLimits(**sizes, vocab=vocab))
    policy = FixedPolicy(nodes, depth) if name not in ("none", "grammar") else FixedPolicy(0, 0)
    grammars = TreeGrammars(vocab)
    if name != "none":
        policy = GrammarPolicy(policy, grammars)
    made = {
        "grammar": NoDrafter,
        "random": lambda: RandomDrafter(range(vocab)),
        "illegal": lambda: RandomDrafter([0, 1, 2, vocab - 1]),
    }.get(name, lambda: drafter(name, executor.limits.slots))()
    return Engine(executor, made, policy, tokenizer, grammars, EngineOptions())


def constrained(case: str, kind: str, id="r", **options) -> Request:
    """A request under a grammar. Greedy toy text would write `aaaa` for ever, so it is capped."""
    ends = TOKENIZERS[kind].eos_ids
    grammar = compiled(CASES[case][0], kind)
    prompt = TOKENIZERS[kind].encode(f"{case} {id}: ")
    return ask(id, prompt, 250, stop_tokens=ends, grammar=grammar, **options)


def heard(ear, id="r", index=0):
    return ear.tokens(id, index), ear.text(id, index), ear.last(id, index).finish


def plain(case: str, kind: str, sampling: str):
    return plain_with(chosen.library, case, kind, sampling)


@cache
def plain_with(library: str, case: str, kind: str, sampling: str):
    assert library == chosen.library
    return heard(run(engine("none", kind), constrained(case, kind, **SAMPLINGS[sampling])))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("case", "kind"), [*((c, "bytes") for c in CASES), ("json", "bpe")])
@pytest.mark.parametrize("name", ["ngram", "erratic", "random", "illegal", "grammar"])
def test_speculation_changes_no_token(name, case, kind, sampling):
    tokens, text, finish = plain(case, kind, sampling)
    if finish == Finish.STOP:
        assert CASES[case][1](text), text
    ear = run(engine(name, kind), constrained(case, kind, **SAMPLINGS[sampling]))
    assert heard(ear) == (tokens, text, finish)
    stats = ear.last().stats
    assert stats is None or stats.steps <= len(tokens), "a step without progress"


@pytest.mark.parametrize("case", [c for c in CASES if c != "nested"])
def test_constrained_text_is_valid_for_many_seeds(case):
    made = engine("random", "bytes", slots=8, max_nodes=96, pages=800)
    requests = [constrained(case, "bytes", str(seed), seed=seed, n=2) for seed in range(12)]
    requests = [replace(r, sampling=replace(r.sampling, temperature=20.0)) for r in requests]
    ear = run(made, *requests, check=False)
    texts = {ear.text(str(seed), index) for seed in range(12) for index in (0, 1)}
    assert all(CASES[case][1](text) for text in texts)
    assert len(texts) > 1
    assert all(ear.last(str(s), i).finish == Finish.STOP for s in range(12) for i in (0, 1))


@pytest.mark.parametrize("name", ["random", "erratic", "grammar"])
def test_together_with_other_parameters(name):
    options = {
        "temperature": 0.9,
        "seed": 3,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
        "logit_bias": ((ord("h"), 3.0),),
        "top_k": 40,
        "logprobs": 2,
        "n": 2,
        "min_tokens": 5,
        "stop": ('"kind"',),
    }
    wanted = run(engine("none", "bytes"), constrained("json", "bytes", **options))
    found = run(engine(name, "bytes"), constrained("json", "bytes", **options))
    for index in (0, 1):
        assert heard(found, index=index) == heard(wanted, index=index)
        assert wanted.text(index=index).startswith("{") and '"kind"' not in wanted.text(index=index)
        mine, theirs = (
            [r for d in ear.of(index=index) for r in d.logprobs] for ear in (found, wanted)
        )
        assert mine == theirs and len(mine) == len(wanted.tokens(index=index))


@pytest.mark.parametrize("name", ["random", "grammar"])
def test_mixed_and_preempted_batches_change_nothing(name):
    kinds = list(CASES)
    requests = [
        constrained(kinds[i % 5], "bytes", str(i), temperature=0.8, seed=i) for i in range(8)
    ]
    free = [ask(f"free {i}", f"free {i}", 20) for i in range(4)]
    alone = [heard(run(engine("none", "bytes"), r), r.id) for r in requests]
    made = engine(name, "bytes", pages=40, slots=6, max_nodes=40, context=160)
    requests = [replace(r, stopping=replace(r.stopping, max_tokens=120)) for r in requests]
    mixed = [r for two in zip(requests, free + free, strict=True) for r in two]
    mixed = list({r.id: r for r in mixed}.values())
    ear = run(made, *mixed)
    assert made.stats().preemptions > 0, "the pool was meant to be too small"
    for request, wanted in zip(requests, alone, strict=True):
        assert heard(ear, request.id)[1] == wanted[1][:120]
    for request in free:
        ear.expect(request)


def test_a_rule_may_limit_its_tokens():
    """llguidance cannot roll such a grammar back."""
    if chosen.library != "llguidance":
        pytest.skip("a feature of llguidance's Lark")
    grammar = compiled(Grammar.grammar('start: "x" a "!"\na[max_tokens=5]: /[a-z]*/'))
    request = ask("r", "x", 60, grammar=grammar, temperature=3.0, seed=2)
    wanted = run(engine("none", "bytes"), request)
    assert wanted.last().finish == Finish.STOP and re.fullmatch("x[a-z]{0,5}!", wanted.text())
    for name in ("random", "erratic", "grammar"):
        assert heard(run(engine(name, "bytes"), request)) == heard(wanted)


def test_forced_text_needs_fewer_steps():
    """Names of properties are written without asking the model one by one."""
    request = constrained("json", "bytes", temperature=0.8, seed=1)
    ear = run(engine("ngram", "bytes", nodes=16, depth=16), request)
    assert ear.last().stats.steps < 0.5 * len(ear.tokens())


def test_a_pattern_that_nothing_follows_ends_at_once():
    ear = run(engine("random", "bytes"), replace(constrained("city", "bytes"), id="x"))
    assert ear.text("x") in ("Paris", "Amsterdam")
    assert ear.tokens("x") == list(ear.text("x").encode()), "nothing after the end, not even eos"
    assert ear.last("x").finish == Finish.STOP


def test_min_tokens_beyond_the_end_does_not_break_a_complete_text():
    for name in ("none", "random"):
        ear = run(engine(name, "bytes"), constrained("city", "bytes", min_tokens=50))
        assert heard(ear)[1:] == (heard(ear)[1], Finish.STOP)
        assert ear.text() in ("Paris", "Amsterdam")


def test_ignored_end_of_text_still_ends_the_grammar():
    grammar = compiled(Grammar.regex("a+"))
    request = ask("r", "x", 60, stop_tokens=(), grammar=grammar, temperature=3.0, seed=5)
    for name in ("none", "random"):
        ear = run(engine(name, "bytes"), request)
        assert set(ear.text()) == {"a"}
        assert ear.last().finish in (Finish.STOP, Finish.LENGTH)


def test_the_paris_request_with_only_illegal_guesses_moves_one_token_a_step():
    made = engine("illegal", "bytes", nodes=1, depth=1)
    ear = run(made, constrained("letters", "bytes"))
    stats = ear.last().stats
    assert stats.accepted == 0, "none of the drafter's draft tokens was legal"
    assert stats.draft_tokens < 6, "illegal draft tokens cost nothing, habit draft tokens little"
    assert stats.steps == len(ear.tokens())


def test_json_stays_json_under_spaces():
    """A model in love with spaces cannot write them for ever."""
    grammar = compiled(Grammar.json_schema({"type": "array", "items": {"type": "null"}}))
    bias = ((32, 50.0), (10, 40.0))
    request = ask("r", "x", 400, grammar=grammar, temperature=1.0, seed=2, logit_bias=bias)
    ear = run(engine("none", "bytes", context=500), request)
    gaps = re.findall(r"\s+", ear.text())
    assert gaps and max(map(len, gaps)) <= 42
    if ear.last().finish == Finish.STOP:
        json.loads(ear.text())


@pytest.mark.parametrize("nodes", [0, 2])
def test_forced_tokens_need_no_budget(nodes):
    """A policy that would not draft, or too little, still takes what the grammar forces."""
    vocab = BYTES.vocab_size
    executor = ToyExecutor(ExecutorLimits(4, 400, 4, 64, 300, vocab))
    grammars = TreeGrammars(vocab)
    seen: list[tuple[int, int]] = []
    inner = FixedPolicy(nodes, min(nodes, 2))
    policy = GrammarPolicy(inner, grammars)
    policy.observe = lambda slot, draft_tokens, accepted: seen.append((draft_tokens, accepted))
    made = Engine(executor, RandomDrafter([0]), policy, BYTES, grammars, EngineOptions())
    request = constrained("city", "bytes")
    ear = run(made, request)
    assert heard(ear) == plain("city", "bytes", "greedy")
    assert ear.text() == "Amsterdam"
    assert ear.last().stats.steps == 2, "one token chosen, the others forced in one step"
    assert seen == [(8, 8)]


def test_what_is_forced_teaches_the_policy_nothing():
    seen = []

    class Inner(FixedPolicy):
        def observe(self, slot, draft_tokens, accepted):
            seen.append((slot, draft_tokens, accepted))

    class Forced:
        held = True

        def room(self, slots):
            return [0, 3]

    policy = GrammarPolicy(Inner(2, 2), Forced())
    slots = np.array([0, 1], np.int32)
    budgets = policy.budgets(slots, slots)
    assert [(b.nodes, b.depth) for b in budgets] == [(2, 2), (3, 3)]
    policy.observe(0, 2, 1)
    policy.observe(1, 3, 3)
    policy.observe(1, 5, 4)
    policy.observe(1, 5, 2)  # Whether the drafter was right nobody knows.
    assert seen == [(0, 2, 1), (1, 2, 1)]


def test_where_nodes_are_dear_only_what_is_certain_enters():
    costs = StepCosts(nodes=(1, 3, 64, 512), verify_ms=(4.0, 4.2, 54.0, 440.0))
    chances = [least_chance(costs, rows) for rows in (1, 8, 64)]
    assert chances == sorted(chances)
    assert chances[0] == MIN_PROB < chances[1] and chances[2] > 0.9
    assert least_chance(None, 64) == LIKELY
    steep = StepCosts(nodes=(1, 2), verify_ms=(1.0, 9.0))
    assert least_chance(steep, 4) == 1.0, "a forced token has probability 1"


COSTS = StepCosts(nodes=(1, 2, 4, 8, 16), verify_ms=(4.0, 4.4, 5.2, 10.1, 20.1))


def test_as_much_is_drafted_as_wins_more_time_than_it_costs():
    """Against every other choice, at the speed that is reached on average."""
    random = np.random.default_rng(0)
    for _ in range(40):
        probability, sizes = GrammarBudget(COSTS), random.integers(0, 7, 2)
        chains = [np.sort(random.uniform(0.02, 1.0, size))[::-1].tolist() for size in sizes]
        for _ in range(int(random.integers(0, 200))):
            probability.made(2, int(random.integers(0, 6)))
            probability.brought(int(random.integers(1, 5)))
        speed = probability._brought / probability._paid * 2 / float(COSTS.verify(np.array(2)))
        others = int(random.integers(0, 3))
        chosen = probability.of(2, others, chains)

        def won(counts, chains=chains, speed=speed, others=others):
            tokens = sum(sum(chain[:n]) for chain, n in zip(chains, counts, strict=True))
            return tokens - speed * float(COSTS.verify(np.array(2 + others + sum(counts))))

        every = [(a, b) for a in range(sizes[0] + 1) for b in range(sizes[1] + 1)]
        assert won(chosen) >= max(map(won, every)) - 1e-6
    assert GrammarBudget(COSTS).of(2, 0, [[], []]) == [0, 0]
    assert GrammarBudget(None).of(1, 0, [[1.0, 0.5]]) == [2]


def test_easy_text_makes_a_doubtful_guess_dear():
    """Where most steps bring much, their time is worth more."""
    easy, hard = GrammarBudget(COSTS), GrammarBudget(COSTS)
    for probability, tokens in ((easy, 4), (hard, 1)):
        for _ in range(100):
            probability.made(1, 3)
            probability.brought(tokens)
    assert easy.of(1, 0, [[0.3]]) == [0] and hard.of(1, 0, [[0.3]]) == [1]
    assert easy.of(1, 0, [[1.0] * 6]) == [6], "what is certain is worth it"
    assert easy._paid == pytest.approx(hard._paid) and easy._paid < 1.5 / (1 - DECAY)


def test_over_many_steps_the_share_is_faster_than_any_step_by_itself():
    """Steps of two kinds in turns, sure and doubtful: more tokens per millisecond than with as
    many draft tokens as make each step the fastest.
    """
    kinds = ([1.0] * 3 + [0.85] * 4, [0.2, 0.15, 0.12])

    def greedy(scores):
        ms = COSTS.verify(1 + np.arange(len(scores) + 1))
        return int(np.argmax((1 + np.append(0, np.cumsum(scores))) / ms))

    def speed(choose):
        tokens = ms = 0.0
        for turn in range(400):
            scores = kinds[turn % 2]
            count = choose(scores)
            probability.made(1, count)
            probability.brought(1 + sum(scores[:count]))
            if turn >= 200:
                tokens += 1 + sum(scores[:count])
                ms += float(COSTS.verify(np.array(1 + count)))
        return tokens / ms

    probability = GrammarBudget(COSTS)
    assert speed(lambda scores: probability.of(1, 0, [scores])[0]) > 1.03 * speed(greedy)
