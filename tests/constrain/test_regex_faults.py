"""A pattern that is no regular expression in any dialect is distinguished from one that is only not
ours.
"""

import random
import re
import warnings

import llguidance
import pytest

from forerun.constrain.grammar import Grammar
from forerun.constrain.isolation.llguidance_worker import Bytes
from forerun.constrain.schema.regex_faults import regex_fault
from forerun.errors import RequestError

NO_REGEX = [
    ("([", 1, "'[' is never closed"),
    ("(", 0, "'(' is never closed"),
    ("a(b(c)", 1, "'(' is never closed"),
    ("(?:", 0, "'(' is never closed"),
    ("(?<=a", 0, "'(' is never closed"),
    ("(?<name>a", 0, "'(' is never closed"),
    (r"(a\)", 0, "'(' is never closed"),
    ("(a[)]", 0, "'(' is never closed"),
    ("a)", 1, "')' closes nothing"),
    ("(a))(", 3, "')' closes nothing"),
    ("[a-z", 0, "'[' is never closed"),
    ("^[^", 1, "'[' is never closed"),
    (r"[a\]", 0, "'[' is never closed"),
    ("^[a-zA-Z0-9._%+-+@", 1, "'[' is never closed"),
    ("a\\", 1, "'\\' escapes nothing"),
    ("*", 0, "'*' repeats nothing"),
    ("*.txt", 0, "'*' repeats nothing"),
    ("+49", 0, "'+' repeats nothing"),
    ("a|?b", 2, "'?' repeats nothing"),
    ("(+a)", 1, "'+' repeats nothing"),
    ("(?:*a)", 3, "'*' repeats nothing"),
    ("(?=?)", 3, "'?' repeats nothing"),
    ("[z-a]", 0, "the range z-a is in the wrong order"),
    ("^[a-Z]+$", 1, "the range a-Z is in the wrong order"),
    ("[^09-1]", 0, "the range 9-1 is in the wrong order"),
    (r"\d{5,3}", 2, "the bounds {5,3} are in the wrong order"),
    ("(ab){10,9}", 4, "the bounds {10,9} are in the wrong order"),
    ("a{1" + "0" * 5000 + ",9}", 1, "are in the wrong order"),
]

SOME_DIALECT = [
    *("", "a", "^a$", "a|", "()", "(|a)", "a{2}", "a{,3}", "a{", "a}", "]", "{2}", "^*", "a**"),
    *("a{3,3}", "a{003,3}", r"\u{3,1}", r"\p{L}", r"\cA", r"\c(", r"\k<n>", r"\1", r"\q", r"\/"),
    *("[]", "[^]", "[]a]", "[](]", "[^](]", "[[:alpha:](]", "[[:alpha:]", "[[(]]", "[[]", "[[](]"),
    *("[a-z-a]", "[a-]", "[-z]", r"[\d-z-a]", r"[\x7a-\x61]", "[[a-z]&&[^q]]", "[[a-z]--[q]]"),
    *("(?i)a", "(?i:a)", "(?-i:a)", "(?P<n>a)(?P=n)", "(?<n>a)", "(?>a)", "(?|a)", "a++", "a*?"),
    *(
        "(?=a)b",
        "(?!a)b",
        "(?<!a)b",
        "(?<=a)*",
        "(?#()",
        "(?x)a # (",
        "(?{(})",
        r"\Q(\E",
        "(*UTF)a",
    ),
    *(
        "(?R)",
        "(?1)",
        "(?(1)a|b)",
        "(?'n'a)",
        "(?)",
        r"(?<n>a)\g{n}",
        r"\A\w+\z",
        r"\bx\b",
        "😀{2}",
    ),
]
"""Regular expressions in one dialect at least, most of which ours does not support; and what is
left to the engine: it takes a dialect's whole grammar to know.
"""


@pytest.mark.parametrize(("pattern", "place", "message"), NO_REGEX)
def test_no_regex_is_pointed_at(pattern, place, message):
    fault = regex_fault(pattern)
    assert fault is not None and fault[0] == place and message in fault[1]


