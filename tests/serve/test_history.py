"""What was said before is read as far as it can be read; what is said anew is read strictly."""

import json
import time

import pytest

from forerun.serve.bodies.fields import mender
from forerun.serve.bodies.messages import messages
from forerun.serve.bodies.tools import argument_text

HEADER = "x-forerun-ignored"
PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
USER = {"role": "user", "content": "Which city?"}
NEXT = {"role": "user", "content": "And then?"}


def said(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | fields


def called(arguments, **fields):
    return {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    } | fields


RESULT = {"role": "tool", "tool_call_id": "a", "content": "Oslo"}
PLAIN = [USER, {"role": "assistant", "content": "Oslo"}, NEXT]
CALLED = [USER, said(called('{"x": 1}')), RESULT, NEXT]
NOTHING = [USER, said(called("{}")), RESULT, NEXT]
ARGUMENTS = "messages[1].tool_calls[0].function.arguments"

CHATS = [
    ([USER, said(called('{"x": 1}{"x": 1}')), RESULT, NEXT], CALLED, ARGUMENTS),
    ([USER, said(called('{"x": 1} and so on')), RESULT, NEXT], CALLED, ARGUMENTS),
    ([USER, said(called('{"x": "cut he')), RESULT, NEXT], NOTHING, ARGUMENTS),
    ([USER, said(called("[" * 70 + "]" * 70)), RESULT, NEXT], NOTHING, ARGUMENTS),
    ([USER, said(called('{"x": "\\ud800"}')), RESULT, NEXT], NOTHING, ARGUMENTS),
    ([USER, said(called({"x": 1})), RESULT, NEXT], CALLED, ""),
    ([USER, said(called('{"x": 1}'), content=[]), RESULT, NEXT], CALLED, ""),
    ([USER, said(called('{"x": 1}', opts=3)), RESULT, NEXT], CALLED,
     "messages[1].tool_calls[0].opts"),
    ([{**USER, "id": 1}, {**PLAIN[1], "id": "m", "opts": {}}, NEXT], PLAIN,
     "messages[0].id, messages[1].id, messages[1].opts"),
    ([{**USER, "name": 7}, PLAIN[1], NEXT], PLAIN, "messages[0].name"),
    ([{**USER, "a b\né": 7}, PLAIN[1], NEXT], PLAIN, "messages[0].a%20b%0A%C3%A9"),
    ([{**USER, "content": [{"type": "text", "text": "Which city?"}, PNG]}, PLAIN[1], NEXT], PLAIN,
     "messages[0].content[1]"),
    ([USER, {"role": "assistant", "content": "Oslo", "refusal": "no", "annotations": [{}]}, NEXT],
     PLAIN, "messages[1].refusal, messages[1].annotations"),
    ([USER, {"role": "assistant", "content": None}, NEXT],
     [USER, {"role": "assistant", "content": ""}, NEXT], ""),
    ([USER, said(), NEXT], [USER, {"role": "assistant", "content": ""}, NEXT], ""),
    ([*CALLED[:2], {**RESULT, "content": [{"type": "text", "text": "Oslo"}, PNG]}], CALLED[:3],
     "messages[2].content[1]"),
    ([*CALLED[:2], {**RESULT, "id": 5}], CALLED[:3], "messages[2].id"),
    ([*CALLED[:2], {**RESULT, "content": [{"type": "text", "text": "Oslo"}, 1, None, "x"]}],
     CALLED[:3], "messages[2].content[1], messages[2].content[2], messages[2].content[3]"),
]  # fmt: skip


def post(client, path, body):
    return client.post(path, json=body)


@pytest.mark.parametrize(("given", "mended", "named"), CHATS)
def test_a_history_is_read_as_far_as_it_can_be(client, given, mended, named):
    body = {"max_tokens": 8, "temperature": 0, "tools": []}
    answers = [
        post(client, "/v1/chat/completions", {**body, "messages": m}) for m in (given, mended)
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    first, second = (answer.json() for answer in answers)
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert answers[0].headers.get(HEADER, "") == named
    assert HEADER not in answers[1].headers
    for path in ("/apply-template", "/tokenize", "/v1/chat/completions/input_tokens"):
        found = [post(client, path, {"messages": m}).json() for m in (given, mended)]
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([*PLAIN[:2], {**NEXT, "id": 1}], "messages[2].id"),
        ([*PLAIN[:2], {**NEXT, "content": None}], "messages[2].content"),
        ([*PLAIN[:2], {**NEXT, "content": [PNG]}], "messages[2].content[0].type"),
        (
            [USER, {**NEXT, "tool_calls": [called("{")]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
        ([{"role": "asistant", "content": "Oslo"}, *PLAIN[1:]], "messages[0].role"),
        ([5, *PLAIN[1:]], "messages[0]"),
    ],
)
def test_what_is_said_anew_is_read_strictly(client, given, named):
    answer = post(client, "/v1/chat/completions", {"messages": given, "max_tokens": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


TEXT = {"type": "text", "text": "Oslo"}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
RAIN = {"type": "text", "text": "Rain"}
BROUGHT = {"type": "tool_result", "tool_use_id": "a", "content": "Rain"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def turn(*blocks, role="assistant", **fields):
    return {"role": role, "content": list(blocks)} | fields


BLOCKS = [
    ([USER, turn(TEXT, {"type": "redacted_thinking", "data": "x"}), NEXT], [USER, turn(TEXT), NEXT],
     "messages[1].content[1]"),
    ([USER, turn(TEXT, id=3, name="me"), NEXT], [USER, turn(TEXT), NEXT],
     "messages[1].id, messages[1].name"),
    ([USER, turn({**TEXT, "citations": [{}], "opts": 1}), NEXT], [USER, turn(TEXT), NEXT],
     "messages[1].content[0].citations, messages[1].content[0].opts"),
    ([USER, turn(TEXT, BROUGHT), NEXT], [USER, turn(TEXT), NEXT], "messages[1].content"),
    ([USER, {"role": "assistant", "content": None}, NEXT], [USER, turn(), NEXT], ""),
    ([USER, turn({**USE, "input": '{"x": 1}'}), turn(BROUGHT, role="user")],
     [USER, turn(USE), turn(BROUGHT, role="user")], ""),
    ([USER, turn({**USE, "input": '{"x": '}), turn(BROUGHT, role="user")],
     [USER, turn({**USE, "input": {}}), turn(BROUGHT, role="user")],
     "messages[1].content[0].input"),
    ([USER, turn(USE), turn({**BROUGHT, "content": [RAIN, IMAGE]}, role="user")],
     [USER, turn(USE), turn(BROUGHT, role="user")], "messages[2].content[0].content[1]"),
    ([turn(TEXT, IMAGE, role="user"), turn(TEXT), NEXT],
     [turn(TEXT, role="user"), turn(TEXT), NEXT],
     "messages[0].content[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "mended", "named"), BLOCKS)
def test_blocks_of_a_history(client, given, mended, named):
    answers = [post(client, "/v1/messages", {"max_tokens": 8, "temperature": 0, "messages": m})
               for m in (given, mended)]  # fmt: skip
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert answers[0].json()["content"] == answers[1].json()["content"]
    assert answers[0].headers.get(HEADER, "") == named
    counts = [
        post(client, "/v1/messages/count_tokens", {"messages": m}).json() for m in (given, mended)
    ]
    assert counts[0] == counts[1]


def test_a_marked_thought(client):
    thought = {"type": "thinking", "thinking": "Hm", "cache_control": {"type": "ephemeral"}}
    body = {"max_tokens": 2, "messages": [USER, turn(thought, TEXT), NEXT]}
    answer = post(client, "/v1/messages", body)
    assert answer.headers[HEADER] == "messages.cache_control"


@pytest.mark.parametrize(
    ("last", "named"),
    [
        (turn(IMAGE, role="user"), "messages[2].content[0].type"),
        (turn(TEXT, role="user", id=1), "messages[2].id"),
        (turn({**TEXT, "opts": 1}, BROUGHT, role="user"), "messages[2].content[0].opts"),
    ],
)
def test_new_blocks_are_read_strictly(client, last, named):
    body = {"max_tokens": 2, "messages": [USER, turn(USE), last]}
    answer = post(client, "/v1/messages", body)
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]


ITEM_CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'}
ITEM_OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "Rain"}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
ITEMS = [
    ([USER, {**ITEM_CALL, "arguments": '{"x": 1}{"x": 1}'}, ITEM_OUTPUT],
     [USER, ITEM_CALL, ITEM_OUTPUT], "input[1].arguments"),
    ([USER, {**ITEM_CALL, "opts": 1}, {**ITEM_OUTPUT, "opts": 1}], [USER, ITEM_CALL, ITEM_OUTPUT],
     "input[1].opts, input[2].opts"),
    ([USER, {"type": "web_search_call", "id": "w", "status": "completed"}, PLAIN[1], NEXT], PLAIN,
     "input[1]"),
    ([{**USER, "id": 3}, {**PLAIN[1], "content": [{"type": "output_text", "text": "Oslo"},
      {"type": "refusal", "refusal": "no"}]}, NEXT], PLAIN, "input[0].id, input[1].content[1]"),
    ([USER, ITEM_CALL, {**ITEM_OUTPUT, "output": [{**RAIN, "type": "input_text"}, PICTURE]}],
     [USER, ITEM_CALL, ITEM_OUTPUT], "input[2].output[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "mended", "named"), ITEMS)
def test_items_of_a_history(client, given, mended, named):
    answers = [post(client, "/v1/responses", {"max_output_tokens": 8, "temperature": 0, "input": m})
               for m in (given, mended)]  # fmt: skip
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    texts = [answer.json()["output"][0]["content"] for answer in answers]
    assert texts[0] == texts[1]
    assert answers[0].headers.get(HEADER, "") == named


def test_new_items_are_read_strictly(client):
    for last in ({**NEXT, "opts": 1}, {"type": "what"}, {**NEXT, "content": [PICTURE]}):
        answer = post(client, "/v1/responses", {"input": [USER, ITEM_CALL, ITEM_OUTPUT, last]})
        assert (answer.status_code, answer.json()["error"]["param"][:8]) == (400, "input[3]")


def test_a_history_of_ollama(client):
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}, "opts": 1}
    given = [
        {**USER, "images": ["AA=="]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Rain", "images": ["AA=="]},
    ]
    fine = {"function": {"name": "f", "arguments": {"x": 1}}}
    mended = [USER, {"role": "assistant", "content": "", "tool_calls": [fine]},
              {"role": "tool", "content": "Rain"}]  # fmt: skip
    options = {"num_predict": 8, "temperature": 0}
    answers = [post(client, "/api/chat", {"messages": m, "stream": False, "options": options})
               for m in (given, mended)]  # fmt: skip
    assert answers[0].json()["message"] == answers[1].json()["message"]
    named = "messages[0].images, messages[1].tool_calls[0].opts, messages[2].images"
    assert answers[0].headers[HEADER] == named
    new = post(client, "/api/chat", {"messages": [{**USER, "images": ["AA=="]}], "stream": False})
    assert new.status_code == 400


def test_mending_is_one_walk():
    """Of 40,000 broken parts in one message: none is looked at more often than twice."""
    parts = [{"type": "text", "text": "a", "x": 1}, PNG] * 20_000
    began = time.monotonic()
    found = messages([{"role": "user", "content": parts[:4096]}, PLAIN[1], NEXT], "messages")
    assert time.monotonic() - began < 5
    assert found[0]["content"] == "\n".join("a" * 2048) and len(found.left_out) == 4096


def test_arguments_that_are_fine_stay_as_they_are():
    left = []
    for text in ('{"x":  1}', "", " ", "[1]", "null"):
        assert mender(argument_text)(text, "a", left) == text
    assert json.loads(mender(argument_text)({"x": 1}, "a", left)) == {"x": 1} and left == []


BEFORE = {"role": "user", "content": "Hi"}
CALLED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


@pytest.mark.parametrize("said", ["", " \n", [], [{"type": "text", "text": ""}], [CALLED]])
def test_a_last_message_without_text_is_not_continued(client, said):
    """It was refused for a field that the request did not have; Anthropic takes an empty one."""
    body = {"messages": [BEFORE, {"role": "assistant", "content": said}], "max_tokens": 2}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    if isinstance(said, str):
        asked = client.post("/api/chat", json={**body, "stream": False, "max_tokens": None})
        assert asked.status_code == 200, asked.text
    counts = [
        client.post("/v1/messages/count_tokens", json={"messages": messages}).json()["input_tokens"]
        for messages in (body["messages"], [BEFORE])
    ]
    assert counts[0] == counts[1] or (counts[0] > counts[1] and said == [CALLED])
