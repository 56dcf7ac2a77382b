"""What users of other servers reported, sent to this one: docs/inside/reported.md names each issue
and its test here.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from starlette.testclient import TestClient

from forerun.build.engine import load
from forerun.executors import cpu
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app
from forerun.serve.bodies.fields import read
from forerun.serve.dialects.anthropic.schema import CountBody
from forerun.text.chat import ChatTemplate
from tests.cli.toys import toy_loaded
from tests.covering import spread
from tests.drafters.prediction import random_layer, with_layers
from tests.models import tiny

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
OFF = {"speculative": {"enabled": False}}
WORDS = "the quick brown fox jumps over the lazy dog and then there is another one".split()  # noqa: SIM905
PROMPTS = [" ".join((WORDS * 12)[n : n + 20 + 4 * n]) for n in range(8)]

LUCK = np.random.default_rng(5)


@contextmanager
def serving(config, settings=None):
    loaded = load(config)
    with TestClient(create_app(loaded, settings or ServeSettings())) as client:
        yield client  # The application closes what it was given.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with a prediction layer in its files."""
    hf = tiny.model("llama", num_hidden_layers=3)
    root = tmp_path_factory.mktemp("layered") / "layered"
    with_layers(hf, [random_layer(hf, 5)], root, "mimo")
    return root


def drafting(folder, method):
    """How to start it: drafting all the time, in prompts cut into chunks of 32 tokens."""
    itself = {"speculative_draft_model_path": str(folder)} if method == "STANDALONE" else {}
    return EngineConfig(
        model=str(folder),
        speculative_algorithm=method,
        executor="cpu",
        policy="fixed",
        draft_on_error="stop",
        max_sequences=8,
        chunked_prefill_size=32,
        kv_tokens=8192,
        page_size=16,
        context=256,
        threads=1,
        **itself,
    )


@pytest.fixture(scope="module", params=spread(["NEXTN", "STANDALONE"], 1))
def predicting(request, folder):
    """A server that drafts with its prediction layer, and one whose drafts are always right."""
    if cpu.available() is not None:
        pytest.skip(str(cpu.available()))
    with serving(drafting(folder, request.param)) as client:
        yield client
        stats = client.get("/server_info").json()["stats"]
        assert stats["draft_tokens"] > 200, "nothing was drafted"
        assert request.param == "NEXTN" or stats["accepted"] > 200, "nothing was accepted"


@pytest.fixture(scope="module")
def plain(folder):
    """The same without speculation."""
    with serving(drafting(folder, "OFF")) as client:
        yield client


def ask(client, path=PLAIN, **body):
    base = {"prompt": PROMPTS[0]} if path == PLAIN else {"messages": [message("user", "Which?")]}
    answer = client.post(path, json={**base, "max_tokens": 24, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def message(role, content):
    return {"role": role, "content": content}


def test_log_probabilities_of_prompts_do_not_depend_on_speculation(predicting):
    """vLLM #53488: wrong for some requests, with prediction layers and prompts in chunks."""

    def scored(prompt, **options):
        answer = ask(predicting, prompt=prompt, echo=True, logprobs=1, max_tokens=1, **options)
        return answer["choices"][0]["logprobs"]["token_logprobs"]

    alone = [scored(prompt, **OFF) for prompt in PROMPTS]
    assert [scored(prompt) for prompt in PROMPTS] == alone
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(scored, PROMPTS)) == alone


@pytest.mark.parametrize("common", [39, 47, 48, 49, 64])
def test_prediction_layers_lose_at_most_a_token_of_the_prefix_cache(predicting, plain, common):
    """vLLM #53670: a block of 1,648 tokens is read again in every turn, or all of them are.

    Here one token is where two texts part: what a prediction layer keeps for a position depends on
    the token behind it.
    """
    ids = LUCK.integers(8, 250, 180).tolist()  # New ones: `plain` serves both.

    def cached(client, prompt):
        usage = ask(client, prompt=prompt, max_tokens=4)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    parted = [*ids[:common], 1 + ids[common], *ids[100:140]]
    for client in (plain, predicting):
        cached(client, ids[:80])
    wanted, actual = cached(plain, parted), cached(predicting, parted)
    assert wanted == common and common - actual in (0, 1)
    assert cached(plain, parted) == cached(predicting, parted), "sent again"


def test_many_at_once_repeat_nothing_under_prediction_layers(predicting):
    """mlx-vlm #2033: one token for ever, where prediction layers meet several requests at once."""

    def answered(prompt, **options):
        choice = ask(predicting, prompt=prompt, max_tokens=40, seed=3, **options)["choices"][0]
        return choice["text"], choice["finish_reason"]

    for heat in (0.0, 0.8):
        alone = [answered(prompt, temperature=heat, **OFF) for prompt in PROMPTS]
        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(answered, prompt, temperature=heat) for prompt in PROMPTS]
            assert [one.result() for one in futures] == alone


