"""What the suites of SGLang, vLLM and LiteLLM hold their servers to, kept as our own."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields

import pytest
from starlette.testclient import TestClient

from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app
from forerun.serve.bodies.fields import declared
from forerun.serve.bodies.schema import ChatBody, CompletionBody
from forerun.serve.dialects.anthropic.schema import MessagesBody
from forerun.serve.dialects.ollama.schema import OllamaChatBody
from forerun.serve.dialects.responses.schema import ResponsesBody
from forerun.serve.dialects.sglang.schema import GenerateBody
from tests.cli.toys import CONFIG, toy_loaded
from tests.serve.test_reported import drafting, folder  # noqa: F401
from tests.serve.test_reported import serving as served
from tests.worlds.servers import request_bytes, serving, wait_for

GENERATE = "/generate"
HELLO = [{"role": "user", "content": "Hi"}]


# --- log-probabilities ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["OFF", "NEXTN", pytest.param("STANDALONE", marks=pytest.mark.slow)]
)
def test_an_answer_scored_again_as_a_prompt(folder, method):  # noqa: F811
    """Its log-probabilities are those that it was given with, to the bit: verified in trees or
    step by step, and read in chunks, from the cache or not.
    """
    with served(drafting(folder, method)) as client:

        def ask(prompt, **body):
            sent = {"prompt": prompt, "temperature": 0, "logprobs": 2, "seed": 3, **body}
            answer = client.post("/v1/completions", json=sent)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        def scored(number):
            ids = random.Random(number).choices(range(8, 250), k=20 + 7 * number)
            said = ask(ids, max_tokens=30, return_token_ids=True, ignore_eos=True)
            again = ask([*ids, *said["token_ids"]], max_tokens=1, echo=True)["logprobs"]
            told = said["logprobs"]
            assert again["token_logprobs"][len(ids) : -1] == told["token_logprobs"]
            assert again["top_logprobs"][len(ids) : -1] == told["top_logprobs"]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(scored, range(8)))


def test_scores_that_begin_at_other_places_eight_at_once(client):
    """SGLang's logprob_start_len: each answer is the end of the one that begins at 0."""
    texts = ["".join(random.Random(n).choices("abcdefgh ", k=30 + 11 * n)) for n in range(8)]

    def asked(text, start):
        body = {
            "text": text,
            "return_logprob": True,
            "top_logprobs_num": 2,
            "logprob_start_len": start,
            "sampling_params": {"temperature": 0, "max_new_tokens": 6},
        }
        answer = client.post(GENERATE, json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()["meta_info"]
        return found["input_token_logprobs"], found["output_token_logprobs"]

    whole = [asked(text, 0) for text in texts]
    luck = random.Random(7)
    jobs = [(n, luck.choice([-1, 0, 1, len(texts[n]) // 2, len(texts[n]) - 1])) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            luck.shuffle(jobs)
            found = pool.map(lambda job: asked(texts[job[0]], job[1]), jobs)
            for (n, start), (before, behind) in zip(jobs, found, strict=True):
                assert behind == whole[n][1]
                assert before == ([] if start < 0 else whole[n][0][start:])


# --- clients that leave --------------------------------------------------------------------


def test_gauges_are_zero_behind_a_storm_of_clients_that_leave(tmp_path):
    """Streams and whole answers, constrained ones, several choices, some that are still waiting."""
    kinds = [
        {"stream": True},
        {"stream": False},
        {"stream": True, "n": 3, "temperature": 1.0},
        {"stream": True, "regex": "[a-p]*"},
        {"stream": True, "echo": True, "logprobs": 2},
    ]
    with serving(tmp_path, delay=0.005) as server:
        before = server.complete(max_tokens=20).json()["choices"]

        def leave(number):
            body = {"prompt": f"Hi {number}", "max_tokens": 3000, "ignore_eos": True}
            with server.connect() as sock:
                sock.sendall(request_bytes("/v1/completions", body | kinds[number % len(kinds)]))
                if number % 3:
                    sock.recv(100 * (number % 4) + 1)

        for storm in range(2):
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(leave, range(100 * storm, 100 * storm + 24)))
        assert server.idle()
        page = server.http.get("/metrics").text
        for name in gauges(page):
            assert re.search(rf"(?m)^{name}(\{{[^}}]*\}})? 0(\.0)?$", page), (name, page)
        assert server.complete(max_tokens=20).json()["choices"] == before
        assert wait_for(lambda: not server.held())
        assert "Traceback" not in server.logged()


def gauges(page):
    """Names of what is counted at this moment: requests, and pages that they hold."""
    names = set(re.findall(r"(?m)^# TYPE (\S+) gauge$", page))
    found = {name for name in names if re.search("running|waiting|held|queue|usage", name)}
    assert len(found) >= 3, names
    return sorted(found)


# --- errors as clients read them -----------------------------------------------------------

TOO_LONG = (
    "exceed context limit",
    "this model's maximum context length is",
    "is longer than the model's context length",
    "exceeds the available context size",
    "prompt is too long",
)
"""Words by which LiteLLM, and agents on it, know that a prompt is too long: they shorten it. The
last is Anthropic's own."""

LONG = "word " * 3000
SHAPES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/api/chat": {"model": "toy", "messages": [{"role": "user", "content": LONG}]},
    "/api/generate": {"model": "toy", "prompt": LONG},
    GENERATE: {"text": LONG},
}


@pytest.mark.parametrize("path", SHAPES)
def test_a_prompt_that_is_too_long_is_told_in_words_that_litellm_knows(client, path):
    for length in (LONG, LONG[:1100]):  # Certainly too long, and known only once it is encoded.
        body = json.loads(json.dumps(SHAPES[path]).replace(LONG, length))
        answer = client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert any(words in answer.text.lower() for words in TOO_LONG), answer.text
        assert "rate limit" not in answer.text and "429" not in answer.text


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"temperature": "hot"}, "invalid_request_error"),
        ({"messages": []}, "invalid_request_error"),
        ({"max_tokens": -3}, "invalid_request_error"),
    ],
)
def test_other_errors_are_not_taken_for_a_full_context_or_queue(client, body, kind):
    answer = client.post("/v1/chat/completions", json={"messages": HELLO, **body})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == kind
    assert not any(words in answer.text.lower() for words in (*TOO_LONG, "rate limit"))


