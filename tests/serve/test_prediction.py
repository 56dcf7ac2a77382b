"""`prediction`: draft tokens come out of it; texts are what they are without."""

import json

import pytest

from forerun.options.config import EngineConfig
from tests.covering import every, some_of, values
from tests.worlds.toy_app import toy_client

PATHS = ("/v1/chat/completions", "/v1/completions")
SAMPLINGS = ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 2})


@pytest.fixture(scope="module")
def client():
    config = EngineConfig(model="toy", policy="fixed")
    with toy_client(config=config) as client:
        yield client


def ask(client, path, code=200, **body):
    said = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    answer = client.post(path, json={**said, "max_tokens": 60, **body})
    assert answer.status_code == code, answer.text
    return answer.json()


def texts(answer):
    choices = answer["choices"]
    return [one["message"]["content"] if "message" in one else one["text"] for one in choices]


def counts(answer):
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize(("path", "sampling"), some_of(every(PATHS, SAMPLINGS), values))
def test_a_prediction_changes_no_text(client, path, sampling):
    plain = ask(client, path, speculative={"enabled": False}, **sampling)
    assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]
    wanted = texts(plain)
    for content in (
        wanted[0],
        "zzz" + wanted[0][5:] * 2,
        "qqq",
        "",
        [text_part("Hi"), text_part("x")],
    ):
        given = {"prediction": {"type": "content", "content": content}, **sampling}
        assert texts(ask(client, path, **given)) == wanted
        off = ask(client, path, speculative={"enabled": False}, **given)
        assert texts(off) == wanted and counts(off) == (0, 0)


def text_part(text):
    return {"type": "text", "text": text}


@pytest.mark.parametrize("path", PATHS)
def test_what_came_of_it_is_counted(client, path):
    text = texts(ask(client, path, temperature=0))[0]
    right = ask(client, path, temperature=0, prediction={"content": text})
    assert counts(right)[0] > 0
    wrong = ask(client, path, temperature=0, prediction={"content": "~" * 40})
    assert texts(wrong) == [text] and counts(wrong)[0] == 0


def test_the_first_tokens_are_drafted_already(client):
    """Nothing came before in the text: what is drafted first is the prediction's."""
    text = texts(ask(client, PATHS[1], temperature=0))[0]
    given = {"prediction": {"content": text}, "speculative": {"trace": True}}
    body = {"prompt": "Hi", "max_tokens": 8, "temperature": 0, "stream": True, **given}
    lines = client.post(PATHS[1], json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    steps = [
        step
        for chunk in chunks
        for c in chunk["choices"]
        for step in c.get("speculative_trace", ())
    ]
    likeliest = [step["nodes"][0]["source"] for step in steps if step["nodes"]]
    assert set(likeliest) == {"prediction"}


def test_streams_count_it_too(client):
    text = texts(ask(client, PATHS[0], temperature=0))[0]
    body = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60}
    answer = client.post(PATHS[0], json={**body, "prediction": {"content": text}})
    last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
    assert counts(json.loads(last[6:]))[0] > 0


@pytest.mark.parametrize(
    ("prediction", "place"),
    [
        ({"type": "other", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"content": 5}, "prediction.content"),
        ({"content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"content": "x", "more": 1}, "more"),
        ("x", "prediction"),
        ({"content": "x" * 100_000}, "prediction.content"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_prediction_is_refused_by_name(client, path, prediction, place):
    error = ask(client, path, 400, prediction=prediction)["error"]
    assert place in error["message"]
