"""A thought's end is forced behind its last token, at every node of every tree."""

from functools import cache

import pytest

from forerun.constrain.grammar import Grammar, Start, ThinkingBudget
from forerun.constrain.isolation.compile import Compiler
from forerun.constrain.matcher.matcher import Matcher
from forerun.engine.request import Finish
from tests.constrain.test_lossless import CITY, SAMPLINGS, completion_of, engine
from tests.constrain.tools import BYTES
from tests.covering import every, some_of, values
from tests.engine.toys import ask, run

CLOSER = "</t>"
COMPILER = Compiler(BYTES)
ENDING = tuple(BYTES.encode_within(f"So.{CLOSER}"))
PROMPT = BYTES.encode("city r: ")


def grammar(tokens, used=0, behind=None, ending=ENDING):
    budget = ThinkingBudget(tokens, used, ending)
    return COMPILER.compile((behind or Grammar.free()).after(Start(CLOSER), budget))


def options(sampling):
    return {"stop_tokens": (), **SAMPLINGS[sampling]}


@cache
def answer(name, sampling, tokens, behind=None, **shape):
    request = ask("r", PROMPT, 60, grammar=grammar(tokens, behind=behind), **options(sampling))
    return completion_of(run(engine(name, "bytes", **shape), request))


@cache
def free(sampling):
    return completion_of(run(engine("none", "bytes"), ask("r", PROMPT, 60, **options(sampling))))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 6, 17, 300])
def test_the_end_comes_behind_the_last_token(tokens, sampling):
    emitted, _, finish = answer("none", sampling, tokens)
    unbudgeted = free(sampling)[0]
    assert emitted[: min(tokens, 60)] == unbudgeted[:tokens]
    assert tuple(emitted[tokens : tokens + len(ENDING)]) == ENDING[: max(60 - tokens, 0)]
    assert len(emitted) == 60 and finish == Finish.LENGTH, "any text follows"


DRAFTERS = "grammar", "ngram", "oracle", "erratic", "random", "illegal"


@pytest.mark.parametrize(
    ("name", "tokens", "sampling"), some_of(every(DRAFTERS, [0, 1, 4, 5, 6, 17], SAMPLINGS), values)
)
def test_speculation_changes_no_token(name, tokens, sampling):
    for depth in (1, 5):
        assert answer(name, sampling, tokens, depth=depth) == answer("none", sampling, tokens)


@pytest.mark.parametrize("name", ["none", "grammar", "oracle", "random"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_a_grammar_begins_behind_the_forced_end(name, tokens):
    emitted, text, finish = answer(name, "greedy", tokens, CITY)
    assert text[len(emitted[:tokens]) :].partition(CLOSER)[2] in ("Paris", "Amsterdam")
    assert finish == Finish.STOP and emitted == answer("none", "greedy", tokens, CITY)[0]


def test_the_forced_end_costs_fewer_steps_than_it_has_tokens():
    sink = run(engine("grammar", "bytes"), ask("r", PROMPT, 20, grammar=grammar(4)))
    stats = sink.last("r").stats
    assert stats.accepted >= len(ENDING) - 2, stats


def test_small_pages_and_company_change_no_token():
    def request_of(id, tokens):
        return ask(id, PROMPT, 60, grammar=grammar(tokens), **options("sampled"))

    one = engine("erratic", "bytes", pages=44, slots=3)
    sink = run(one, *(request_of(str(tokens), tokens) for tokens in (0, 5, 17)))
    assert one.stats().preemptions > 0
    for tokens in (0, 5, 17):
        assert completion_of(sink, str(tokens)) == answer("none", "sampled", tokens)


@pytest.mark.parametrize("name", ["oracle", "erratic"])
def test_steps_that_begin_early_stop_at_the_budget(name):
    """A step begins before the one before it is read, but for texts whose thought must end."""
    one = engine(name, "bytes", overlap=True)
    requests = [
        ask(str(tokens), PROMPT, 60, grammar=grammar(tokens), **options("sampled"))
        for tokens in (0, 5, 17)
    ]
    sink = run(one, *requests, ask("free", PROMPT, 200, **options("sampled")))
    for tokens in (0, 5, 17):
        assert completion_of(sink, str(tokens)) == answer("none", "sampled", tokens)
    assert one.stats().carried > 5


def test_a_slow_machine_moves_no_budget_to_another_process(monkeypatch):
    """A grammar that takes long goes to a process of its own, which knows no free text."""
    monkeypatch.setattr("forerun.constrain.matcher.tree_mask.SLOW", 0.0)
    request = ask("r", PROMPT, 60, grammar=grammar(17), **options("sampled"))
    for _ in range(3):
        assert completion_of(run(engine("random", "bytes"), request)) == answer(
            "none", "sampled", 17
        )


@pytest.mark.parametrize("used", [0, 2, 5, 9])
def test_tokens_of_the_prompt_count(used):
    matcher = Matcher(grammar(5, used))
    taken = 0
    while not matcher.forced():
        assert matcher.commit(ord("x"))
        taken += 1
    assert taken == max(5 - used, 0)


def test_a_letter_is_finished_first():
    for letter in ("é", "か", "😀"):
        matcher = Matcher(grammar(2))
        assert matcher.commit(ord("x"))
        for byte in letter.encode():
            assert not matcher.forced()
            assert matcher.commit(byte)
        assert matcher.forced() == list(ENDING)
    matcher = Matcher(grammar(1))
    for byte in (0xF0, 0xF0, 0xF0, 0xF0):
        assert matcher.commit(byte)
    assert matcher.forced() == list(ENDING), "a letter that never ends"


def test_a_thought_that_ends_by_itself_is_over():
    matcher = Matcher(grammar(9))
    for token in BYTES.encode_within(f"Yes{CLOSER}"):
        assert not matcher.forced() and matcher.commit(token)
    assert matcher.released and not matcher.waiting and matcher.mask() is None
    assert matcher.advance(5) and matcher.advance(BYTES.vocab_size + 3)


def test_draft_tokens_are_taken_back():
    matcher = Matcher(grammar(2))
    assert matcher.advance(ord("a")) and not matcher.forced()
    assert matcher.advance(ord("b")) and matcher.forced() == list(ENDING)
    assert not matcher.advance(ord("c"))
    assert matcher.advance(ENDING[0]) and matcher.forced() == list(ENDING[1:])
    matcher.back(3)
    assert not matcher.forced()
    for token in (ord("a"), ord("b"), *ENDING):
        assert matcher.commit(token)
    assert matcher.released


@pytest.mark.parametrize("opener", ["<c>", "x<c>y"])
def test_a_call_ends_the_thought_and_is_not_broken(opener):
    budget = ThinkingBudget(5, 0, ENDING, "<c>")
    for behind in (Grammar.free(), CITY):
        matcher = Matcher(COMPILER.compile(behind.after(Start(CLOSER), budget)))
        for token in BYTES.encode_within(f"{opener}{{'a': 1}}"):
            assert not matcher.forced() and matcher.commit(token)
        matcher = Matcher(COMPILER.compile(behind.after(Start(CLOSER), budget)))
        for token in BYTES.encode_within("x<cc>"):
            assert not matcher.forced() and matcher.commit(token)
        assert matcher.forced() == list(ENDING), "that was no opener"
