"""Expensive grammars: followed in a process of their own, which no step waits for.

The reference of every answer is plain decoding with a matcher on the engine's thread.
"""

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from forerun.constrain.grammar import Grammar
from forerun.constrain.isolation import remote_matcher
from forerun.constrain.isolation.compile import Compiler
from forerun.constrain.isolation.remote_matcher import RemoteMatcher, RemoteMatchers
from forerun.constrain.matcher.automaton import MatcherAnswer
from forerun.constrain.matcher.limits import SLOW_STEPS
from forerun.constrain.matcher.matcher import Translated
from forerun.constrain.matcher.tree_mask import TreeGrammars
from forerun.engine.request import GRAMMAR_LIMIT, Finish
from tests.constrain.test_lossless import CASES, completion_of, engine
from tests.constrain.tools import TOKENIZERS, Tokenizer, compiled
from tests.covering import every, thinned, values
from tests.engine.toys import ask, run
from tests.text.test_tokenizer import gguf_metadata

AMBIGUOUS = Grammar.grammar(
    'start: a0 "z"\n'
    + "\n".join(f"a{i}: a{i + 1}? a{i + 1}? a{i + 1}?" for i in range(10))
    + "\na10: /x/"
)
"""185 bytes; a token of 16 letters takes seconds."""


def fresh(grammar: Grammar, **translated) -> object:
    """Compiled, but sharing nothing that is known of its cost."""
    made = compiled(grammar)
    known = Translated(made.translated.text, made.translated.begin, False)
    return replace(made, translated=replace(known, **translated))


def request(case: str, grammar, id="r", **options):
    prompt = TOKENIZERS["bytes"].encode(f"{case} {id}: ")
    ends = TOKENIZERS["bytes"].eos_ids
    return ask(id, prompt, 60, stop_tokens=ends, grammar=grammar, **options)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("none", "city"),
        ("random", "json"),
        pytest.param("none", "json", marks=pytest.mark.slow),
        pytest.param("random", "city", marks=pytest.mark.slow),
    ],
)
def test_the_text_is_the_same_wherever_it_is_followed(name, case):
    grammar = CASES[case][0]
    options = {"temperature": 0.8, "seed": 11}
    plain = run(engine("none", "bytes"), request(case, fresh(grammar), **options))
    made = engine(name, "bytes")
    free = ask("free", "somebody else", 40)
    sink = run(made, request(case, fresh(grammar, expensive=True), **options), free)
    assert completion_of(sink) == completion_of(plain)
    sink.expect(free)


def test_preempted_sequences_are_followed_again_from_their_beginning():
    made = engine("none", "bytes", page_size=2, pages=40, slots=2)
    grammar, options = CASES["letters"][0], {"temperature": 0.8, "seed": 3}
    texts = []
    for expensive in (False, True):
        compiled_city = fresh(grammar, expensive=expensive)
        requests = [request("letters", compiled_city, str(i), **options) for i in range(3)]
        sink = run(made, *requests)
        texts.append([sink.text(str(i)) for i in range(3)])
    assert texts[0] == texts[1]


def tokens_of(deltas):
    """All tokens of these deltas."""
    return [token for delta in deltas for token in delta.tokens]


class ManualMatcher:
    """A remote matcher that answers when the test lets it."""

    def __init__(self, answered, released):
        self._answered, self._released, self._inner = answered, released, None
        self.tokens: list[int] = []

    @property
    def ready(self):
        return self._released.is_set()

    @property
    def answer(self):
        return MatcherAnswer(error="it was stuck")

    def take(self, tokens):
        self.tokens += tokens

    def close(self):
        pass


