"""Over HTTP, streamed or whole, speculating or not: text, ends, usage, log-probabilities and
tool arguments are the same. Random requests, several at once.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.worlds.real_server import DENSE, NIGHTLY, PERSON, forerun_serve, strict, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
TIMES = 600 if NIGHTLY else 60
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": PERSON, "strict": True}},
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
                "required": ["a"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
]


@pytest.fixture(scope="module")
def server(tmp_path_factory, models):
    flags = ("--policy", "fixed", "--tool-parser", "hermes")
    with forerun_serve(tmp_path_factory.mktemp("streaming"), *flags, models=models) as server:
        server.answers()
        yield server
        assert wait_for(lambda: not server.held())
        assert "Traceback" not in server.logged()


def drawn(luck, models):
    """Route and body of a random request."""
    body = {
        **({"model": luck.choice(models)} if models else {}),
        "max_tokens": luck.randint(5, 60),
        "temperature": luck.choice([0, 0, 0.7, 1.3]),
        "seed": luck.randrange(100),
        "n": luck.choice([1, 1, 1, 3]),
        "logit_bias": DENSE,
        "stream_options": {"include_usage": True},
    }
    for name, values in (
        ("stop", [["e"], ["dj", "k"]]),
        ("top_p", [0.8]),
        ("top_k", [5]),
        ("frequency_penalty", [0.6]),
        ("ignore_eos", [True]),
        ("min_tokens", [4]),
    ):
        if luck.random() < 0.25:
            body[name] = luck.choice(values)
    text = "".join(luck.choice("abcdefghij ") for _ in range(luck.randint(1, 30)))
    if luck.random() < 0.4:
        body["prompt"] = text
        if luck.random() < 0.4:
            body["logprobs"] = luck.choice([0, 2])
        if luck.random() < 0.3:
            body["regex"] = "(ab|cd){1,9}[a-f]"
        return COMPLETIONS, body
    body["messages"] = [{"role": "user", "content": text}]
    if luck.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": luck.choice([0, 3])}
    kind = luck.random()
    if kind < 0.3:
        body |= strict(PERSON)
    elif kind < 0.6:
        named = {"type": "function", "function": {"name": luck.choice(["find", "add"])}}
        body |= {"tools": TOOLS, "tool_choice": luck.choice(["auto", "required", named])}
        body["max_tokens"] += 40
    return CHAT, body


def plain(choice):
    """What a whole answer says of one choice."""
    if "text" in choice:
        said = choice["text"]
        calls = []
    else:
        said = choice["message"].get("content") or ""
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in choice["message"].get("tool_calls") or []
        ]
    return {
        "text": said,
        "calls": calls,
        "finish": choice["finish_reason"],
        "logprobs": entries(choice["logprobs"]),
    }


def entries(logprobs):
    """Tokens with their log-probabilities, by any route."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return logprobs["content"] or []
    tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    return [list(row) for row in rows]


def whole(server, route, body):
    answer = server.post(route, {key: body[key] for key in body if key != "stream_options"})
    assert answer.status_code == 200, (answer.text, body)
    reply = answer.json()
    choices = {choice["index"]: plain(choice) for choice in reply["choices"]}
    return choices, counts(reply["usage"])


def counts(usage):
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def streamed(server, route, body):
    answer = server.post(route, body | {"stream": True})
    assert answer.status_code == 200, (answer.text, body)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    choices, usage = {}, None
    for event in map(json.loads, events):
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for piece in event["choices"]:
            new = {"text": "", "calls": {}, "finish": None, "logprobs": []}
            one = choices.setdefault(piece["index"], new)
            assert one["finish"] is None, "it goes on after its end"
            one["finish"] = piece["finish_reason"]
            one["logprobs"] += entries(piece.get("logprobs"))
            delta = piece.get("delta")
            one["text"] += piece["text"] if delta is None else delta.get("content") or ""
            for call in (delta or {}).get("tool_calls") or []:
                held = one["calls"].setdefault(call["index"], ["", ""])
                held[0] += call["function"].get("name") or ""
                held[1] += call["function"].get("arguments") or ""
    for one in choices.values():
        one["calls"] = [tuple(one["calls"][index]) for index in sorted(one["calls"])]
    return choices, counts(usage)


def test_every_way_of_asking_gives_the_same(server):
    luck = random.Random(11)
    requests = [drawn(luck, server.models) for _ in range(TIMES)]

    def compared(pair):
        route, body = pair
        off = body | {"speculative": {"enabled": False}}
        wanted = whole(server, route, off)
        for ask, sent in ((whole, body), (streamed, body), (streamed, off)):
            assert ask(server, route, sent) == wanted, (route, sent)
        return bool(any(one["calls"] for one in wanted[0].values()))

    with ThreadPoolExecutor(4) as pool:
        with_calls = list(pool.map(compared, requests))
    assert sum(with_calls) > 3, "no tool was ever called"