ODD = [
    {"type": "object"},
    {},
    {"type": "object", "properties": {"a": {"type": "object"}}},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20000}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^\d{3}[^\s]+$"}}},
    {"type": "object", "properties": {"a": {"not": {"type": "null"}, "x-odd": 3}}},
    {"properties": {"foo": "bar"}},
    {"properties": {"a": {"pattern": "(["}}},
    {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}},
    {"properties": {"a": {"$ref": "#/nowhere"}}},
]


@pytest.mark.parametrize("odd", ODD, ids=json.dumps)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_one_odd_schema_keeps_no_other_tool_from_being_called(client, odd, choice):
    """llama.cpp #25923: a tool without properties or with a long text refuses all of them."""
    even = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in [("odd", odd), ("even", even)]
    ]
    ask(client, CHAT, tools=tools, tool_choice=choice, max_tokens=30)
    named = {"type": "function", "function": {"name": "even"}}
    reply = ask(client, CHAT, tools=tools, tool_choice=named, max_tokens=200)["choices"][0]
    (call,) = reply["message"]["tool_calls"]
    assert call["function"]["name"] == "even"


def test_a_prompt_is_read_once_not_every_turn(predicting):
    """llama.cpp #21831: the whole conversation is read again in every turn."""
    messages, last = [message("system", " ".join(WORDS[:9]))], 0
    for turn in range(4):
        messages.append(message("user", f"{WORDS[turn]} {WORDS[2]}"))
        answer = ask(predicting, CHAT, messages=messages, max_tokens=12, ignore_eos=True)
        usage = answer["usage"]
        reread = last - usage["prompt_tokens_details"]["cached_tokens"]
        assert reread <= 32, (turn, usage)
        last = usage["prompt_tokens"]
        messages.append(message("assistant", answer["choices"][0]["message"]["content"]))


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("path", "more"),
    [(CHAT, {"max_tokens": 4}), ("/v1/messages", {"max_tokens": 4}), ("/api/chat", {})],
)
def test_system_messages_between_others_are_taken(path, more):
    """Ollama #16372: a system message that is not the first is lost, moved, or an error."""
    with toy_loaded() as loaded:
        loaded.chat.close()
        object.__setattr__(loaded, "chat", ChatTemplate(STRICT, loaded.tokenizer))
        with TestClient(create_app(loaded, ServeSettings())) as client:
            between = [message("user", "A"), message("assistant", "B"), message("system", "LATE")]
            messages = [message("user", "C")]
            if path != "/v1/messages":
                between = [message("system", "FIRST"), *between]
            body = {"messages": [*between, *messages], "stream": False, "model": "toy", **more}
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            tokens = client.post("/tokenize", json={"messages": body["messages"]}).json()["tokens"]
    text = bytes(tokens).decode()
    assert text.index("A") < text.index("B") < text.index("LATE") < text.index("C")


def test_names_and_numbers_of_tools_as_agents_have_them(client):
    """Names that a protocol of tools makes are longer than 64 letters, and tools more than 128."""
    schema = {"type": "object", "properties": {"a": {"type": "any"}}}
    name = f"mcp__{'server' * 20}__tool"
    tools = [{"name": f"{name}_{index}", "input_schema": schema} for index in range(200)]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    assert len(read(CountBody, body).tools) == 200
    plain = [{"type": "function", "function": {"name": name, "parameters": schema}}]
    body = {"max_tokens": 2.0, "messages": [{"role": "user", "content": "Hi"}], "tools": plain}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
