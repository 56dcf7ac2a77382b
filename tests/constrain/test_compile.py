"""The compiler: errors with a place, limits that hold, a cache that is bounded."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import numpy as np
import pytest

from forerun import sandbox
from forerun.constrain.grammar import Grammar, Start
from forerun.constrain.isolation import compile as compile_module
from forerun.constrain.isolation import llguidance_worker
from forerun.constrain.isolation.compile import Compiler, _Cache
from forerun.constrain.isolation.fair_queue import FairQueue
from forerun.constrain.matcher.jump_forward import MAX_AHEAD
from forerun.constrain.matcher.llguidance_backend import LONG
from forerun.constrain.matcher.matcher import Matcher
from forerun.constrain.matcher.tree_mask import TreeGrammars
from forerun.control.policy import FIXED_MIN_PROB
from forerun.errors import BusyError, EngineError, ModelError, RequestError, WorkerError
from forerun.sandbox import Fault, SandboxProcess
from forerun.speculative.tree import Draft, batch
from forerun.text.pieces import Pieces
from forerun.text.tokenizer import TextEnds, Tokenizer
from tests.constrain.tools import BPE, BYTES, compiled, compiler, members

FIELD = "response_format.json_schema.schema"


def schema(value) -> Grammar:
    return Grammar.json_schema(value, field=FIELD)


@pytest.mark.parametrize(
    ("grammar", "tokens"),
    [
        (
            schema({"properties": {"a": {"not": {"minimum": 3}}}}),
            "properties.a.not cannot be honoured: not supported here",
        ),
        (schema({"items": {"uniqueItems": True}}), "items.uniqueItems cannot be honoured"),
        (schema({"prefixItems": [{}, {"type": "foo"}]}), "prefixItems[1].type cannot"),
        (schema({"anyOf": [{"type": "number", "minimum": 5, "maximum": 3}]}), "anyOf[0].minimum"),
        (schema({"format": "martian"}), "format cannot be honoured: unknown format 'martian'"),
        (schema({"properties": {"a": {"oneOf": [{}, {}]}}}), "properties.a.oneOf cannot"),
        (
            schema({"type": "string", "pattern": "(?!a)b"}),
            "pattern cannot be honoured: look-around",
        ),
        (schema({"$ref": "#/$defs/absent"}), "$ref cannot be honoured: '#/$defs/absent'"),
        (schema({"$ref": "#"}), "cannot be satisfied by any text"),
        (Grammar.regex("a{2,1}"), "    a{2,1}\n     ^^^^^\nerror: invalid repetition count"),
        (Grammar.regex("(?=a)b"), "look-ahead and look-behind, is not supported"),
        (Grammar.regex(r"(a)\1"), "backreferences are not supported"),
        (Grammar.regex(r"\w\b x"), "supported at character 12\n    [0-9A-Za-z_]"),
        (Grammar.regex("ab^c"), "'^' stands for a place between characters, which is not"),
        (schema({"properties": {"a": {"pattern": r"\d\q"}}}), "properties.a.pattern cannot"),
        (Grammar.grammar('start: "a" | b'), 'at 1(8): unknown name: "b"'),
        (Grammar.grammar('root ::= ( "a"'), "Expected ')' at line 1"),
        (Grammar.grammar("start: x\nx: x"), "cannot be satisfied by any text"),
    ],
)
def test_errors_name_the_field_and_the_place(grammar, tokens):
    with pytest.raises(RequestError) as error:
        compiler("bytes").compile(grammar)
    assert tokens in str(error.value)
    assert error.value.field == grammar.field and grammar.field in str(error.value)


def test_lenient_schemas_ignore_what_cannot_be_honoured():
    strict = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    grammar = compiler("bytes").compile(Grammar.json_schema(strict, lenient=True))
    matcher = Matcher(grammar)
    assert all(matcher.advance(token) for token in b"[1, 1]")


WIDE = schema({"type": "object", "properties": {f"p{i}": {} for i in range(9_000)}})
HOSTILE = [
    Grammar.json_schema({"const": "xy z" * 20_000}),
    Grammar.regex("a{4999}"),
    Grammar.regex("((a{1,1000}){1,1000}){1,1000}"),
    Grammar.regex("a{10000}"),
    Grammar.regex("(ab?){9000}"),
    Grammar.regex("(a|b)*a(a|b){1000}"),
    Grammar.regex("(.*a.*b.*c.*){50}"),
    Grammar.regex("|".join(f"word{i}" for i in range(20_000))),
    Grammar.choice([f"value {i}" for i in range(10_000)]),
    schema({"enum": [f"value {i}" for i in range(10_000)]}),
    schema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    schema({"type": "array", "minItems": 10**6}),
    WIDE,
    schema({"type": "object", "properties": {f"p{i}": {} for i in range(900)}}),
    schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(8)
            ]
        }
    ),
    schema({"anyOf": [{"$ref": "#"}, {"properties": {"a": {"$ref": "#"}}}]}),
    schema({"type": "integer", "minimum": -(10**30), "maximum": 10**30}),
    Grammar.grammar('start: a\na: a a | /[a-z]+/ | ""'),
    Grammar.grammar("start: " + " | ".join(f'"{i}" r' for i in range(2000)) + "\nr: start start"),
    Grammar.grammar('start: x{1,100000}\nx: "a"{1,100000}'),
]


class Counted:
    """An automaton whose calls into the library are counted, those of its copies too."""

    def __init__(self, inner, calls):
        self._inner, self._calls = inner, calls

    def fork(self):
        self._calls["fork"] += 1
        return Counted(self._inner.fork(), self._calls)

    def __getattr__(self, name):
        attribute = getattr(self._inner, name)
        self._calls[name] += callable(attribute)
        return attribute


@pytest.mark.parametrize(
    "grammar",
    [pytest.param(g, marks=[pytest.mark.slow] * (g is WIDE)) for g in HOSTILE],
    ids=lambda g: g.source[:30],
)
def test_hostile_grammars_are_refused_or_ask_little_of_the_library(grammar):
    """Of a step of the engine, however long a call takes: what one call may take is for the limits
    of the library, and that a slow matcher leaves the thread for test_remote_matcher.
    """
    try:
        made = compiled(grammar, "bpe")
    except RequestError:
        return
    calls: Counter[str] = Counter()
    if not made.expensive:
        made = replace(made, prototype=Counted(made.prototype, calls))
    grammars = TreeGrammars(BPE.vocab_size)
    grammars.open(0, made, ())
    slot, known = np.zeros(1, np.int32), np.ones(1, np.int32)
    for _ in range(20):
        calls.clear()
        room = np.array([max(*map(len, grammars.predicted(slot, FIXED_MIN_PROB)), 1)], np.int32)
        (draft,) = grammars.filter_and_extend_drafts(slot, [Draft()], room, room)
        masks = grammars.masks(slot, batch([known], [draft]))
        tokens = draft.tokens.tolist() or members(masks.bits[masks.row[0]].tobytes())[:1]
        done = grammars.commit(0, tokens)
        assert not done.error
        assert made.expensive or 0 < calls.total() <= 6 * MAX_AHEAD, calls
        if done.complete:
            break


def test_a_long_forced_text_is_spelled_a_piece_at_a_time():
    """Its tokens are computed at every node, and no step takes more than some dozens of them."""
    text = "the quick brown fox, é 1234567890; " * 60
    matcher, out = Matcher(compiler("bpe").compile(Grammar.choice([text]))), []
    while not matcher.complete:
        forced = matcher.forced()
        assert forced and len(forced) <= 2 * LONG
        for token in forced:
            assert members(matcher.mask()) == [token], "what is forced is all that may follow"
            assert matcher.advance(token)
        out += forced
    assert BPE.decode(np.array(out)) == text


def test_what_takes_too_much_processor_time_is_ended_and_the_next_one_answered():
    """Wherever it is; and what waits is not what works."""
    code = (
        "import time; from forerun.sandbox import serve\n"
        "def answer(request):\n"
        "    while request['work']: pass\n"
        "    time.sleep(0.6)\n"
        "    return {'said': 'yes'}\n"
        "serve(answer)"
    )
    worker = SandboxProcess([sys.executable, "-c", code], 0.3)
    assert worker.ask({"work": False}) == {"said": "yes"}, "sleeping twice as long is no work"
    assert worker.ask({"work": True}) is None and worker.fault is Fault.TIME
    assert worker.ask({"work": False}) == {"said": "yes"}, "a dead process is replaced"
    process = worker._process
    worker.close()
    assert process.poll() is not None


def test_what_dies_and_what_does_not_answer_are_distinguished(monkeypatch):
    worker = SandboxProcess([sys.executable, "-c", "input()"], 0.3)
    assert worker.ask({}) is None and worker.fault is Fault.DIED
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    worker = SandboxProcess([sys.executable, "-c", code], 0.3)
    assert worker.ask({}) is None and worker.fault is Fault.KILLED
    monkeypatch.setattr(sandbox, "SILENCE", 1.0)
    worker = SandboxProcess(["sleep", "60"], 0.02)
    assert worker.ask({}) is None and worker.fault is Fault.SILENT


def test_a_grammar_that_takes_all_memory_is_an_error_in_words(monkeypatch):
    def hungry(**_):
        raise MemoryError

    monkeypatch.setattr(llguidance_worker, "translate", hungry)
    assert llguidance_worker.answer({}, None) == {"error": "it takes more than 2048 MiB of memory"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that a process is stopped")
def test_a_stopped_process_is_given_up_long_before_a_silent_one(monkeypatch):
    monkeypatch.setattr(sandbox, "LOOK", 0.01)
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    worker = SandboxProcess([sys.executable, "-c", code], 1000.0)
    assert worker.ask({}) is None and worker.fault is Fault.SILENT


def test_a_process_that_works_a_little_is_not_given_up(monkeypatch, tmp_path):
    """On a busy machine all do. It answers only once it has been looked at five times."""
    monkeypatch.setattr(sandbox, "SILENCE", 1.0)
    looked = count()

    def worked(pid):
        number = next(looked)
        if number == 5:
            (tmp_path / "go").touch()
        return number

    monkeypatch.setattr(sandbox, "_processor_time", worked)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom forerun.sandbox import serve\n"
        f"while not Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
        "serve(lambda request: {})"
    )
    worker = SandboxProcess([sys.executable, "-c", code, "20"], 0.02)
    assert worker.ask({}) == {}
    worker.close()


def starting(tmp_path):
    """A process that is ready when there is a file `go`, and those that began to start."""
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom forerun.sandbox import serve\n"
        f"here = Path({str(tmp_path)!r})\n"
        "(here / f'{os.getpid()}.pid').touch()\n"
        "sys.stdin.readline()\n"
        "while not (here / 'go').exists(): time.sleep(0.005)\n"
        "print('ready', flush=True)\n"
        "serve(lambda request: {'said': 'yes'})"
    )
    worker = SandboxProcess([sys.executable, "-c", code, "20"], 20.0, init_message="hello")
    return worker, lambda: {int(path.stem) for path in tmp_path.glob("*.pid")}


@pytest.mark.parametrize("kills", range(1, sandbox.STARTS + 1))
def test_what_is_killed_before_it_is_ready_is_started_again(tmp_path, kills):
    """A few times: then the request gets an error."""
    worker, begun = starting(tmp_path)
    killed = set()

    def kill_them():
        while len(killed) < kills:
            for pid in begun() - killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        (tmp_path / "go").touch()

    thread = threading.Thread(target=kill_them)
    thread.start()
    if kills < sandbox.STARTS:
        assert worker.ask({}) == {"said": "yes"}
        assert len(begun()) == kills + 1
    else:
        with pytest.raises(EngineError, match="ended before it was ready"):
            worker.ask({})
    thread.join()
    worker.close()


def test_what_its_owner_kills_is_not_started_again(tmp_path):
    worker, begun = starting(tmp_path)

    def kill():
        while not begun():
            time.sleep(0.01)
        worker.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(EngineError, match="ended before it was ready"):
        worker.ask({})
    thread.join()
    assert len(begun()) == 1


def test_a_process_may_ask_before_it_answers():
    code = (
        "from forerun.sandbox import question, serve\n"
        "serve(lambda request: {'sum': sum(question(n) for n in request['numbers'])})"
    )
    worker = SandboxProcess([sys.executable, "-c", code], 20, questions=lambda n: n * n)
    assert worker.ask({"numbers": [1, 2, 3]}) == {"sum": 14}
    worker.close()


class Faulty:
    """A compiling process that fails for a while."""

    def __init__(self, worker, fault):
        self._worker, self.fault, self.seconds, self.requests = worker, fault, 5.0, 0

    def ask(self, request):
        self.requests += 1
        return None if self.fault else self._worker.ask(request)

    def close(self):
        self._worker.close()


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (Fault.TIME, RequestError, "more than 5 seconds of processor time"),
        (Fault.DIED, RequestError, "ended, perhaps for lack of memory"),
        (Fault.KILLED, WorkerError, "ended from outside; try again later"),
        (Fault.SILENT, WorkerError, "did not answer in time; try again later"),
    ],
)
def test_only_what_the_library_refuses_is_remembered(fault, error, message):
    """What a process could not do today it may do tomorrow."""
    made = Compiler(BYTES)
    lanes = made._lanes
    made._lanes = [replace(lane, worker=Faulty(lane.worker, fault)) for lane in lanes]
    for _ in range(2):
        with pytest.raises(error, match=message) as raised:
            made.compile(Grammar.regex("a", FIELD))
        assert isinstance(raised.value, BusyError) or raised.value.field == FIELD
    assert made._lanes[0].worker.requests == 2
    assert made._lanes[1].worker.requests == 2, "the slow lane tries"
    for lane in made._lanes:
        lane.worker.fault = None
    assert made.compile(Grammar.regex("a", FIELD))
    made.close()


def counting(made: Compiler) -> list[str]:
    """Return a list that gets the source of each request to a compiling process."""
    sources: list[str] = []
    for lane in made._lanes:

        def ask(request, ask=lane.worker.ask):
            sources.append(request["source"])
            return ask(request)

        lane.worker.ask = ask
    return sources


def test_equal_grammars_compile_once():
    made = Compiler(BYTES)
    sources = counting(made)
    grammar = Grammar.regex("(a|b)c")
    threads = [threading.Thread(target=made.compile, args=(grammar,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sources) == 1
    marker = made.compile(grammar.after(Start("</t>"))).start
    assert made.compile(grammar.after(Start("</t>"))).start is marker
    for _ in range(2):
        with pytest.raises(RequestError):
            made.compile(Grammar.regex("a{2,1}"))
    assert len(sources) == 2, "a grammar known to be bad is not tried again"
    made.close()


def test_requests_for_one_grammar_share_nothing_that_can_fail():
    """Copies of an llguidance matcher share a lexer; when it is full, all of them fail."""
    grammar, long = Grammar.regex("(a|b)*a(a|b){14}"), Random(1)
    made = Compiler(BYTES)
    first, second = (Matcher(made.compile(grammar)) for _ in range(2))
    for _ in range(100_000):
        if not first.commit(ord(long.choice("ab"))):
            break
        first.mask()
    assert "states" in first.error
    assert second.commit(ord("a")) and second.mask() and not second.error
    assert Matcher(made.compile(grammar)).commit(ord("a")), "nor do later ones"
    made.close()


def test_what_is_kept_twice_counts_once():
    cache, keys = _Cache(100), [(name, "", False, False) for name in "ab"]
    for key, size in ((keys[0], 60), (keys[0], 60), (keys[1], 30)):
        cache.put(key, "no grammar", size)
    assert all(map(cache.get, keys))


def test_the_cache_is_bounded_in_bytes():
    made = Compiler(BYTES, cache_bytes=8000)
    for index in range(20):
        made.compile(Grammar.regex(f"a{index}"))
        assert made._cache._used <= 8000
    assert 3 < len(made._cache._values) < 8
    kept = [("regex", f"a{i}", False, False) in made._cache._values for i in (0, 19)]
    assert kept == [False, True]
    made.close()


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def grown() -> int:
    """Compile many times what fits; return how many bytes this process grew by after the first
    third.
    """
    made = Compiler(BPE, cache_bytes=1 << 20)
    sizes = []
    for number in range(240):
        row = {f"key{i}_{number}": {"type": "string", "maxLength": 40} for i in range(150)}
        grammar = made.compile(schema({"type": "object", "properties": row}))
        assert Matcher(grammar).mask()
        if number % 80 == 79:
            sizes.append(resident())
    assert made._cache._used <= 1 << 20
    assert len(made._cache._values) < 160, "nothing was let go"
    made.close()
    return sizes[2] - sizes[0]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_what_the_cache_takes_is_what_it_counts():
    """What is kept of a grammar is its text, no matcher. In a process without other tests'
    leavings.
    """
    line = "from tests.constrain.test_compile import grown; print(grown())"
    output = subprocess.check_output([sys.executable, "-c", line], text=True, timeout=600)
    assert int(output) < 4 << 20


def test_too_many_at_once_get_a_retry_later(monkeypatch):
    monkeypatch.setattr(compile_module, "MAX_WAITING", 1)
    made = Compiler(BYTES)
    entered, gate = threading.Event(), threading.Event()
    ask = lambda request: (entered.set(), gate.wait(60), {"error": "late"})[2]  # noqa: E731
    made._lanes[0].worker.ask = ask

    def first():
        with pytest.raises(RequestError, match="late"):
            made.compile(Grammar.regex("a"))

    waiting = threading.Thread(target=first)
    waiting.start()
    assert entered.wait(60)
    with pytest.raises(BusyError, match="try again later"):
        made.compile(Grammar.regex("b"))
    gate.set()
    waiting.join()


def test_thirty_schemas_of_1900_properties_block_no_other():
    """Large grammars have a process of their own, and the next one there is decided by size and
    client: small ones pass all of them, a large one of a client with little passes the rest.
    """
    made = Compiler(BYTES)
    gate, begun, order = threading.Event(), threading.Event(), []

    def ask(request):
        order.append(request["source"])
        begun.set()
        assert gate.wait(60)
        return {"error": "late"}

    queue = FairQueue(clock=lambda: 0.0)
    made._lanes[1] = replace(made._lanes[1], queue=queue)
    made._lanes[1].worker.ask = ask
    rows = [{f"p{i}_{number}": {"type": "integer"} for i in range(1900)} for number in range(31)]
    *many, other = [schema({"type": "object", "properties": row}) for row in rows]

    def late(grammar, client):
        with pytest.raises(RequestError, match="late"):
            made.compile(grammar, client)

    def waiting(behind):
        while len(queue._places._waiting) < behind:
            threading.Event().wait(0.001)

    jobs = [(grammar, "greedy") for grammar in many]
    threads = [threading.Thread(target=late, args=one) for one in [*jobs, (other, "modest")]]
    threads[0].start()
    assert begun.wait(60)
    queue._used["greedy"] = (60.0, 0.0)
    for behind, thread in enumerate(threads[1:], 1):
        thread.start()
        waiting(behind)
    assert made.compile(Grammar.regex("small"), "greedy"), "while the others still wait"
    assert made.compile(Grammar.regex("tiny"), "modest")
    assert len(order) == 1
    gate.set()
    for thread in threads:
        thread.join()
    assert order[1] == other.source, "next after the one that had begun"
    made.close()


def test_a_model_without_an_end_cannot_be_constrained():
    endless = Tokenizer(lambda text, first: [], Pieces((b"a",), 0), [], TextEnds(()))
    with pytest.raises(ModelError, match="no end-of-text"):
        Compiler(endless)
