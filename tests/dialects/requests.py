"""Requests of the tests of all dialects, and the answers of OpenAI's route to them."""

import pytest

SAMPLED = {"temperature": 1.0, "seed": 11}
GREEDY = {"temperature": 0.0, "seed": 0}
MESSAGES = [{"role": "user", "content": "Which city?"}]
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def with_two(server="server", seldom=False):
    """Run a test against a server of one model and one of two: a row of every route does.

    seldom: against two with the slow tests
    """
    both = [None, pytest.param(["toy", "other"], marks=[pytest.mark.slow] * seldom)]
    return pytest.mark.parametrize(server, both, ids=["one", "two"], indirect=True)


def is_place(value):
    return value["city"] in ("Paris", "Rome") and value["days"] in (1, 2) and len(value) == 2


def chat(server, messages=MESSAGES, **options):
    """The choice of /v1/chat/completions, and its usage."""
    body = {"messages": messages, "max_tokens": 40, **options}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0], answer.json()["usage"]


def text_of(server, messages=MESSAGES, **options):
    return chat(server, messages, **options)[0]["message"]["content"]