def test_no_request_waits_for_a_matcher_that_does_not_answer():
    """Neither running sequences nor later ones with the same prompt."""
    released = threading.Event()
    stuck = replace(
        fresh(AMBIGUOUS, expensive=True), remote=lambda answered: ManualMatcher(answered, released)
    )
    made = engine("grammar", "bytes")
    prompt = TOKENIZERS["bytes"].encode("the same long beginning of many prompts")
    slow, others = ask("slow", prompt, 20, grammar=stuck), [ask(str(i), prompt, 30) for i in "ab"]
    deltas = {}
    for one in (slow, *others):
        made.submit(one, lambda delta, id=one.id: deltas.setdefault(id, []).append(delta))
    while not all(deltas.get(one.id, [None])[-1] for one in others) or any(
        deltas[one.id][-1].finish is None for one in others
    ):
        assert made.step_once()
    assert slow.id not in deltas, "it has no mask, so it has said nothing"
    made.check()
    released.set()
    while slow.id not in deltas:
        assert made.step_once()
    (last,) = deltas[slow.id]
    assert last.finish == Finish.ERROR and last.code == GRAMMAR_LIMIT
    assert "after 0 tokens" in last.error and "it was stuck" in last.error
    while made.step_once():
        pass
    made.check()


class Limited:
    """An automaton that fails behind so many tokens, as at a limit."""

    def __init__(self, inner, left):
        self._inner, self._left = inner, left

    @property
    def error(self):
        return "Too many items" if self._left < 0 else ""

    def fork(self):
        return Limited(self._inner.fork(), self._left)

    def take(self, token):
        self._left -= 1
        return self._left >= 0 and self._inner.take(token)

    def mask(self):
        if self._left == 0:
            self._left = -1
        return self._inner.mask()

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.parametrize(
    ("after", "name"), thinned(every([0, 1, 5, 13], ["none", "random", "ngram", "grammar"]), values)
)
def test_a_limit_on_the_engines_thread_changes_no_token(name, after):
    """The sequence goes on where the limits are wider, from the token before the limit."""
    options = {"temperature": 0.8, "seed": 5, "logprobs": 1}
    grammar = CASES["json"][0]
    plain = run(engine("none", "bytes"), request("json", fresh(grammar), **options))
    limited = fresh(grammar)
    limited = replace(limited, prototype=Limited(limited.prototype, after))
    made = engine(name, "bytes")
    sink = run(made, request("json", limited, **options))
    assert completion_of(sink) == completion_of(plain)
    assert len(sink.tokens()) > 13
    reports = [[entry for d in one.of() for entry in d.logprobs] for one in (sink, plain)]
    assert reports[0] == reports[1]
    assert limited.expensive and made.stats().preemptions >= 1


class Raising(Limited):
    """An automaton whose method of a name raises behind so many tokens, or fewer."""

    def __init__(self, inner, left, name):
        super().__init__(inner, left)
        self._name = name

    def fork(self):
        return Raising(self._inner.fork(), self._left, self._name)

    def take(self, token):
        self._left -= 1
        return self._inner.take(token)

    @property
    def error(self):
        return ""

    def mask(self):
        return self._checked("mask")

    def forced(self):
        return self._checked("forced")

    def _checked(self, name):
        if name == self._name and self._left <= 0:
            raise RuntimeError("a fault of the matcher")
        return getattr(self._inner, name)()


@pytest.mark.parametrize(("fault", "name"), [("mask", "random"), ("forced", "grammar")])
def test_a_matcher_that_raises_changes_no_token_and_ends_no_other(fault, name):
    options = {"temperature": 0.8, "seed": 5}
    grammar, free = CASES["json"][0], ask("free", max_tokens=40)
    plain = run(engine("none", "bytes"), request("json", fresh(grammar), **options))
    raising = fresh(grammar)
    raising = replace(raising, prototype=Raising(raising.prototype, 5, fault))
    made = engine(name, "bytes")
    sink = run(made, request("json", raising, **options), free)
    sink.expect(free)
    assert completion_of(sink) == completion_of(plain)
    assert made.alive and raising.expensive and not made.stats().failed_steps


