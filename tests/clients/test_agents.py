"""Libraries that applications are made of, each with the toy: its answer is known to all."""

import asyncio
import os
import subprocess
import sys
from typing import Literal

import pytest

from tests.dialects.requests import GREEDY, MESSAGES, SAMPLED, text_of

pytestmark = pytest.mark.slow
pydantic = pytest.importorskip("pydantic")
QUESTION = MESSAGES[0]["content"]


class Place(pydantic.BaseModel):
    """Where to, for how long."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def expected(server):
    return text_of(server, **GREEDY)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_openai(server, expected, responses):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=server.url, api_key="none", model="toy", max_tokens=40,
                                 temperature=0, use_responses_api=responses)  # fmt: skip
    answer = model.invoke(QUESTION)
    assert answer.text == expected and answer.usage_metadata["output_tokens"] == 40
    assert "".join(piece.text for piece in model.stream(QUESTION)) == expected
    sampled = langchain.ChatOpenAI(base_url=server.url, api_key="none", model="toy", seed=11,
                                   temperature=1.0, max_tokens=400)  # fmt: skip
    assert isinstance(sampled.with_structured_output(Place).invoke(QUESTION), Place)


@pytest.mark.parametrize("provider", ["openai", "anthropic", "ollama_chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_litellm(server, expected, provider, stream):
    litellm = pytest.importorskip("litellm")
    base = server.url if provider == "openai" else server.root
    answer = litellm.completion(model=f"{provider}/toy", api_base=base, api_key="none",
                                messages=MESSAGES, max_tokens=40, temperature=0,
                                stream=stream)  # fmt: skip
    if stream:
        assert "".join(piece.choices[0].delta.content or "" for piece in answer) == expected
    else:
        assert answer.choices[0].message.content == expected
        assert answer.usage.completion_tokens == 40


def test_litellm_responses(server, expected):
    litellm = pytest.importorskip("litellm")
    answer = litellm.responses(model="openai/toy", api_base=server.url, api_key="none",
                               input=QUESTION, max_output_tokens=40, temperature=0)  # fmt: skip
    assert answer.output[0].content[0].text == expected


def test_litellm_bridges_anthropic_to_openai(server, expected):
    """Its /v1/messages on top of our OpenAI routes."""
    litellm = pytest.importorskip("litellm")
    answer = litellm.anthropic.messages.create(
        model="openai/toy", api_base=server.url, api_key="none", messages=MESSAGES, max_tokens=40,
        temperature=0)  # fmt: skip
    assert answer["content"][0]["text"] == expected
    assert answer["usage"]["output_tokens"] == 40


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(server, mode):
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    base = openai.OpenAI(base_url=server.url, api_key="none")
    client = instructor.from_openai(base, mode=getattr(instructor.Mode, mode))
    limit = "max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens"
    place = client.create(model="toy", messages=MESSAGES, response_model=Place, temperature=1.0,
                          extra_body={"seed": 11}, **{limit: 400})  # fmt: skip
    assert isinstance(place, Place)


def test_instructor_with_anthropic(server):
    instructor = pytest.importorskip("instructor")
    anthropic = pytest.importorskip("anthropic")
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=server.root, api_key="none"))
    place = client.create(model="toy", messages=MESSAGES, response_model=Place, max_tokens=400,
                          extra_body=SAMPLED)  # fmt: skip
    assert isinstance(place, Place)


@pytest.mark.parametrize("prefix", ["openai", "openai-chat", "openai-responses"])
def test_pydantic_ai(server, expected, prefix, monkeypatch):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    plain = pydantic_ai.Agent(f"{prefix}:toy")
    answer = plain.run_sync(QUESTION, model_settings={"max_tokens": 40, "temperature": 0})
    assert answer.output == expected
    sampled = {"max_tokens": 400, "temperature": 1.0, "extra_body": {"seed": 11}}
    typed = pydantic_ai.Agent(f"{prefix}:toy", output_type=Place)
    assert isinstance(typed.run_sync(QUESTION, model_settings=sampled).output, Place)


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_agents(server, streamed, monkeypatch):
    """As it comes: /v1/responses. The tool is called, what it brought is heard."""
    agents = pytest.importorskip("agents")
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    agents.set_tracing_disabled(True)
    visited = []

    @agents.function_tool
    def travel(city: Literal["Paris", "Rome"], days: Literal[1, 2]) -> str:
        """Plan a journey."""
        visited.append((city, days))
        return "Sunny."

    settings = agents.ModelSettings(max_tokens=400, temperature=1.0, tool_choice="required",
                                    extra_body={"seed": 11})  # fmt: skip
    agent = agents.Agent(name="guide", instructions="Be brief.", model="toy", tools=[travel],
                         model_settings=settings)  # fmt: skip
    if streamed:

        async def run():
            result = agents.Runner.run_streamed(agent, QUESTION)
            kinds = [event.type async for event in result.stream_events()]
            return result, kinds

        result, kinds = asyncio.run(run())
        assert "raw_response_event" in kinds
    else:
        result = agents.Runner.run_sync(agent, QUESTION)
    assert visited and all(city in ("Paris", "Rome") for city, _ in visited)
    assert isinstance(result.final_output, str)


def test_simonw_llm(server, expected, tmp_path):
    pytest.importorskip("llm")
    model = f"- model_id: toy\n  model_name: toy\n  api_base: {server.url}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model)
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    line = [sys.executable, "-m", "llm", "-m", "toy", "-o", "max_tokens", "40",
            "-o", "temperature", "0", QUESTION]  # fmt: skip
    for more in ([], ["--no-stream"]):
        done = subprocess.run(
            [*line, *more], check=False, env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr
