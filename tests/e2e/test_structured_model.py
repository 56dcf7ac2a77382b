"""Structured output and tool calls with the default model."""

import json
import re

import pytest
from starlette.testclient import TestClient

from forerun.build.engine import load
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app

pytestmark = pytest.mark.model

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server():
    loaded = load(EngineConfig(kv_tokens=4096, max_sequences=8, policy="fixed"))
    with TestClient(create_app(loaded, ServeSettings())) as client:
        yield client


def chat(server, question, **body):
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 160, **body}
    answer = server.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_tool_is_called(server, choice):
    body = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    answer = chat(server, "What is the weather like in Lisbon?", temperature=0, **body)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]).keys() == {"city"}


def test_a_constraint_begins_where_the_text_of_a_marker_ends(server):
    """A full stop is said by many tokens here, and some of them say more: `."`, `...`."""
    service = server.app.state.service
    settings, service.settings = service.settings, ServeSettings(reasoning_end=".")
    bound = {"regex": '"? ?[A-Z][a-z]{2,9}', "temperature": 0.9, "n": 4, "seed": 3}
    try:
        question = "Name a city, and say why."
        on = chat(server, question, **bound)["choices"]
        assert on == chat(server, question, speculative={"enabled": False}, **bound)["choices"]
    finally:
        service.settings = settings
    ended = [choice["message"] for choice in on if choice["finish_reason"] == "stop"]
    assert len(ended) > 1
    for message in ended:
        assert "." not in message["reasoning_content"]
        assert re.fullmatch('"? ?[A-Z][a-z]{2,9}', message["content"])