def test_a_process_that_asks_what_cannot_be_answered_ends_its_request_only(monkeypatch):
    def encoded(matchers, text):
        raise TypeError("no text")

    monkeypatch.setattr(RemoteMatchers, "_encoded", encoded)
    compiler = Compiler(TOKENIZERS["bytes"])
    grammar = compiler.compile(Grammar.json_schema({"const": "a long forced text"}))
    asking = replace(grammar, translated=replace(grammar.translated, expensive=True))
    free = ask("free", max_tokens=40)
    sink = run(engine("none", "bytes"), request("json", asking), free, check=False)
    sink.expect(free)
    assert sink.last().finish == Finish.ERROR and "runs in failed" in sink.last().error


def test_a_slow_matcher_leaves_the_engines_thread(monkeypatch):
    """And after the second one, no other of the grammar comes there."""
    grammar = fresh(CASES["json"][0])
    options = {"temperature": 0.8, "seed": 5}
    plain = run(engine("none", "bytes"), request("json", grammar, **options))
    monkeypatch.setattr("forerun.constrain.matcher.tree_mask.SLOW", -1.0)
    for count in (1, 2):
        sink = run(engine("random", "bytes"), request("json", grammar, **options))
        assert completion_of(sink) == completion_of(plain)
        assert grammar.translated.slow == count and grammar.expensive == (count == 2)


def test_a_bad_moment_of_the_machine_is_forgotten(monkeypatch):
    grammar = fresh(Grammar.regex("[ab]{4}"))
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr("forerun.constrain.matcher.tree_mask.SLOW", -1.0)
            run(engine("random", "bytes"), request("letters", grammar))
        assert grammar.translated.slow == 1
        for _ in range(8):
            run(engine("random", "bytes"), request("letters", grammar))
        assert grammar.translated.slow == 0 and not grammar.expensive


def test_one_slow_step_of_an_answer_moves_no_matcher():
    """It would draft nothing to its end. A second one soon after it moves the matcher."""
    grammars, y = TreeGrammars(300), ord("y")
    grammars.open(0, fresh(Grammar.regex("y+")), ())

    def moved(seconds):
        grammars._states[0].seconds = seconds
        grammars.commit(0, [y])
        return 0 in grammars._remote

    assert [moved(seconds) for seconds in (1e9, *[0.0] * SLOW_STEPS, 1e9, 0.0)] == (
        [False] * (SLOW_STEPS + 3)
    )
    assert moved(1e9)
    grammars.close(0)


def sixteen() -> Tokenizer:
    """A vocabulary with a token of 16 letters x."""
    metadata = gguf_metadata("smollm")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    more = {"tokenizer.ggml.tokens": [*tokens, "x" * 16], "tokenizer.ggml.token_type": [*types, 1]}
    return Tokenizer.from_gguf(metadata | more)


@pytest.fixture
def impatient(monkeypatch):
    """Grammars are compiled as they are outside of tests, where a slow step makes them expensive:
    a slow machine may have no time to come to a limit, but then its steps are slow.
    """
    command = (sys.executable, "-m", "forerun.constrain.isolation.llguidance_worker")
    monkeypatch.setattr("forerun.constrain.isolation.compile.COMMAND", command)


@pytest.mark.usefixtures("impatient")
def test_a_hostile_grammar_is_seen_when_it_is_compiled_and_ended_alone(monkeypatch):
    """It says which limit it reached; what it wrote before counts."""
    monkeypatch.setattr(remote_matcher, "CALL_SECONDS", 0.1)
    tokenizer = sixteen()
    compiler = Compiler(tokenizer)
    grammar = compiler.compile(AMBIGUOUS)
    assert grammar.expensive and grammar.prototype is None
    grammars = TreeGrammars(tokenizer.vocab_size)
    grammars.open(0, grammar, [])
    count = 0
    while not grammars.ready(0, grammar):
        grammars.wait(1.0)
    while not (committed := grammars.commit(0, [tokenizer.vocab_size - 1])).error:
        count += 1
        assert count < 40
        while not grammars.ready(0, grammar):
            grammars.wait(1.0)
    assert "more than 0.1 seconds of processor time" in committed.error
    assert committed.valid == 0
    grammars.close(0)
    compiler.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seen", [True, False])
def test_a_grammar_of_185_bytes_takes_no_step_from_others(monkeypatch, seen):
    """The hostile client has a bias for a token of 16 letters, the dearest there is. Whether the
    compiling process has seen what it will cost or not, others get a token in every step.
    """
    assert len(AMBIGUOUS.source) == 185
    monkeypatch.setattr(remote_matcher, "CALL_SECONDS", 0.1)
    tokenizer = sixteen()
    compiler = Compiler(tokenizer)
    grammar = compiler.compile(AMBIGUOUS)
    assert grammar.expensive
    if not seen:
        source = grammar.translated
        beginning = source.begin(False)
        grammar = replace(
            grammar, prototype=beginning, translated=Translated(source.text, source.begin, False)
        )
        assert not grammar.expensive
    made = engine("random", "bytes", tokenizer=tokenizer, context=1000, pages=1000)
    sixteen_x = tokenizer.vocab_size - 1
    options = {"logit_bias": ((sixteen_x, 100.0),), "stop_tokens": tokenizer.eos_ids}
    hostile = ask("hostile", "x", 200, grammar=grammar, **options)
    free = ask("free", "somebody else", 60)
    alone = run(engine("none", "bytes", tokenizer=tokenizer), free).tokens("free")
    deltas = {"hostile": [], "free": []}
    for one in (free, hostile):
        made.submit(one, lambda delta, id=one.id: deltas[id].append(delta))
    steps = 0
    while not deltas["free"] or deltas["free"][-1].finish is None:
        emitted = sum(len(delta.tokens) for delta in deltas["free"])
        assert made.step_once()
        steps += sum(len(delta.tokens) for delta in deltas["free"]) == emitted
    assert [token for delta in deltas["free"] for token in delta.tokens] == alone
    assert steps <= 2, "steps in which the other client got nothing: its prompt's"
    while not deltas["hostile"] or deltas["hostile"][-1].finish is None:
        made.step_once()
    last = deltas["hostile"][-1]
    assert last.finish == Finish.ERROR and last.code == GRAMMAR_LIMIT, last
    assert "more than 0.1 seconds of processor time" in last.error
    assert seen or grammar.expensive
    made.check()
    compiler.close()


@pytest.mark.usefixtures("impatient")
def test_what_a_grammar_will_cost_is_seen_where_it_is_compiled():
    """Rules in GBNF whose first mask takes seconds."""
    rules = "\n".join(f"a{i} ::= (a{i + 1} a{i + 1} | a{i + 1})?" for i in range(14))
    dear = Grammar.grammar(f'root ::= a0 "z"\n{rules}\na14 ::= [a-z]?')
    compiler = Compiler(TOKENIZERS["bpe"])
    assert compiler.compile(dear).expensive
    compiler.close()


def test_ordinary_grammars_are_followed_on_the_engines_thread():
    for case in CASES.values():
        assert not compiled(case[0]).expensive


SLEEPY = """
import os, runpy, signal, sys
from pathlib import Path
first = Path(sys.argv[1])
if not first.exists():
    first.write_text(str(os.getpid()))
    signal.pause()
del sys.argv[1]
runpy.run_module("forerun.constrain.isolation.matcher_worker", run_name="__main__")
"""
"""The first of these processes never becomes ready; it leaves its id in a file."""


