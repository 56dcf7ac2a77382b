"""An answer that fails after it began says so in the words of whom it is for; a client that leaves
is noticed in every dialect.
"""

import json

import pytest

from forerun.engine.request import Finish
from forerun.serve.dialects.ollama.answers import Calls
from forerun.serve.dialects.responses.free_tools import free_input, shell_action
from forerun.text.tool_bodies import CallPiece
from tests.dialects.requests import MESSAGES, PLACE, SAMPLED, chat, with_two
from tests.lazy import LazyModule
from tests.worlds.servers import read_until, request_bytes, serving

anthropic = LazyModule("anthropic")
ollama = LazyModule("ollama")
openai = LazyModule("openai")


LONG, PLAIN = 4000, {"speculative_algorithm": "NONE"}
LATE = "The answer took longer than 1 s."


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """Gives an answer a second; the toy takes 20 ms for every step."""
    settings = {"request_seconds": 1.0}
    path = tmp_path_factory.mktemp("hasty")
    with serving(path, delay=0.02, settings=settings, config=PLAIN) as server:
        yield server
        assert server.idle()
        assert "Traceback" not in server.logged()


def test_chunks_of_openai(hasty):
    client = openai.OpenAI(base_url=hasty.url, api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=LONG,
                                            stream=True)  # fmt: skip
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.message == LATE


def test_events_of_responses(hasty):
    client = openai.OpenAI(base_url=hasty.url, api_key="none", max_retries=0)
    *events, last = client.responses.create(model="toy", input="Hi", max_output_tokens=LONG,
                                            stream=True, temperature=0)  # fmt: skip
    assert events[0].type == "response.created"
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.message, last.response.error.code) == (LATE, "timeout")


def test_events_of_anthropic(hasty):
    client = anthropic.Anthropic(base_url=hasty.root, api_key="none", max_retries=0)
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(client.messages.create(model="toy", messages=MESSAGES, max_tokens=LONG, stream=True))
    assert caught.value.body["error"] == {"type": "timeout_error", "message": LATE}


def test_lines_of_ollama(hasty):
    client = ollama.Client(hasty.root, trust_env=False)
    stream = client.chat("toy", MESSAGES, options={"num_predict": LONG}, stream=True)
    with pytest.raises(ollama.ResponseError) as caught:
        list(stream)
    assert caught.value.error == LATE


def test_events_of_sglang(hasty):
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": LONG}, "stream": True}
    answer = hasty.post("/generate", body)
    *events, end = [line[6:] for line in answer.text.splitlines() if line]
    assert end == "[DONE]" and json.loads(events[0])["text"]
    assert json.loads(events[-1])["error"]["message"] == LATE


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": LONG}, "timeout_error"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": LONG}, "server_error"),
        (
            "/api/chat",
            {"messages": MESSAGES, "options": {"num_predict": LONG}, "stream": False},
            None,
        ),
    ],
)
def test_whole_answers(hasty, path, body, kind):
    answer = hasty.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 504
    assert (error if kind is None else error["message"]) == LATE
    assert kind is None or error["type"] == kind


LEAVING = {
    "/v1/messages": (
        b"message_start",
        {"model": "toy", "messages": MESSAGES, "max_tokens": LONG, "stream": True, **SAMPLED},
    ),
    "/v1/responses": (
        b"response.output_text.delta",
        {"input": "Hi", "max_output_tokens": LONG, "stream": True, **SAMPLED},
    ),
    "/api/chat": (
        b'"done":false',
        {"messages": MESSAGES, "options": {**SAMPLED, "num_predict": LONG}},
    ),
    "/generate": (
        b'"text"',
        {"text": "Hi", "stream": True, "sampling_params": {"max_new_tokens": LONG}},
    ),
}
"""What a stream has begun with by then, and a body, by route."""


@with_two()
@pytest.mark.parametrize("path", LEAVING)
def test_a_client_that_leaves_is_noticed(server, path):
    begun, body = LEAVING[path]
    with server.connect() as sock:
        sock.sendall(request_bytes(path, body))
        assert begun in read_until(sock, begun)
    assert server.idle()


# --- a stop string that comes inside a call of a tool --------------------------------------------


TOOL = {"type": "function", "function": {"name": "travel", "parameters": PLACE}}
FORCED = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 300, **SAMPLED}
INSIDE, WHOLE = '"city', "}"  # The arguments end with the first brace that closes.


def events(answer):
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@with_two()
@pytest.mark.parametrize("kept", [False, True])
def test_in_openais_words(server, kept):
    body = {**FORCED, "stop": [INSIDE], "include_stop_str_in_output": kept}
    whole, _ = chat(server, **body)
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", INSIDE)
    answer = server.post("/v1/chat/completions", {**body, "messages": MESSAGES, "stream": True})
    assert events(answer)[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_call_that_is_whole_counts(server):
    whole, _ = chat(server, **FORCED, stop=[WHOLE], include_stop_str_in_output=True)
    assert (whole["finish_reason"], whole["stop_reason"]) == ("tool_calls", WHOLE)
    json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"])


@with_two()
def test_in_anthropics_words(server):
    tool = {"name": "travel", "input_schema": PLACE}
    body = {"messages": MESSAGES, "max_tokens": 300, "tools": [tool]}
    body |= {**SAMPLED, "stop_sequences": [INSIDE], "tool_choice": {"type": "any"}}
    whole = server.post("/v1/messages", body).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", INSIDE)
    assert whole["content"] == []
    ended = events(server.post("/v1/messages", {**body, "stream": True}))[-2]
    assert ended["delta"]["stop_reason"] == "stop_sequence"


@pytest.mark.parametrize("stream", [False, True])
def test_in_ollamas_words(calling, stream):
    for stop, count in ((INSIDE, 0), ("no such text", 1)):
        options = {"num_predict": 300, "stop": [stop]}
        body = {"messages": MESSAGES, "tools": [TOOL], "options": options}
        lines = calling.post("/api/chat", {**body, "stream": stream}).text.splitlines()
        answers = [json.loads(line) for line in lines]
        calls = [call for one in answers for call in one["message"].get("tool_calls", ())]
        assert (len(calls), answers[-1]["done_reason"]) == (count, "stop")


def test_arguments_nested_too_deeply_are_as_if_cut():
    """Python's reader gives up; a model that repeats itself writes such."""
    deep = "[" * 5000
    (call,) = Calls().push([CallPiece(0, "f", deep)], Finish.STOP, cut=False)
    assert call["function"]["arguments"] == {}
    assert free_input(deep) == "" and shell_action(deep)["command"] == []
    assert shell_action("5")["command"] == []
