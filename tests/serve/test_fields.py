"""Bodies check themselves: what is read, what is refused, and how the culprit is named."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import RequestError
from forerun.serve.bodies.fields import (
    Declaration,
    accept,
    boolean,
    declared,
    integer,
    items,
    need,
    number,
    one_or_more,
    only,
    part,
    read,
    shown,
    text,
)
from forerun.serve.bodies.messages import content
from forerun.serve.bodies.structure import response_rules
from forerun.serve.bodies.wire import dump_json, parse_json
from forerun.serve.dialects.anthropic.schema import AnthropicMessage
from forerun.serve.dialects.ollama.schema import OllamaMessage
from forerun.serve.dialects.ollama.schema import _format as ollama_format
from forerun.serve.dialects.responses.schema import InputMessage
from forerun.serve.http.errors import ApiError, error_body
from forerun.serve.openapi import BODIES


@dataclass(frozen=True, kw_only=True)
class Inner(Declaration):
    on: bool = accept(boolean, False)


@dataclass(frozen=True, kw_only=True)
class Outer(Declaration):
    name: str = need(text(5))
    count: int = accept(integer(1, 9), 3)
    inner: Inner | None = accept(part(Inner))

    refused: ClassVar[dict[str, str]] = {"old": "use count"}


def problem(kind, value):
    with pytest.raises(RequestError) as caught:
        read(kind, value)
    return caught.value.field, str(caught.value)


def test_defaults_nulls_and_parts():
    assert read(Outer, {"name": "a"}) == Outer(name="a", count=3, inner=None)
    assert read(Outer, {"name": "a", "count": None, "old": None, "new": None}) == Outer(name="a")
    for nothing in (False, 0, "", [], {}):
        assert read(Outer, {"name": "a", "old": nothing}) == Outer(name="a")
    assert read(Outer, {"name": "a", "inner": {"on": True}}).inner == Inner(on=True)


def test_the_culprit_is_named():
    assert problem(Outer, {"name": "a", "old": 1}) == ("old", "old is not supported: use count.")
    assert problem(Outer, {"name": "a", "new": 1})[0] == "new"
    assert problem(Outer, {"name": "a", "new": 0})[0] == "new"
    there_is_none = "There is no field {} in this request; {}".format
    assert problem(Outer, {"new": 1})[1] == there_is_none("'new'", "see /openapi.json.")
    assert problem(Outer, {"cuont": 1})[1] == there_is_none("'cuont'", "did you mean count?")
    assert problem(Outer, {"name": "a", "inner": {"off": 1}})[0] == "inner.off"
    assert problem(Outer, {"name": "a", "inner": {"on": 1}})[0] == "inner.on"
    assert problem(Outer, {"name": "a", "inner": [1]})[0] == "inner"
    assert problem(Outer, {}) == ("name", "name is missing.")
    assert problem(Outer, {"name": None}) == ("name", "name is missing.")
    assert problem(Outer, [])[0] is None


@pytest.mark.parametrize(
    ("reader", "value", "message"),
    [
        (response_rules, "json", "it must be a JSON object, not the string 'json'."),
        (response_rules, {}, "it.type must be one of text, json_object, json_schema, "),
        (content, ["Hi"], "it[0] must be a JSON object, not the string 'Hi'."),
        (content, [{"text": "Hi"}], "it[0].type must be text, not null."),
        (content, [{"type": "text", "txt": "Hi"}], "There is no field 'it[0].txt' in this request"),
        (content, [{"type": "image_url"}], "it[0].type: the string 'image_url' is not supported: "),
        (ollama_format, "xml", "it must be json or a JSON schema, not the string 'xml'."),
        (ollama_format, "{", "it is not JSON: "),
    ],
)
def test_what_was_sent_is_what_is_shown(reader, value, message):
    with pytest.raises(RequestError) as caught:
        reader(value, "it")
    assert str(caught.value).startswith(message)


READERS = [
    (boolean, [True, False], [0, 1, "true", None, []]),
    (
        integer(1, 9),
        [1, 9, 3.0],
        [0, 10, 10.0, 3.5, float("inf"), float("nan"), "1", True, None, 10**400, -(10**400)],
    ),
    (number(0, 2), [0, 2, 1.5], [-0.1, 2.1, "1", True, float("inf"), float("nan"), 10**400]),
    (text(3, 1), ["a", "äöü"], ["", "abcd", 1, None, "a\ud800"]),
    (items(integer(0, 1), 2, 1), [[0], [1, 0]], [[], [0, 1, 0], [2], 0, "01", {"0": 1}]),
    (one_or_more(text(3), 2), ["abc", ["a", "b"], []], ["abcd", ["a", "b", "c"], [1], 1]),
    (only(False, "x", why="w"), [False, "x"], [0, True, "y", None]),
]


def test_a_whole_number_may_have_a_fraction_of_zero():
    """Clients in languages that know one kind of number write 3.0."""
    assert integer(1, 9)(3.0, "it") == 3 and type(integer(1, 9)(3.0, "it")) is int


@pytest.mark.parametrize(("reader", "good", "bad"), READERS, ids=range(len(READERS)))
def test_readers(reader, good, bad):
    for value in good:
        reader(value, "it")
    for value in bad:
        with pytest.raises(RequestError) as caught:
            reader(value, "it")
        assert caught.value.field.startswith("it")
        assert str(caught.value).startswith("it")
        assert len(str(caught.value)) < 250


def test_what_is_shown_is_short_and_clean():
    assert shown("a" * 10**6).endswith("'...")
    assert len(shown("\ud800" * 1000)) < 500
    assert shown([1] * 10**5) == "a list of 100000"
    assert shown(10**5000) == "a number of 16610 bits"
    assert [shown(value) for value in (None, True, False, 1, 1.5)] == [
        "null",
        "true",
        "false",
        "1",
        "1.5",
    ]
    name = "\ud800" + "x" * 1000
    field, message = problem(Outer, {"name": "a", name: 1})
    dump_json({"field": field, "message": message})
    assert len(field) < 100


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None))
    | st.sampled_from(["user", "text", "a"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1", "on"]), inner)
    ),
    max_leaves=12,
)
KINDS = (*BODIES.values(), AnthropicMessage, InputMessage, OllamaMessage)
NAMES = sorted({name for kind in KINDS for name in declared(kind)} | {"suffix", "x"})


@settings(max_examples=75)
@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6))
def test_any_json_is_read_or_refused_by_name(kind, value):
    """No other exception, and an error that can be sent."""
    try:
        body = read(kind, value)
    except RequestError as error:
        assert error.field is not None
        answer = parse_json(dump_json({"message": str(error), "param": error.field}))
        assert answer["param"]
    else:
        assert isinstance(body, kind)


@settings(max_examples=75)
@given(
    st.binary(max_size=60)
    | st.text(alphabet='{}[]",:0123456789eE+-.truefalsNaIiy \\u').map(str.encode)
)
def test_any_bytes_are_json_or_a_400(data):
    try:
        value = parse_json(data)
    except ApiError as error:
        assert error.status == 400
        dump_json(error_body(error))
    else:
        read_back = parse_json(dump_json(value)) if _finite(value) else value
        assert type(read_back) is type(value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b"9" * 5000, "a number has more than 4300 digits"),
        (b"[1e999]", "the number 1e999 is out of range"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "the key 'b' appears 2 times in one object"),
        (rb'{"\ud800": 1, "\ud800": 2}', r"the key '\ud800' appears 2 times"),
        (b"\xff", "it is not valid UTF-8 (byte 0)"),
        (b"[" * 10**5, "it is nested too deeply"),
    ],
)
def test_what_is_no_json_is_said_in_words(data, says):
    with pytest.raises(ApiError) as caught:
        parse_json(data)
    assert says in str(caught.value)


def _finite(value):
    try:
        dump_json(value)
    except ValueError:
        return False
    return True


def test_an_error_repeats_no_more_than_a_few_lines_of_what_was_sent():
    """`{"type": "a" * 70_000}` as a schema came back whole."""
    error = ApiError(400, "begin " + "a" * 1_000_000 + " end", param="b" * 1_000_000)
    message, param = str(error), str(error.param)
    assert len(message) <= 4000 and message.startswith("begin ") and message.endswith(" end")
    assert len(param) <= 400
    assert str(ApiError(400, "short", param="x")) == "short"