@pytest.mark.parametrize("when", ["before it is ready", "behind a token", "between requests"])
def test_a_process_ended_from_outside_is_no_fault_of_the_grammars(when, monkeypatch, tmp_path):
    """With it ends the request whose matcher it held, as one that may be sent again. Where it held
    none yet nothing happens, and sequences beside it are not touched.
    """
    early, first = when == "before it is ready", tmp_path / "first"
    if early:
        monkeypatch.setattr(remote_matcher, "COMMAND", (sys.executable, "-c", SLEEPY, str(first)))
    city = CASES["city"][0]
    compiled_city = fresh(city, expensive=True)
    matchers = []

    def remote(answered):
        library = RemoteMatchers(TOKENIZERS["bytes"])
        matchers.append(RemoteMatcher(library, compiled_city.translated.text, answered))
        return matchers[-1]

    made = engine("none", "bytes")
    grammar = replace(compiled_city, remote=remote)
    deltas = []
    made.submit(request("city", grammar), deltas.append)
    free = ask("free", "somebody else", 40)
    others = []
    made.submit(free, others.append)
    while not (first.exists() and first.read_text() if early else tokens_of(deltas)):
        made.step_once()
    process = matchers[0]._process._process
    assert not early or process.pid == int(first.read_text())
    while when == "between requests" and not matchers[0].ready:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while not deltas or deltas[-1].finish is None:
        made.step_once()
    last = deltas[-1]
    if early:
        alone = run(engine("none", "bytes"), request("city", fresh(city)))
        assert tokens_of(deltas) == alone.tokens() and last.finish == alone.last().finish
    else:
        assert last.finish == Finish.ERROR and last.code is None, last
        assert "Ask again" in last.error
    while made.step_once():
        pass
    made.check()
    plain = run(engine("none", "bytes"), free)
    assert tokens_of(others) == plain.tokens("free")


def test_few_processes_run_at_one_time(monkeypatch):
    """The others wait for their turn, and get it."""
    monkeypatch.setattr(remote_matcher, "MAX_PROCESSES", 1)
    tokenizer = TOKENIZERS["bytes"]
    grammar = fresh(CASES["city"][0], expensive=True)
    matchers = RemoteMatchers(tokenizer)
    answered = [threading.Event(), threading.Event()]
    remotes = [RemoteMatcher(matchers, grammar.translated.text, event.set) for event in answered]
    remotes[0].take([])
    assert answered[0].wait(60) and remotes[0].answer.mask
    remotes[1].take([ord("P")])
    assert not remotes[1].ready
    remotes[0].close()
    assert answered[1].wait(60) and remotes[1].answer.mask and not remotes[1].answer.error
    remotes[1].close()


def test_answers_of_seconds_block_others_for_one_at_most(monkeypatch):
    """One works at a time: the one that has worked least is next, however many came first."""
    monkeypatch.setattr(remote_matcher, "MAX_WORKING", 1)
    tokenizer = TOKENIZERS["bytes"]
    grammar = fresh(CASES["city"][0], expensive=True)
    matchers, order, entered = RemoteMatchers(tokenizer), [], threading.Event()

    class Process:
        """Answers once all requests are there."""

        def ask(self, request):
            assert entered.wait(60)
            return {"mask": "", "complete": False, "error": ""}

        def kill(self):
            pass

        close = kill

    monkeypatch.setattr(matchers, "process", Process)
    remotes, answers = [], threading.Semaphore(0)
    for number, worked in enumerate((7.0, 6.0, 5.0, 0.0)):

        def answered(number=number):
            order.append(number)
            answers.release()

        remotes.append(RemoteMatcher(matchers, grammar.translated.text, answered))
        remotes[-1]._worked = worked
        remotes[-1].take([])
        while len(matchers.working._waiting) < number:
            threading.Event().wait(0.001)
        while matchers.working._free:
            threading.Event().wait(0.001)
    entered.set()
    for _ in remotes:
        assert answers.acquire(timeout=60)
    assert order == [0, 3, 2, 1]
    for remote in remotes:
        remote.close()


def test_nothing_is_computed_for_a_request_that_left_the_queue(monkeypatch):
    tokenizer, entered = TOKENIZERS["bytes"], threading.Event()
    grammar = fresh(CASES["city"][0], expensive=True)
    matchers, ended = RemoteMatchers(tokenizer), threading.Event()

    class Process:
        def ask(self, request):
            entered.set()

        def kill(self):
            pass

        close = ended.set

    monkeypatch.setattr(matchers, "process", Process)
    remote = RemoteMatcher(matchers, grammar.translated.text, lambda: None)
    with ExitStack() as others:
        for _ in range(remote_matcher.MAX_WORKING):
            others.enter_context(matchers.working.place(0.0))
        remote.take([])
        while not matchers.working._waiting:
            threading.Event().wait(0.001)
        remote.close()
    assert ended.wait(60) and not entered.is_set()
