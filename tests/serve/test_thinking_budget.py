"""Thinking budgets in every dialect's words: kept, refused, or said to be left out."""

import json
from contextlib import contextmanager

import pytest

from forerun.constrain.grammar import ThinkingBudget
from forerun.options.config import ServeSettings
from forerun.serve.bodies.dialogue import budget_name, dialogue
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.schema import ChatBody
from forerun.serve.bodies.thinking import BudgetWatch
from forerun.text.reasoning import Marks, ReasoningReader, Stage
from tests.worlds.toy_app import toy_client

SETTINGS = ServeSettings(reasoning_end="</think>")
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "temperature": 0}
MESSAGES = BODY | {"model": "toy"}


@contextmanager
def client_of(**changes):
    settings = ServeSettings(**{"reasoning_end": "</think>"} | changes)
    with toy_client(settings) as client:
        yield client


@pytest.fixture(scope="module")
def client():
    with client_of() as client:
        yield client


def thought_of(client, **body):
    answer = client.post("/v1/chat/completions", json=BODY | body)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    return message.get("reasoning_content"), message["content"], answer.json()["usage"]


CLOSED = {"additionalProperties": False}
NAMES = (
    *("thinking_token_budget", "thinking_budget", "thinking_budget_tokens"),
    "reasoning_budget_tokens",
)


@pytest.mark.parametrize("tokens", [0, 1, 7, 20])
@pytest.mark.parametrize("on", [True, False])
def test_a_thought_ends_behind_so_many_tokens(client, tokens, on):
    for name in NAMES:
        thought, content, usage = thought_of(
            client, **{name: tokens, "speculative": {"enabled": on}}, ignore_eos=True
        )
        assert len(thought or "") <= tokens and content
        assert usage["completion_tokens"] == 40
    said = {"reasoning": {"max_tokens": tokens}, "speculative": {"enabled": on}}
    assert thought_of(client, **said, ignore_eos=True)[:2] == (thought, content)


def test_a_message_stands_before_the_end(client):
    thought, content, _ = thought_of(
        client, thinking_token_budget=5, thinking_budget_message=" Enough."
    )
    assert thought.endswith(" Enough.") and content


def test_a_server_has_a_budget_that_requests_replace():
    with client_of(thinking_budget=3, thinking_budget_message="!") as client:
        assert len(thought_of(client)[0]) <= 4
        assert thought_of(client, thinking_token_budget=9)[0][:3] == thought_of(client)[0][:3]
        assert len(thought_of(client, thinking_token_budget=9)[0]) > 4
        assert thought_of(client, thinking_token_budget=-1)[0] is None, "the model decides"
        short = client.post("/v1/chat/completions", json=BODY | {"max_tokens": 2})
        assert short.headers["x-forerun-ignored"] == "thinking_budget (cut to 1)"


def test_a_budget_beyond_the_context_leaves_room_for_the_answer(loaded):
    """Without max_tokens an answer may fill the context."""
    body = {"messages": BODY["messages"], "thinking_token_budget": 5000}
    generation = dialogue(read(ChatBody, body), loaded, SETTINGS)
    room = loaded.context - (len(generation.prompt) - len("<think>"))
    assert generation.rules.grammar.budget.tokens == room // 2
    assert generation.ignored == (f"thinking_token_budget (cut to {room // 2})",)


def test_a_template_hears_of_the_budget(client):
    """Qwen's clients put it among the template's names; Seed-OSS's template reads it."""
    names = {"chat_template_kwargs": {"thinking_budget": 7}}
    assert thought_of(client, **names) == thought_of(client, thinking_budget=7)
    for body in (names, {"thinking_budget": 7}):
        parsed = read(ChatBody, BODY | body)
        assert budget_name(parsed, "{% if thinking_budget %}") == {"thinking_budget": 7}
        assert budget_name(parsed, "plain") == {}


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"thinking_token_budget": 40}, "thinking_token_budget"),
        ({"thinking_token_budget": 33}, "8 tokens that end the thought"),
        ({"thinking_token_budget": 4, "thinking_budget_message": "x</think>"}, "ends the thought"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"thinking_token_budget": 1e300}, "thinking_token_budget"),
        ({"reasoning": "much"}, "reasoning"),
        ({"reasoning": {"max_tokens": "9"}}, "reasoning.max_tokens"),
        ({"thinking_token_budget": 3, "thinking_budget": 4}, "thinking_token_budget"),
        ({"thinking_budget": 3, "reasoning": {"max_tokens": 4}}, "thinking_token_budget"),
        (
            {"thinking_budget": 3, "chat_template_kwargs": {"thinking_budget": 4}},
            "chat_template_kwargs.thinking_budget disagree",
        ),
        ({"chat_template_kwargs": {"thinking_budget": "x"}}, "kwargs.thinking_budget"),
        ({"thinking_token_budget": 3, "bad_words": ["x"]}, "thinking_token_budget"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(client, body, names):
    answer = client.post("/v1/chat/completions", json=BODY | body)
    assert answer.status_code == 400 and names in answer.json()["error"]["message"]


def test_a_model_without_marks_refuses_and_anthropics_target_is_left_out():
    with client_of(reasoning_end="off") as client:
        answer = client.post("/v1/chat/completions", json=BODY | {"thinking_budget": 3})
        assert answer.status_code == 400 and "marks" in answer.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json=BODY | {"thinking_budget": -1}).is_success
        thinking = {"type": "enabled", "budget_tokens": 20}
        answer = client.post("/v1/messages", json=MESSAGES | {"thinking": thinking})
        assert answer.status_code == 200
        assert "thinking.budget_tokens" in answer.headers["x-forerun-ignored"]