# --- fields that say nothing ---------------------------------------------------------------

LEAST = {
    "/v1/chat/completions": (ChatBody, {"messages": HELLO, "max_tokens": 6}),
    "/v1/completions": (CompletionBody, {"prompt": "Hi", "max_tokens": 6}),
    "/v1/messages": (MessagesBody, {"messages": HELLO, "max_tokens": 6}),
    "/v1/responses": (ResponsesBody, {"input": "Hi", "max_output_tokens": 6}),
    "/api/chat": (
        OllamaChatBody,
        {"messages": HELLO, "options": {"num_predict": 6}, "model": "toy"},
    ),
    GENERATE: (GenerateBody, {"text": "Hi", "sampling_params": {"max_new_tokens": 6}}),
}
GREEDY = {
    "/api/chat": {"options": {"num_predict": 6, "temperature": 0}, "stream": False},
    GENERATE: {"sampling_params": {"max_new_tokens": 6, "temperature": 0}},
}


def answered(client, path, **more):
    _, least = LEAST[path]
    answer = client.post(path, json={**least, **GREEDY.get(path, {"temperature": 0}), **more})
    assert answer.status_code == 200, (more, answer.text)
    found = json.dumps(answer.json())
    for made in (r'"[a-z_]*id": "[^"]*"', r'"[a-z0-9_]*": [0-9.e-]+', r'"\d{4}-[^"]*Z"'):
        found = re.sub(made, "", found)
    return found


@pytest.mark.parametrize("path", LEAST)
def test_null_says_nothing_in_every_field(client, path):
    """Clients written in other languages send every field that they know, most of them null."""
    body, least = LEAST[path]
    wanted = answered(client, path)
    given = {*least, *GREEDY.get(path, {"temperature": 0})}
    names = [name for name in declared(body) if name not in given]
    for name in names:
        assert answered(client, path, **{name: None}) == wanted, name
    assert answered(client, path, **dict.fromkeys(names)) == wanted


@pytest.mark.parametrize("path", LEAST)
def test_defaults_say_nothing_either(client, path):
    body, least = LEAST[path]
    wanted = answered(client, path)
    given = {*least, *GREEDY.get(path, {"temperature": 0})}
    plain = {
        name: one.default
        for name, one in declared(body).items()
        if name not in given
        and one.default is not MISSING
        and isinstance(one.default, bool | int | float | str)
    }
    assert plain
    for name, default in plain.items():
        assert answered(client, path, **{name: default}) == wanted, name


# --- reasoning -----------------------------------------------------------------------------


def test_markers_of_ordinary_tokens_and_a_constraint(client):
    """A model whose `</think>` is no token but eight: the constraint begins behind the last of
    them, wherever in a verified run it falls, and what only begins like a marker is reasoning.
    """
    settings = ServeSettings(reasoning_end="hg")
    config = EngineConfig(**{**vars_of(CONFIG), "policy": "fixed"})
    with toy_loaded(config) as loaded, TestClient(create_app(loaded, settings)) as thinking:
        assert len(loaded.tokenizer.encode("hg")) == 2

        def ask(number, **more):
            said = [{"role": "user", "content": f"City {number}"}]
            body = {"messages": said, "max_tokens": 400, "temperature": 1.0, "seed": number}
            body |= {"regex": "[a-d]{9}", "logit_bias": {"103": 3, "104": 3}, **more}
            answer = thinking.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            message = choice["message"]
            return message.get("reasoning_content"), message["content"], choice["finish_reason"]

        numbers = range(16)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, numbers))
        plain = [ask(number, speculative={"enabled": False}) for number in numbers]
    assert found == plain
    ended = [(thought, text) for thought, text, finish in found if finish == "stop"]
    assert len(ended) > 8
    for thought, text in ended:
        assert re.fullmatch("[a-d]{9}", text) and "hg" not in (thought or "")
    assert any("h" in (thought or "") for thought, _ in ended), "half a marker is no marker"


def vars_of(config):
    return {one.name: getattr(config, one.name) for one in fields(config)}
