"""Text of clients is read in time that grows with its length, not with its square.

A regular expression runs in one call that no other thread interrupts: 200 kB stop a server for a
minute where it takes quadratic time.
"""

import ast
import re
import signal
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from random import Random

import pytest

import forerun
from forerun.constrain.grammar import Grammar
from forerun.constrain.grammar.tagged import _whole
from forerun.constrain.schema.paths import schemas
from forerun.constrain.schema.patterns import matching, portable
from forerun.constrain.schema.strings import Unenforceable, plain_patterns
from forerun.errors import RequestError
from forerun.serve.bodies.closing import closed
from forerun.serve.bodies.structure import json_rules
from forerun.serve.bodies.tools import argument_text
from forerun.serve.bodies.wire import parse_json
from forerun.serve.http.errors import ApiError
from forerun.text.json_text import MOST_CONTAINERS
from forerun.text.reasoning import Marks, ReasoningReader, Stage
from forerun.text.stop_strings import StopStrings
from forerun.text.tools import FORMATS, ToolReader
from tests.counted import lines
from tests.covering import spread

HERE = Path(forerun.__file__).parent
READ_CLIENTS = ("serve", "text", "constrain")
SHORT, LONG = 2000, 40_000
"""Repetitions that are tried at once, and those that decide where the short ones took long."""
SHORT_SECONDS, LONG_SECONDS = 0.003, 0.3
"""Of processor time: several times what a linear expression takes for so many repetitions. One
that takes quadratic time needs 9 ms and 8 s."""


class TooLong(BaseException):
    """Ends a call of C's that would not end soon."""


@contextmanager
def bounded(seconds):
    """Raise TooLong when so many seconds of processor time have passed."""

    def end(*_):
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def expressions():
    """Every regular expression written in these packages, by its place: compiled, and how it is
    used.
    """
    sources = {
        path: path.read_text(encoding="utf-8")
        for name in READ_CLIENTS
        for path in sorted((HERE / name).rglob("*.py"))
    }
    for path, code in sources.items():
        names = {}
        for node in (tree := ast.parse(code)).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = node.value
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.")):
                continue
            text = names.get(getattr(node.args[0], "id", ""), node.args[0])
            if isinstance(text, ast.Constant):
                flags = re.DOTALL if "re.DOTALL" in ast.unparse(node) else 0
                used = {node.func.attr}
                name = next((name for name, value in names.items() if value is node), "")
                if used == {"compile"}:
                    used = set(re.findall(rf"{name}\.(\w+)\(", code)) & USES
                place = f"{path.relative_to(HERE)}:{node.lineno}"
                source = text.value if isinstance(text.value, str) else text.value.decode()
                yield place, (re.compile(source, flags), used or USES)


USES = {"match", "fullmatch", "search", "sub", "findall", "finditer", "split"}
EXPRESSIONS = dict(expressions())


def samples(tree):
    """Texts that an expression matches: one that takes the first choice everywhere, and for every
    other choice one that takes it.
    """
    choices = [some for op, arg in tree if (some := _choices(str(op), arg))]
    first = [some[0] for some in choices]
    texts = ["".join(first)]
    for place, some in enumerate(choices):
        texts += ["".join((*first[:place], one, *first[place + 1 :])) for one in some[1:]]
    return texts


def _choices(op, arg):
    if op == "LITERAL":
        return [chr(arg)]
    if op in ("ANY", "NOT_LITERAL"):
        return ["x"]
    if op == "IN":
        return ["x"] if str(arg[0][0]) == "NEGATE" else [_member(*one) for one in arg[:4]]
    if op == "BRANCH":
        return [one for branch in arg[1] for one in samples(branch)]
    if op.endswith("REPEAT"):
        return samples(arg[2]) + ([""] if arg[0] == 0 else [])
    if op == "ATOMIC_GROUP":
        return samples(arg)
    return samples(arg[-1]) if op in ("SUBPATTERN", "ASSERT") else []


def _member(op, arg):
    if str(op) == "CATEGORY":
        return {"DIGIT": "1", "SPACE": " "}.get(str(arg).rpartition("_")[2], "a")
    return chr(arg[0] if str(op) == "RANGE" else arg)