def test_a_servers_budget_that_changes_nothing_is_said_at_the_start(caplog):
    with client_of(thinking_budget=3):
        assert "--thinking-budget" not in caplog.text
    with client_of(thinking_budget=3, reasoning_end="off"):
        assert "--thinking-budget changes nothing: no marks" in caplog.text


def test_other_dialects_keep_it(client):
    thinking = {"type": "enabled", "budget_tokens": 6}
    content = client.post("/v1/messages", json=MESSAGES | {"thinking": thinking}).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text"]
    assert len(content[0]["thinking"]) <= 6
    body = {
        "input": "Hi",
        "max_output_tokens": 40,
        "temperature": 0,
        "reasoning": {"max_tokens": 6},
    }
    kinds = [item["type"] for item in client.post("/v1/responses", json=body).json()["output"]]
    assert kinds == ["reasoning", "message"]


def test_structure_begins_behind_a_forced_end(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
    } | CLOSED
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for tokens in (0, 5):
        _, content, _ = thought_of(
            client, thinking_budget=tokens, response_format=form, max_tokens=400
        )
        assert isinstance(json.loads(content)["a"], bool)


def test_streamed_and_whole_are_the_same(client):
    whole = thought_of(client, thinking_budget=7)[:2]
    body = BODY | {"thinking_budget": 7, "stream": True}
    lines = client.post("/v1/chat/completions", json=body).text.split("\n\n")
    deltas = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
    said = [choice["delta"] for choices in deltas for choice in choices]
    joined = [
        "".join(one.get(name) or "" for one in said) for name in ("reasoning_content", "content")
    ]
    assert tuple(joined) == whole
    ends = [choice for choices in deltas for choice in choices if choice["finish_reason"]]
    plain = client.post("/v1/chat/completions", json=body | {"stream": False}).json()
    assert [one["thinking"] for one in (*ends, *plain["choices"])] == ["budget"] * 2
    free = client.post("/v1/chat/completions", json=BODY).json()
    assert "thinking" not in free["choices"][0]


@pytest.mark.parametrize(
    ("tokens", "cut"),
    [
        ([7, 7, 7, 1, 2, 8], True),
        ([7, 7, 7, 9, 9, 1, 2], True),  # A letter of three tokens is finished first.
        ([7, 7, 1, 2, 8], False),  # By itself.
        ([7, 7, 7, 1], False),  # Too short for both.
        ([7] * 8 + [1, 2], False),  # Never due there.
    ],
)
def test_only_a_budget_that_ended_the_thought_is_named(tokens, cut):
    watch = BudgetWatch(ThinkingBudget(5, 2, (1, 2)))
    for token in tokens:
        watch.push((token,))
    assert watch.cut == cut


def test_a_thought_that_the_prompt_began_counts(loaded):
    message = {"role": "assistant", "content": "<think>I see a"}
    body = BODY | {"messages": [*BODY["messages"], message], "continue_final_message": True}
    generation = dialogue(read(ChatBody, body | {"thinking_budget": 20}), loaded, SETTINGS)
    assert generation.rules.grammar.budget.used == len("I see a")


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_repeated_end_is_absorbed(size):
    text = "Hm.</think>\n</think>\n\n</think> Four </think>"
    reader = ReasoningReader(Marks.of("</think>"), Stage.THINKING)
    pieces = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(reader.finish())
    assert "".join(thought for thought, _ in pieces) == "Hm."
    assert "".join(answer for _, answer in pieces) == "Four </think>"


def test_what_may_be_the_end_again_is_not_lost():
    reader = ReasoningReader(Marks.of("</think>"), Stage.THINKING)
    assert reader.push("Hm.</think></thi") == ("Hm.", "")
    assert reader.finish() == ("", "</thi")
