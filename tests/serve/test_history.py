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


def assistant(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | fields


def called(arguments, **fields):
    return {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    } | fields


RESULT = {"role": "tool", "tool_call_id": "a", "content": "Oslo"}
PLAIN = [USER, {"role": "assistant", "content": "Oslo"}, NEXT]
CALLED = [USER, assistant(called('{"x": 1}')), RESULT, NEXT]
NOTHING = [USER, assistant(called("{}")), RESULT, NEXT]
ARGUMENTS = "messages[1].tool_calls[0].function.arguments"

CHATS = [
    ([USER, assistant(called('{"x": 1}{"x": 1}')), RESULT, NEXT], CALLED, ARGUMENTS),
    ([USER, assistant(called('{"x": 1} and so on')), RESULT, NEXT], CALLED, ARGUMENTS),
    ([USER, assistant(called('{"x": "cut he')), RESULT, NEXT], NOTHING, ARGUMENTS),
    ([USER, assistant(called("[" * 70 + "]" * 70)), RESULT, NEXT], NOTHING, ARGUMENTS),
    ([USER, assistant(called('{"x": "\\ud800"}')), RESULT, NEXT], NOTHING, ARGUMENTS),
    ([USER, assistant(called({"x": 1})), RESULT, NEXT], CALLED, ""),
    ([USER, assistant(called('{"x": 1}'), content=[]), RESULT, NEXT], CALLED, ""),
    ([USER, assistant(called('{"x": 1}', opts=3)), RESULT, NEXT], CALLED,
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
    ([USER, assistant(), NEXT], [USER, {"role": "assistant", "content": ""}, NEXT], ""),
    ([*CALLED[:2], {**RESULT, "content": [{"type": "text", "text": "Oslo"}, PNG]}], CALLED[:3],
     "messages[2].content[1]"),
    ([*CALLED[:2], {**RESULT, "id": 5}], CALLED[:3], "messages[2].id"),
    ([*CALLED[:2], {**RESULT, "content": [{"type": "text", "text": "Oslo"}, 1, None, "x"]}],
     CALLED[:3], "messages[2].content[1], messages[2].content[2], messages[2].content[3]"),
]  # fmt: skip


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
OLLAMAS = [
    (
        [
            {**USER, "images": ["AA=="]},
            assistant({"function": {"name": "f", "arguments": '{"x": 1}'}, "opts": 1}),
            {"role": "tool", "content": "Rain", "images": ["AA=="]},
        ],
        [
            USER,
            assistant({"function": {"name": "f", "arguments": {"x": 1}}}, content=""),
            {"role": "tool", "content": "Rain"},
        ],
        "messages[0].images, messages[1].tool_calls[0].opts, messages[2].images",
    )
]
FEW = {"max_tokens": 8, "temperature": 0}
BODIES = {
    "/v1/chat/completions": FEW | {"tools": []},
    "/v1/messages": FEW,
    "/v1/responses": {"max_output_tokens": 8, "temperature": 0},
    "/api/chat": {"stream": False, "options": {"num_predict": 8, "temperature": 0}},
}
ANSWERS = {
    "/v1/chat/completions": lambda answer: (answer["choices"], answer["usage"]["prompt_tokens"]),
    "/v1/messages": lambda answer: answer["content"],
    "/v1/responses": lambda answer: answer["output"][0]["content"],
    "/api/chat": lambda answer: answer["message"],
}
COUNTED = {
    "/v1/chat/completions": (
        *("/apply-template", "/tokenize", "/v1/chat/completions/input_tokens"),
    ),
    "/v1/messages": ("/v1/messages/count_tokens",),
}
"""Other routes that read the same messages."""
SPELLED = {"/v1/responses": "input"}
HISTORIES = [
    (path, *case)
    for path, cases in zip(BODIES, (CHATS, BLOCKS, ITEMS, OLLAMAS), strict=True)
    for case in cases
]


@pytest.mark.parametrize(("path", "given", "mended", "named"), HISTORIES)
def test_a_history_is_read_as_far_as_it_can_be(client, path, given, mended, named):
    field = SPELLED.get(path, "messages")
    answers = [client.post(path, json=BODIES[path] | {field: m}) for m in (given, mended)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    first, second = (ANSWERS[path](answer.json()) for answer in answers)
    assert first == second
    assert answers[0].headers.get(HEADER, "") == named
    assert HEADER not in answers[1].headers
    for other in COUNTED.get(path, ()):
        replies = [client.post(other, json={"messages": m}).json() for m in (given, mended)]
        assert replies[0] == replies[1]


ITEMS_SO_FAR = [USER, ITEM_CALL, ITEM_OUTPUT]
STRICT = [
    ("/v1/chat/completions", [*PLAIN[:2], {**NEXT, "id": 1}], "messages[2].id"),
    ("/v1/chat/completions", [*PLAIN[:2], {**NEXT, "content": None}], "messages[2].content"),
    ("/v1/chat/completions", [*PLAIN[:2], {**NEXT, "content": [PNG]}],
     "messages[2].content[0].type"),
    ("/v1/chat/completions", [USER, {**NEXT, "tool_calls": [called("{")]}],
     "messages[1].tool_calls[0].function.arguments"),
    ("/v1/chat/completions", [{"role": "asistant", "content": "Oslo"}, *PLAIN[1:]],
     "messages[0].role"),
    ("/v1/chat/completions", [5, *PLAIN[1:]], "messages[0]"),
    ("/v1/messages", [USER, turn(USE), turn(IMAGE, role="user")], "messages[2].content[0].type"),
    ("/v1/messages", [USER, turn(USE), turn(TEXT, role="user", id=1)], "messages[2].id"),
    ("/v1/messages", [USER, turn(USE), turn({**TEXT, "opts": 1}, BROUGHT, role="user")],
     "messages[2].content[0].opts"),
    ("/v1/responses", [*ITEMS_SO_FAR, {**NEXT, "opts": 1}], "input[3].opts"),
    ("/v1/responses", [*ITEMS_SO_FAR, {"type": "what"}], "input[3].type"),
    ("/v1/responses", [*ITEMS_SO_FAR, {**NEXT, "content": [PICTURE]}],
     "input[3].content[0].type"),
    ("/api/chat", [{**USER, "images": ["AA=="]}], "messages[0].images"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "given", "named"), STRICT)
def test_what_is_said_anew_is_read_strictly(client, path, given, named):
    answer = client.post(path, json=BODIES[path] | {SPELLED.get(path, "messages"): given})
    assert answer.status_code == 400 and named in answer.text


def test_a_marked_thought(client):
    thought = {"type": "thinking", "thinking": "Hm", "cache_control": {"type": "ephemeral"}}
    body = {"max_tokens": 2, "messages": [USER, turn(thought, TEXT), NEXT]}
    answer = client.post("/v1/messages", json=body)
    assert answer.headers[HEADER] == "messages.cache_control"


def test_mending_is_one_walk():
    """Of 40,000 broken parts in one message: none is looked at more often than twice."""
    parts = [{"type": "text", "text": "a", "x": 1}, PNG] * 20_000
    began = time.monotonic()
    mended = messages([{"role": "user", "content": parts[:4096]}, PLAIN[1], NEXT], "messages")
    assert time.monotonic() - began < 5
    assert mended[0]["content"] == "\n".join("a" * 2048) and len(mended.left_out) == 4096


def test_arguments_that_are_fine_stay_as_they_are():
    left = []
    for text in ('{"x":  1}', "", " ", "[1]", "null"):
        assert mender(argument_text)(text, "a", left) == text
    assert json.loads(mender(argument_text)({"x": 1}, "a", left)) == {"x": 1} and left == []


BEFORE = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "text", "text": ""}], [USE]])
def test_a_last_message_without_text_is_not_continued(client, content):
    """It was refused for a field that the request did not have; Anthropic takes an empty one."""
    body = {"messages": [BEFORE, {"role": "assistant", "content": content}], "max_tokens": 2}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    if isinstance(content, str):
        chat = client.post("/api/chat", json={**body, "stream": False, "max_tokens": None})
        assert chat.status_code == 200, chat.text
    counts = [
        client.post("/v1/messages/count_tokens", json={"messages": messages}).json()["input_tokens"]
        for messages in (body["messages"], [BEFORE])
    ]
    assert counts[0] == counts[1] or (counts[0] > counts[1] and content == [USE])
