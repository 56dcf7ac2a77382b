"""The compiler: errors with a place, limits that hold, a cache that is bounded."""

import threading
import time

import numpy as np
import pytest

from forerun.constrain import compile as compile_module
from forerun.constrain.compile import Compiler
from forerun.constrain.grammar import Grammar
from forerun.constrain.llguidance_backend import LONG, Guidance
from forerun.constrain.matcher import Matcher
from forerun.constrain.tree_mask import TreeGrammars
from forerun.control.constants import FIXED_MIN_PROB
from forerun.errors import BusyError, ModelError, RequestError
from forerun.sandbox import SandboxProcess
from forerun.speculative.tree import Draft, batch
from forerun.text.pieces import Pieces
from forerun.text.tokenizer import Ends, Tokenizer
from tests.constrain.tools import BPE, BYTES, compiled, compiler, members

FIELD = "response_format.json_schema.schema"


def schema(value) -> Grammar:
    return Grammar.json_schema(value, field=FIELD)


@pytest.mark.parametrize(
    ("grammar", "tokens"),
    [
        (
            schema({"properties": {"a": {"not": {"type": "string"}}}}),
            'properties.a.not cannot be honoured: Unimplemented keys: ["not"]',
        ),
        (schema({"items": {"uniqueItems": True}}), "items.uniqueItems cannot be honoured"),
        (schema({"prefixItems": [{}, {"type": "foo"}]}), "prefixItems[1].type cannot"),
        (schema({"anyOf": [{"type": "number", "minimum": 5, "maximum": 3}]}), "anyOf[0].minimum"),
        (schema({"format": "martian"}), "format cannot be honoured: Unknown format: martian"),
        (schema({"properties": {"a": {"oneOf": [{}, {}]}}}), "properties.a.oneOf cannot"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema({"$ref": "#/$defs/absent"}), "$ref cannot be honoured: Pointer"),
        (schema({"$ref": "#"}), "cannot be satisfied by any text"),
        (Grammar.regex("a{2,1}"), "    a{2,1}\n     ^^^^^\nerror: invalid repetition count"),
        (Grammar.regex("(?=a)b"), "look-ahead and look-behind, is not supported"),
        (Grammar.regex(r"(a)\1"), "backreferences are not supported"),
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
    strict = {"type": "array", "uniqueItems": True, "items": {"type": "null"}}
    found = compiler("bytes").compile(Grammar.json_schema(strict, lenient=True))
    matcher = Matcher(found)
    assert all(matcher.advance(token) for token in b"[null, null]")


HOSTILE = [
    Grammar.json_schema({"const": "xy z" * 60_000}),
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
    schema({"type": "object", "properties": {f"p{i}": {} for i in range(9_000)}}),
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


@pytest.mark.parametrize("grammar", HOSTILE, ids=lambda g: g.source[:30])
def test_hostile_grammars_are_refused_or_quick_in_the_engine(library, grammar):
    """Compiling may take its five seconds; a step of the engine may not take a tenth of one."""
    try:
        found = compiled(grammar, "bpe")
    except RequestError:
        return
    grammars = TreeGrammars(BPE.vocab_size)
    grammars.open(0, found, ())
    slot, known = np.zeros(1, np.int32), np.ones(1, np.int32)
    slowest = 0.0
    for _ in range(20):
        began = time.thread_time()
        room = np.array([max(*map(len, grammars.predicted(slot, FIXED_MIN_PROB)), 1)], np.int32)
        (draft,) = grammars.guide(slot, [Draft()], room, room)
        masks = grammars.masks(slot, batch([known], [draft]))
        tokens = draft.tokens.tolist() or members(masks.bits[masks.row[0]].tobytes())[:1]
        done = grammars.commit(0, tokens)
        slowest = max(slowest, time.thread_time() - began)
        assert not done.error
        if done.complete:
            break
    assert slowest < 0.1


def test_a_long_forced_text_is_spelled_a_piece_at_a_time():
    """Its tokens are asked for at every node, and no step takes more than some dozens of them."""
    text = "the quick brown fox, é 1234567890; " * 200
    matcher, out = Matcher(compiler("bpe").compile(Grammar.choice([text]))), []
    while not matcher.complete:
        forced = matcher.forced()
        assert forced and len(forced) <= 2 * LONG
        for token in forced:
            assert members(matcher.mask()) == [token], "what is forced is all that may follow"
            assert matcher.advance(token)
        out += forced
    assert BPE.decode(np.array(out)) == text


def test_what_takes_too_long_is_ended_and_the_next_one_answered():
    worker = SandboxProcess(["sleep", "60"], 0.3)
    began = time.monotonic()
    assert worker.ask({"kind": "regex"}) is None
    assert time.monotonic() - began < 10
    worker = SandboxProcess(Guidance.command, 20)
    request = {"kind": "regex", "source": "a", "lenient": False, "one_line": False}
    assert "grammar" in worker.ask(request)
    worker._process.kill()
    worker._process.wait()
    assert "grammar" in worker.ask(request), "a dead process is replaced"
    process = worker._process
    worker.close()
    assert process.poll() is not None


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(Guidance, "command", ("sleep", "60"))
    made = Compiler(BYTES, seconds=0.3)
    with pytest.raises(RequestError, match=r"more than 0.3 seconds"):
        made.compile(Grammar.regex("a"))


def test_equal_grammars_compile_once():
    made, asked = Compiler(BYTES), []
    ask = made._worker.ask
    made._worker.ask = lambda request: (asked.append(1), time.sleep(0.05), ask(request))[2]
    grammar = Grammar.regex("(a|b)c")
    threads = [threading.Thread(target=made.compile, args=(grammar,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1
    assert made.compile(grammar.after([1])).start == (1,)
    for _ in range(2):
        with pytest.raises(RequestError):
            made.compile(Grammar.regex("a{2,1}"))
    assert len(asked) == 2, "a grammar known to be bad is not tried again"
    made.close()


def test_the_cache_is_bounded_in_bytes():
    made = Compiler(BYTES, cache_bytes=4 * 256 * 1024)
    for index in range(20):
        made.compile(Grammar.regex(f"a{index}"))
        assert made._cache._used <= 4 * 256 * 1024
    assert len(made._cache._values) == 3
    kept = [("regex", f"a{i}", False, False) in made._cache._values for i in (0, 19)]
    assert kept == [False, True]
    made.close()


def test_too_many_at_once_are_asked_to_come_back(monkeypatch):
    monkeypatch.setattr(compile_module, "MAX_WAITING", 1)
    made = Compiler(BYTES)
    gate = threading.Event()
    made._worker.ask = lambda request: (gate.wait(20), {"error": "late"})[1]

    def first():
        with pytest.raises(RequestError, match="late"):
            made.compile(Grammar.regex("a"))

    waiting = threading.Thread(target=first)
    waiting.start()
    deadline = time.monotonic() + 10
    while made._waiting._value and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(BusyError, match="try again later"):
        made.compile(Grammar.regex("b"))
    gate.set()
    waiting.join()


def test_a_model_without_an_end_cannot_be_constrained():
    endless = Tokenizer(lambda text, first: [], Pieces((b"a",), 0), [], Ends(()))
    with pytest.raises(ModelError, match="no end-of-text"):
        Compiler(endless)