@pytest.mark.parametrize("pattern", SOME_DIALECT)
def test_a_regex_of_some_dialect_is_none_of_ours_to_refuse(pattern):
    assert regex_fault(pattern) is None


@pytest.mark.parametrize("pattern", ["([", "[a-Z]"])
@pytest.mark.parametrize(
    ("inside", "path"),
    [
        (lambda pattern: {"pattern": pattern}, "pattern"),
        (lambda pattern: {"properties": {"a": {"pattern": pattern}}}, "properties.a.pattern"),
        (lambda pattern: {"patternProperties": {pattern: {}}}, "patternProperties"),
        (lambda pattern: {"propertyNames": {"pattern": pattern}}, "propertyNames.pattern"),
        (lambda pattern: {"anyOf": [{}, {"pattern": pattern}]}, "anyOf[1].pattern"),
        (lambda pattern: {"$defs": {"x": {"pattern": pattern}}}, "$defs.x.pattern"),
    ],
)
def test_the_path_is_named(pattern, inside, path):
    with pytest.raises(RequestError) as error:
        Grammar.json_schema(inside(pattern))
    assert f"grammar: {path} is not a valid regular expression: " in str(error.value)


def test_what_is_only_called_a_pattern_is_none():
    schema = {"properties": {"pattern": {"const": {"pattern": "(["}}}, "examples": ["(["]}
    assert Grammar.json_schema({"type": "object", **schema})


PARTS = [
    *"()[]{}*+?|^$\\-.,:=!<>&~#abzAZ09",
    *("(?:", "(?=", "(?<=", "(?<n>", "(?P<n>", "(?P=n)", "(?i)", "(?>", "(?|", "(?#", "(?x)", "[^"),
    *(r"\d", r"\b", r"\p{L}", r"\x41", r"\cA", r"\1", "[z-a]", "{2}", "{3,1}", "[[:alpha:]]", "&&"),
]


def test_python_and_rust_take_none_of_what_is_refused():
    """Random patterns, each read by two other readers (V8: tests/browser/test_regex_faults.py)."""
    rng = random.Random(7)
    patterns = ("".join(rng.choices(PARTS, k=rng.randint(1, 8))) for _ in range(3000))
    refused = [pattern for pattern in patterns if regex_fault(pattern)]
    assert len(refused) > 1000
    assert [pattern for pattern in refused if python_takes(pattern)] == []
    vocabulary = llguidance.LLTokenizer(Bytes())
    # llguidance escapes the slash that it puts behind a pattern with a backslash at its end.
    sample = [pattern for pattern in refused[:750] if not pattern.endswith("\\")]
    assert [pattern for pattern in sample if rust_takes(pattern, vocabulary)] == []


def python_takes(pattern):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            re.compile(pattern)
        except (re.error, OverflowError):
            return False
    return True


def rust_takes(pattern, vocabulary):
    text = llguidance.LLMatcher.grammar_from_regex(pattern)
    return not llguidance.LLMatcher(vocabulary, text, log_level=0).is_error()


@pytest.mark.parametrize(
    "part", ["(", ")", "[", "[[", "[]", "[:a", "\\", "{1,2}", "(?", "*", "[^]"]
)
def test_it_takes_no_longer_than_the_pattern_is_long(part, monkeypatch):
    """Tokens are counted, in all readings together: twice as many for twice the pattern."""
    one, two = (steps(f"[[({part * count}", monkeypatch) for count in (500, 1000))
    assert two <= 2 * one + 20


def steps(pattern, monkeypatch):
    import forerun.constrain.schema.regex_faults as module

    count = 0

    class Counted:
        def __init__(self, inner):
            self.inner = inner

        def match(self, *arguments):
            nonlocal count
            count += 1
            return self.inner.match(*arguments)

    with monkeypatch.context() as patch:
        for name in ("_TOKEN", "_IN_SET"):
            patch.setattr(module, name, Counted(getattr(module, name)))
        regex_fault(pattern)
    return count
