"""`speculative: {"trace": true}` over HTTP: the format in docs/reference/trace.md, its bounds."""

import json

import pytest

ASK = {"max_tokens": 60, "speculative": {"trace": True}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
FIELDS = {
    "step", "position", "ms", "tokens", "nodes", "accepted", "left_out", "allowed", "reason",
}  # fmt: skip


def events(toy_server, path, body):
    answer = toy_server.post(path, {**body, "stream": True})
    lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


def steps_of(choices):
    return [step for choice in choices for step in choice.get("speculative_trace", ())]


def check(steps, text):
    """The steps are as documented, and tell this text."""
    said = "".join(token["text"] for step in steps for token in step["tokens"])
    assert said.removesuffix("<|im_end|>") == text
    for number, step in enumerate(steps):
        assert step.keys() == FIELDS
        assert step["step"] == number and step["ms"] >= 0
        for node in step["nodes"]:
            assert node.keys() == {"id", "text", "parent", "score", "source"}
            assert node["source"] in ("ngram", "table") and 0 <= node["score"] <= 1
        for place, node in enumerate(step["accepted"]):
            assert step["nodes"][node]["id"] == step["tokens"][place]["id"]
    assert any(step["accepted"] for step in steps)


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "Hi", "temperature": 0}),
    ("/v1/chat/completions", CHAT),
])  # fmt: skip
def test_streamed_and_whole(toy_server, path, body):
    chunks = events(toy_server, path, {**body, **ASK})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(
        choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices
    )
    check(steps_of(choices), text)
    whole = toy_server.post(path, {**body, **ASK}).json()["choices"]
    assert (whole[0].get("text") or whole[0]["message"]["content"]) == text
    check(steps_of(whole), text)
    plain = toy_server.post(path, {**body, "max_tokens": 60}).json()["choices"]
    assert "speculative_trace" not in plain[0]


def test_without_speculation_a_trace_has_one_token_a_step(toy_server):
    body = {**CHAT, "max_tokens": 20, "speculative": {"trace": True, "enabled": False}}
    steps = steps_of(toy_server.post("/v1/chat/completions", body).json()["choices"])
    assert [len(step["tokens"]) for step in steps] == [1] * 20
    assert not any(step["nodes"] or step["allowed"] for step in steps)
    assert steps[-1]["reason"] == "off: the request disables speculation"


def test_under_a_grammar_forced_tokens_are_named(toy_server):
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"const": {"key": "abc"}}},
    }
    body = {**CHAT, **ASK, "response_format": form}
    answer = toy_server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    sources = {
        node["source"] for step in steps_of(answer.json()["choices"]) for node in step["nodes"]
    }
    assert "grammar" in sources


def test_too_many_traced_choices_are_refused(toy_server):
    answer = toy_server.post("/v1/chat/completions", {**CHAT, **ASK, "n": 9})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculative.trace"