def attacks(source):
    """(a beginning, what is repeated behind it), of the texts that an expression matches."""
    texts = samples(re._parser.parse(source))
    heads = sorted({text[:size] for text in texts for size in range(min(len(text), 20) + 1)})
    signs = sorted({*"".join(texts), "x"})[:16]
    words = re.findall(r"</?\w+>|\w{4,}", source)[:8]
    pumps = {*texts, *map("".join, (*product(signs, ["", *signs]), *product(words, repeat=2)))}
    return product(heads[:40], sorted(pumps - {""}))


def seconds_of(pattern, uses, text):
    """Of processor time that an expression takes for a text that it does not match as a whole."""
    began = time.thread_time()
    try:
        with bounded(2 * LONG_SECONDS):
            for use in {"search" if use not in ("match", "fullmatch") else use for use in uses}:
                getattr(pattern, use)(text)
    except TooLong:
        pass
    return time.thread_time() - began


def fault(pattern, uses):
    """What is repeated where an expression takes too long for it; None for nothing."""
    for head, pump in attacks(pattern.pattern):
        slow = seconds_of(pattern, uses, head + pump * SHORT + "\x00") > SHORT_SECONDS
        if slow and seconds_of(pattern, uses, head + pump * LONG + "\x00") > LONG_SECONDS:
            return head, pump
    return None


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_no_expression_takes_quadratic_time(place):
    pattern, uses = EXPRESSIONS[place]
    assert fault(pattern, uses) is None, pattern.pattern


@pytest.mark.parametrize(
    "quadratic",
    spread(
        [
            r"<a_key>(.*?)</a_key>\s*<a_value>(.*?)</a_value>",
            r'"[^"\\]*(?:\\.[^"\\]*)*"',
            r"\{\d*,?\d*\}",
            r"a+b",
            r"(x+)+y",
            r"\{\s*\d+\s*,?\s*\}",
        ],
        2,
    ),
)
def test_what_does_is_found(quadratic):
    assert fault(re.compile(quadratic), ["search"]) is not None


def pushed(formats, text):
    """What readers of an answer do with one long text."""
    for format in formats:
        reader = ToolReader(format, [])
        reader.push(text), reader.finish()
    thought = ReasoningReader(Marks.of("</think>"), Stage.THINKING)
    thought.push(text), thought.finish()
    stops = StopStrings(["</think>", "aaaaab"])
    for character in text:
        stops.feed(character)


def refused(work, *args):
    with pytest.raises((RequestError, ApiError, Unenforceable)):
        work(*args)


