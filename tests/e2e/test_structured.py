"""Constrained answers of a real server process: valid, and the same by every route."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.constrain.tools import PERSON, is_person
from tests.covering import every, some_of, values
from tests.dialects.requests import with_two
from tests.lazy import LazyModule
from tests.worlds.servers import serving

openai = LazyModule("openai")


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Which city?"}]
CITY, CITIES = "(Paris|Amsterdam)", ("Paris", "Amsterdam")


@pytest.fixture
def server(toy_server):
    yield toy_server
    assert not toy_server.held()


def strict(schema):
    wrapped = {"name": "x", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": wrapped}


TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "b", "schema": {"type": "integer"}, "end": ";"}],
    "triggers": ["b"],
}


def is_object(text):
    return isinstance(json.loads(text), dict)


def is_tagged(text):
    return re.sub(r"b-?\d+;", "", text).count("b") == 0


KINDS = [
    ({"regex": CITY}, CITIES.__contains__),
    ({"structured_outputs": {"regex": CITY}}, CITIES.__contains__),
    ({"guided_regex": CITY}, CITIES.__contains__),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no").__contains__),
    ({"guided_choice": ["yes", "no"]}, ("yes", "no").__contains__),
    ({"ebnf": 'root ::= "a" root "b" | "c"'}, re.compile("a*cb*").fullmatch),
    ({"grammar": "root ::= [a-c]{3}"}, re.compile("[a-c]{3}").fullmatch),
    ({"structured_outputs": {"grammar": "start: /[x-z]{2}/"}}, re.compile("[x-z]{2}").fullmatch),
    ({"json_schema": PERSON}, is_person),
    ({"json_schema": json.dumps(PERSON)}, is_person),
    ({"structured_outputs": {"json": PERSON}}, is_person),
    ({"response_format": strict(PERSON)}, is_person),
    ({"response_format": {"type": "json_object"}}, is_object),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, is_person),
    ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, is_tagged),
    ({"response_format": TAGS}, is_tagged),
]
DENSE = {str(ord(blank)): -100 for blank in "\t\n\r "}
"""Left to itself, the greedy toy fills JSON with as much white space as it may."""
SAMPLINGS = ({"temperature": 0}, {"temperature": 0.8, "seed": 7, "n": 2})


def texts(server, route, **body):
    """The texts of all choices, in one piece."""
    answer = server.post(route, {**starting(route), **body})
    assert answer.status_code == 200, answer.text
    return [(output_tokens(choice), choice["finish_reason"]) for choice in answer.json()["choices"]]


def starting(route):
    return {"messages": MESSAGES} if route == CHAT else {"prompt": "Which city?"}


def output_tokens(choice):
    return choice["message"]["content"] if "message" in choice else choice["text"]


def streamed(server, route, **body):
    """The same, as a stream."""
    pieces: dict[int, list] = {}
    for choice in chunks(server, route, **body):
        text, finish = pieces.setdefault(choice["index"], ["", None])
        piece = choice["delta"].get("content", "") if route == CHAT else choice["text"]
        pieces[choice["index"]] = [text + piece, choice["finish_reason"] or finish]
    return [tuple(pieces[index]) for index in sorted(pieces)]


def chunks(server, route, **body):
    answer = server.post(route, {**starting(route), "stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize(
    ("number", "route", "sampling"),
    some_of(every(range(len(KINDS)), [CHAT, COMPLETIONS], range(len(SAMPLINGS))), values),
)
def test_every_spelling_whole_and_streamed_with_and_without_speculation(
    server, number, route, sampling
):
    kind, valid = KINDS[number]
    body = {**kind, **SAMPLINGS[sampling], "max_tokens": 100, "logit_bias": DENSE}
    wanted = texts(server, route, **body)
    assert all(valid(text) for text, finish in wanted if finish == "stop"), wanted
    off = {**body, "speculative": {"enabled": False}}
    assert texts(server, route, **off) == wanted
    assert streamed(server, route, **body) == wanted
    assert streamed(server, route, **off) == wanted


@with_two("toy_server")
def test_paris_and_a_malformed_answer(server):
    assert texts(server, CHAT, regex=CITY)[0][0] in CITIES
    for body, field in (
        ({"regex": "(Paris|Amsterdam}"}, "regex"),
        ({"structured_outputs": {"regex": "(Paris|Amsterdam}"}}, "structured_outputs.regex"),
    ):
        answer = server.post(CHAT, {"messages": MESSAGES, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        _, shown, caret = error["message"].splitlines()
        assert shown[caret.index("^")] == "}"


def test_the_text_is_a_continuation_where_the_grammar_leaves_room(server):
    """With a grammar of letters that the toy writes anyway, nothing changes but the end."""
    free = texts(server, COMPLETIONS, temperature=0, max_tokens=12)[0][0]
    bound = texts(server, COMPLETIONS, temperature=0, max_tokens=30, regex="[a-p]{12}")[0]
    assert bound == (free, "stop")


@with_two("toy_server")
@pytest.mark.parametrize(
    "two",
    [
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"json_schema": {}, "guided_choice": ["a"]},
    ],
)
def test_two_constraints_are_refused_by_both_names(server, two):
    error = server.post(COMPLETIONS, {"prompt": "a", **two}).json()["error"]
    assert all(name in error["message"] for name in two) and error["param"] in two


def test_a_text_format_is_no_constraint(server):
    body = {"response_format": {"type": "text"}, "regex": CITY}
    assert texts(server, CHAT, **body)[0][0] in CITIES


@with_two("toy_server")
def test_json_on_one_line(server):
    body = {"json": PERSON, "disable_any_whitespace": True}
    (text, finish), *_ = texts(server, CHAT, structured_outputs=body, temperature=0, max_tokens=300)
    assert (text, finish) == (json.dumps(json.loads(text), ensure_ascii=False), "stop")
    body = {"regex": "a", "disable_any_whitespace": True}
    assert server.post(CHAT, {"messages": MESSAGES, "structured_outputs": body}).status_code == 400


@with_two("toy_server", seldom=True)
def test_forty_at_once_half_of_them_constrained(server):
    free = [{"prompt": f"number {index}", "max_tokens": 40} for index in range(20)]
    alone = [server.complete(**body).json()["choices"][0]["text"] for body in free]

    def ask(index):
        if index % 2:
            return texts(server, COMPLETIONS, **free[index // 2], temperature=0)
        kind, _ = KINDS[index // 2 % len(KINDS)]
        temperature = 0.5 + index / 40
        body = {**kind, "temperature": temperature, "seed": index, "max_tokens": 100}
        body["logit_bias"] = DENSE
        return (streamed if index % 4 else texts)(server, CHAT, **body)

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(40)))
    for index, ((text, finish),) in enumerate(answers):
        if index % 2:
            assert text == alone[index // 2]
        elif finish == "stop":
            assert KINDS[index // 2 % len(KINDS)][1](text), text
    finished = [finish for ((_, finish),) in answers[::2]]
    assert finished.count("stop") >= 15, finished


def test_logprobs_and_stop_strings(server):
    body = {"regex": "(Paris|Amsterdam)", "logprobs": True, "top_logprobs": 2, "stop": ["ster"]}
    answer = server.post(CHAT, {"messages": MESSAGES, "temperature": 2, "seed": 0, **body}).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] in ("Paris", "Am")
    letters = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert letters in ("Paris", "Amster")


@with_two("toy_server", seldom=True)
def test_hostile_grammars_block_no_other_request(server):
    """Before the first of them is compiled or refused, others are answered: counted, not timed. One
    may have been before the first came; two say that no request waits for it.
    """
    slow = [{"regex": f"((a{{1,1000}}){{1,1000}}){{1,{1000 + index}}}"} for index in range(3)]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.complete, **body) for body in slow]
        answered = 0
        while not any(job.done() for job in waiting):
            assert server.complete(max_tokens=5).status_code == 200
            answered += 1
        assert all(job.result().status_code in (200, 400) for job in waiting)
    assert answered >= 2


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": list(CITIES)},
                "days": {"type": "integer", "maximum": 9},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def checked(call):
    function = call["function"]
    arguments = json.loads(function["arguments"])
    assert call["type"] == "function" and len(call["id"]) == 9
    if function["name"] == "weather":
        assert arguments["city"] in CITIES and arguments.get("days", 0) <= 9
        assert arguments.keys() <= {"city", "days"}
    else:
        assert (function["name"], arguments) == ("now", {})
    return function["name"], function["arguments"]


def gathered(server, body):
    """Content and tool calls of a stream, put together; the order of pieces checked."""
    content, calls, finish = "", [], None
    for choice in chunks(server, CHAT, **body):
        delta, finish = choice["delta"], choice["finish_reason"] or finish
        content += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(calls) and piece["function"]["arguments"] == ""
                calls.append(piece)
            else:
                assert piece.keys() == {"index", "function"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return content, calls, finish


CHOICES = [
    {"type": "function", "function": {"name": "weather"}},
    {"type": "function", "function": {"name": "now"}},
]


@with_two("toy_server")
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_named_tools(server, choice, sampling):
    assert one_call(server, choice, sampling) == choice["function"]["name"]


def one_call(server, choice, sampling):
    """The name of what is called, whole and streamed, with speculation and without."""
    body = {"tools": [WEATHER, NOW], "tool_choice": choice, "max_tokens": 250, **sampling}
    body |= {"logit_bias": {**DENSE, "34": 5}, "parallel_tool_calls": False}
    (whole,) = server.post(CHAT, {"messages": MESSAGES, **body}).json()["choices"]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    (called,) = map(checked, whole["message"]["tool_calls"])
    for speculative in ({}, {"enabled": False}):
        content, calls, finish = gathered(server, {**body, "speculative": speculative})
        assert (content, [*map(checked, calls)], finish) == ("", [called], "tool_calls")
    return called[0]


@with_two("toy_server")
def test_tools_that_may_be_called(server):
    """The toy never writes the opener by itself; a bias helps it."""
    body = {"tools": [WEATHER, NOW], "temperature": 0, "max_tokens": 20}
    (plain,) = server.post(CHAT, {"messages": MESSAGES, **body}).json()["choices"]
    assert "tool_calls" not in plain["message"] and plain["message"]["content"]
    (none,) = texts(server, CHAT, temperature=0, max_tokens=20)
    (not_offered,) = texts(server, CHAT, **{**body, "tool_choice": "none"})
    assert not_offered == none, "tools that may not be called are not mentioned"


def test_parallel_calls_are_counted(server):
    """A second call begins with a line break."""
    body = {"tools": [NOW], "tool_choice": "required", "temperature": 0, "max_tokens": 200}
    body["logit_bias"] = {"10": 100}
    content, calls, finish = gathered(server, body)
    assert finish == "length" and len(calls) > 1
    assert content.strip() == "", "the call that was cut off is left out"
    assert all(call["function"]["name"] == "now" for call in calls)
    content, calls, finish = gathered(server, {**body, "parallel_tool_calls": False})
    assert (content, finish, len(calls)) == ("", "tool_calls", 1)


@with_two("toy_server")
def test_tools_and_a_schema(server):
    body = {"tools": [NOW], "response_format": strict(PERSON), "max_tokens": 300}
    body["logit_bias"] = DENSE
    whole = {"messages": MESSAGES, "temperature": 0, **body}
    (choice,) = server.post(CHAT, whole).json()["choices"]
    message = choice["message"]
    assert message.get("tool_calls") or is_person(message["content"])
    error = server.post(CHAT, {"messages": MESSAGES, **body, "tool_choice": "required"}).json()[
        "error"
    ]
    assert "response_format" in error["message"] and "tool_choice" in error["message"]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """The toy taken for a model whose reasoning ends with two tokens."""
    settings = {"reasoning_end": "hg"}
    with serving(tmp_path_factory.mktemp("thinking"), settings=settings) as server:
        yield server


def test_a_constraint_begins_where_the_reasoning_ends(thinking):
    """Draft tokens are accepted across the end of reasoning, which falls anywhere in a run; what
    only begins like it is reasoning.
    """

    def body_of(number):
        body = {"messages": [{"role": "user", "content": f"City {number}"}], "max_tokens": 400}
        body |= {"temperature": 1.0, "seed": number, "logit_bias": {"103": 3, "104": 3}}
        return body | {"regex": "[a-d]{9}"}

    def answered(body):
        (choice,) = thinking.post(CHAT, body).json()["choices"]
        message = choice["message"]
        return message.get("reasoning_content", ""), message["content"], choice["finish_reason"]

    def gathered(body):
        reasoning, content, finish = "", "", None
        for choice in chunks(thinking, CHAT, **body):
            assert not (content and choice["delta"].get("reasoning_content"))
            reasoning += choice["delta"].get("reasoning_content", "")
            content += choice["delta"].get("content", "")
            finish = choice["finish_reason"] or finish
        return reasoning, content, finish

    bodies = list(map(body_of, range(24)))
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(answered, bodies))
        streams = list(pool.map(gathered, bodies))
        plain = list(pool.map(answered, [{**b, "speculative": {"enabled": False}} for b in bodies]))
    assert answers == streams == plain
    ended = [(reasoning, content) for reasoning, content, finish in answers if finish == "stop"]
    assert sum(bool(content) for _, content in ended) > 12
    for reasoning, content in ended:
        assert "hg" not in reasoning
        assert re.fullmatch("[a-d]{9}", content), "nothing ends before its constraint began"
    assert any("h" in reasoning for reasoning, _ in ended), "half a marker is no marker"
