"""Routes that operators and clients of SGLang, vLLM and llama.cpp ask, against a real server."""

import json
import threading
import time

import pytest

from tests.dialects.requests import MESSAGES, chat, with_two
from tests.dialects.thoughts import TOKENIZER

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@with_two()
def test_what_benchmarks_read(server):
    server.complete(max_tokens=40, temperature=0)
    info = server.http.get("/get_server_info").json()
    assert info.keys() == server.http.get("/server_info").json().keys()
    assert info["max_total_num_tokens"] == info["config"]["kv_tokens"]
    assert info["speculative_num_draft_tokens"] == info["config"]["speculative_num_draft_tokens"]
    assert "speculative_eagle_topk" in info
    (state,) = info["internal_states"]
    stats = info["stats"]
    assert state["avg_spec_accept_length"] == 1 + stats["accepted"] / stats["drafts"] > 1


def test_probes(server):
    assert server.http.get("/ping").status_code == server.http.post("/ping").status_code == 200
    assert server.http.get("/load").json() == {"server_load": 0}
    (load,) = server.http.get("/get_load").json()
    assert load["num_reqs"] == 0
    assert all(slot["is_processing"] is False for slot in server.http.get("/slots").json())


@with_two()
def test_properties_and_templates(server):
    props = server.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096 and props["total_slots"] > 0
    assert "im_start" in props["chat_template"] and props["model_alias"] == "toy"
    body = {"messages": MESSAGES, "tools": [TOOL]}
    prompt = server.post("/apply-template", body).json()["prompt"]
    body |= {"tool_choice": "auto", "max_tokens": 40, "temperature": 0, "reasoning_effort": "low"}
    assert server.post("/apply-template", body).json()["prompt"] == prompt
    none = server.post("/apply-template", body | {"tool_choice": "none"}).json()["prompt"]
    assert none == server.post("/apply-template", {"messages": MESSAGES}).json()["prompt"] != prompt
    reply = server.post("/v1/chat/completions/input_tokens", body).json()
    assert reply["input_tokens"] == len(TOKENIZER.encode(prompt, specials=True))
    _, usage = chat(server, **{k: v for k, v in body.items() if k != "messages"})
    assert reply["input_tokens"] == usage["prompt_tokens"]


@with_two()
def test_prefixes_are_forgotten(server):
    body = {"prompt": "z" * 200, "max_tokens": 1}
    for _ in range(2):
        cached = server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens"] > 0
    assert server.post("/flush_cache", {}).status_code == 200
    cached = server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens"] == 0 and server.http.get("/flush_cache").status_code == 200


@with_two()
@pytest.mark.parametrize("order", [{"rid": "mine"}, {"abort_all": True}])
def test_a_request_is_ended_by_its_name(server, order):
    body = {"prompt": "Hi", "max_tokens": 4000, "ignore_eos": True, "rid": "mine"}
    events = []
    asking = threading.Thread(target=lambda: events.append(server.post("/v1/completions", body)))
    asking.start()
    while not server.post("/abort_request", order).json()["aborted"]:
        time.sleep(0.01)
    asking.join()
    assert events[0].status_code == 400 and events[0].json()["error"]["code"] == "aborted"
    assert server.post("/abort_request", {"rid": "nobody"}).json() == {"aborted": 0}
    assert server.post("/abort_request", {}).status_code == 400
    assert server.idle()


@with_two()
def test_a_stream_that_is_ended_says_so(server):
    body = {"prompt": "Hi", "max_tokens": 4000, "ignore_eos": True, "stream": True, "rid": "piece"}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        first = next(line for line in lines if line)
        assert json.loads(first[6:])["id"] == "cmpl-piece"
        server.post("/abort_request", {"rid": "cmpl-piece"})
        rest = [line for line in lines if line]
    assert "aborted through /abort_request" in rest[-2] and rest[-1] == "data: [DONE]"


@with_two()
def test_a_path_without_v1_is_named(server):
    answer = server.post("/responses", {"input": "Hi"})
    assert answer.status_code == 404
    assert "did you mean /v1/responses?" in answer.json()["error"]["message"]


@with_two()
def test_tokens_of_a_response_without_generation(server):
    counted = server.post("/v1/responses/input_tokens", {"input": "Which city?"}).json()
    reply = server.post("/v1/responses", {"input": "Which city?", "max_output_tokens": 5}).json()
    assert counted["input_tokens"] == reply["usage"]["input_tokens"]
    more = {"input": "And?", "previous_response_id": reply["id"]}
    later = server.post("/v1/responses/input_tokens", more).json()
    assert later["input_tokens"] > counted["input_tokens"]


def test_what_ended_an_answer(server):
    text = chat(server, temperature=0)[0]["message"]["content"]
    stopped, _ = chat(server, temperature=0, stop=text[4:6])
    assert stopped["matched_stop"] == text[4:6]
    body = {"prompt": [100, 156], "max_tokens": 9}
    ended = server.post("/v1/completions", body).json()["choices"][0]
    assert (ended["finish_reason"], ended["matched_stop"], ended["stop_reason"]) == (
        "stop", 257, None)  # fmt: skip


@with_two()
def test_chat_completions_without_v1(server):
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    with_it, without = (server.post(f"{at}/chat/completions", body) for at in ("/v1", ""))
    assert without.status_code == 200
    assert with_it.json()["choices"] == without.json()["choices"]
    for whole, other in (("/v1/models", "/models"), ("/health", "/v1/health")):
        assert server.http.get(other).json() == server.http.get(whole).json()