MANY = 100_000
ANSWERS = [
    '{"name": "f", "arguments": {"a": "' + "b" * MANY,
    '{"name": "f", "arguments": {"a": "b"}} ' * (MANY // 40),
    "<tool_call>f\n" + "<arg_key>" + "</arg_key><arg_value>" * (MANY // 20),
    "<tool_call>f\n<arg_key>a</arg_key></arg_value>" + "</arg_key><arg_value>" * (MANY // 20),
    "<tool_call>f\n" + "<arg_key>k</arg_key><arg_value>1</arg_value>" * (MANY // 40),
    "<tool_call>\n<function=f>\n<parameter=k>\n[" + '"</parameter>x",' * (MANY // 15),
    "<tool_call>\n<function=f>\n" + "<parameter=k>\n1\n</parameter>\n" * (MANY // 30),
    "<tool_call>\n<function=f>\n<parameter=k>" + "</parameter>" * (MANY // 12),
    "<tool_call>" + "\n<function=f>" * (MANY // 15),
    "[TOOL_CALLS]" + "f" * MANY + "[ARGS]",
    *("<tool_call>" * (MANY // 10), "<" * MANY, " " * MANY, "{" * MANY, "[" * MANY, "a" * MANY),
]


@pytest.mark.parametrize("text", ANSWERS, ids=range(len(ANSWERS)))
def test_answers_are_read_in_time(text):
    with bounded(10):
        pushed(FORMATS.values(), text)


@pytest.mark.parametrize("text", ANSWERS, ids=range(len(ANSWERS)))
@pytest.mark.parametrize("name", FORMATS)
def test_answers_are_read_in_time_as_they_come(name, text):
    """Of a text twice as long in pieces each character is not read twice as often."""

    def read(size):
        reader = ToolReader(FORMATS[name], [])
        for at in range(0, size, 12):
            reader.push(text[at : min(at + 12, size)])
        reader.finish()

    with bounded(10):
        short, long = (lines(lambda size=size: read(size)) for size in (2000, 4000))
    assert long < 2.5 * short


MARKS = [
    *{mark for format in FORMATS.values() for mark in (format.opener, format.closer, format.bare)},
    *{mark for format in FORMATS.values() for mark in (*format.marks, *format.each)},
    *("<function=f>", "</function>", "<parameter=k>", "</parameter>", "<function=", "f\n"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[ARGS]", '{"name": "f"', "}"),
    *("x", " ", "\n", "[", "]", '"', "\\", "functions.f:0"),
]


@pytest.mark.parametrize("name", FORMATS)
def test_marks_in_any_order_are_read_to_their_end(name):
    """An answer that begins two functions in a row was read for ever, on the event loop."""
    random = Random(name)
    for _ in range(300):
        text = "".join(random.choices(MARKS, k=random.randrange(1, 12)))
        with bounded(5):
            reader, contents = ToolReader(FORMATS[name], []), list[str]()
            for piece in random.choice([[text], text]):
                contents.append(reader.push(piece).content)
            contents.append(reader.finish().content)
        assert sum(map(len, contents)) <= len(text)


TEXTS = {
    "strings that never end": lambda: refused(
        parse_json, b'{"prompt":"' + b"[" * (MOST_CONTAINERS + 1) + b'\\"' * 500_000
    ),
    "a repetition that never ends": lambda: refused(portable, "a{" + "1" * MANY, "regex"),
    "look-ahead after look-ahead": lambda: plain_patterns("(?=a)" * 40_000),
    "a branch without end": lambda: _whole("a" * 10 * MANY),
    "patterns that try everything": lambda: [
        matching(pattern, ["a" * 40 + "!"] * 10)
        for pattern in ("(a+)+$", "(a|a)*$", "a?" * 40 + "a" * 40, ".*.*.*.*.*.*x", "(a*)*b")
    ],
    "JSON in a string": lambda: refused(json_rules, "[" + "[]," * MOST_CONTAINERS + "1]", "schema"),
    "arguments of a call": lambda: refused(argument_text, "[" + "[]," * 1_250_000 + "1]", "tools"),
    "a name of many characters": lambda: [
        *schemas({"properties": {"n" * MANY: {"properties": dict.fromkeys(map(str, range(9000)))}}})
    ],
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_read_in_time(name):
    with bounded(10):
        TEXTS[name]()


OTHERS_JSON = {
    "serve/bodies/closing.py",
    "serve/dialects/responses/store.py",
    "text/tokenizer.py",
    "text/json_text.py",
    "text/tool_bodies.py",
    "constrain/schema/paths.py",
    "constrain/grammar/tagged.py",
    "constrain/grammar/calls.py",
    "constrain/isolation/matcher_worker.py",
    "constrain/isolation/llguidance_worker.py",
}
"""These read files, what a model wrote, or a text that was written here."""


def test_json_of_clients_has_one_reader():
    callers = {
        str(path.relative_to(HERE))
        for name in READ_CLIENTS
        for path in (HERE / name).rglob("*.py")
        if re.search(r"json\.loads?\(|JSONDecoder|from_json\(", path.read_text(encoding="utf-8"))
    }
    assert callers == OTHERS_JSON


def test_patterns_that_can_be_judged_are():
    names = ["x-a", "ab", "a" * 60]
    assert matching("^x-", names) == [True, False, False]
    assert matching("^[a-z]+$", names) == [False, True, True]
    assert matching(r"^(x|y)-?[ab]{1,3}\d*$", names) == [True, False, False]
    assert matching("(", names) is None


def test_the_size_of_a_schema_is_looked_at_before_its_parts():
    many = {"anyOf": [{"const": number} for number in range(200_000)]}
    assert lines(lambda: refused(Grammar.json_schema, many)) < 1_000_000


def test_objects_are_closed_in_time_that_grows_with_the_schema():
    def chain(length):
        names = [f"d{number}" for number in range(length + 1)]
        refer = [{"allOf": [{"$ref": f"#/$defs/{name}"}]} for name in names[1:]]
        defined = dict(reversed([*zip(names, refer, strict=False)])) | {names[-1]: {}}
        return {"$defs": defined, "allOf": [{"$ref": "#/$defs/d0"}]}

    short, long = (lines(lambda size=size: closed(chain(size))) for size in (200, 400))
    assert long < 2.5 * short
