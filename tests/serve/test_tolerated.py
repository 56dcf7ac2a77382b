"""Fields that every client sends: honoured, or ignored and named."""

import json
import re
from types import SimpleNamespace

import pytest

from forerun.errors import RequestError
from forerun.serve.bodies.dialogue import effort_names, template_of
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.schema import ChatBody, CompletionBody
from forerun.serve.http.errors import ApiError
from forerun.text.chat import ChatTemplate
from tests.cli.toys import toy_loaded
from tests.shape.tree import ROOT

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
HEADER = "x-forerun-ignored"


def ask(client, path="/v1/chat/completions", **body):
    answer = client.post(path, json=(CHAT if "chat" in path else {"prompt": "Hi"}) | body)
    assert answer.status_code == 200, answer.text
    return answer


def text(answer):
    choice = answer.json()["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_changes_nothing_is_named(client, stream):
    body = {"metadata": {"a": "b"}, "store": True, "verbosity": "low", "priority": 3,
            "cache_control": {"type": "ephemeral"}, "reasoning_effort": "low",
            "stream": stream}  # fmt: skip
    answer = ask(client, **body)
    assert set(answer.headers[HEADER].split(", ")) == body.keys() - {"stream"}
    if not stream:
        assert text(answer) == text(ask(client))
    assert HEADER not in ask(client, store=False, priority=0, user="me").headers
    assert ask(client, "/v1/completions", priority=1).headers[HEADER] == "priority"


def test_caches_marked_in_messages(client):
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    marked = [{"role": "user", "content": [part]}]
    answer = ask(client, messages=marked)
    assert answer.headers[HEADER] == "messages.cache_control" and text(answer) == text(ask(client))


WITHIN = [
    ("/v1/chat/completions", {"reasoning": {"exclude": True}}, "reasoning.exclude"),
    ("/v1/messages", {"system": [{"type": "text", "text": "a", "cache_control": {}}]},
     "system.cache_control"),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}, "cache_control": {}}]},
     "tools.cache_control"),
    ("/v1/responses", {"tools": [{"type": "function", "name": "f", "output_schema": {}}]},
     "tools.output_schema"),
    ("/v1/responses", {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {}}]}]},
     "input.prompt_cache_breakpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "named"), WITHIN)
def test_what_changes_nothing_within_objects_is_named(client, path, body, named):
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    least = {"input": "Hi"} if path == "/v1/responses" else {"messages": CHAT["messages"]}
    answer = client.post(path, json={**least, limit: 2, **body})
    assert answer.status_code == 200, answer.text
    assert named in answer.headers[HEADER].split(", ")


def test_the_document_names_every_ignored_field():
    document = (ROOT / "docs" / "use" / "requests.md").read_text()
    names = {*ChatBody.unused, *CompletionBody.unused}
    assert names > {"store", "metadata", "verbosity", "priority", "cache_control", "mirostat"}
    assert all(re.search(rf"`{name}[`:]", document) for name in names)


def test_the_end_of_a_prompt(client):
    short = ask(client, "/v1/completions", prompt="xxxHi", truncate_prompt_tokens=2, echo=True)
    assert short.json()["usage"]["prompt_tokens"] == 2 and text(short).startswith("Hi")
    whole = ask(client, "/v1/completions", echo=True)
    assert text(short) == text(whole)
    long = ask(client, "/v1/completions", prompt="x" * 3000, truncate_prompt_tokens=-1,
               max_tokens=1)  # fmt: skip
    assert long.json()["usage"]["prompt_tokens"] == 1023
    assert ask(client, truncate_prompt_tokens=5).json()["usage"]["prompt_tokens"] == 5


def test_as_many_tokens_as_there_are(client):
    answer = ask(client, "/v1/completions", max_tokens=-1, ignore_eos=True)
    assert answer.json()["usage"]["total_tokens"] == 1024
    answer = ask(client, max_tokens=-1, ignore_eos=True)
    assert answer.json()["usage"]["total_tokens"] == 1024


def test_a_message_that_goes_on(client):
    question, begun = CHAT["messages"][0], {"role": "assistant", "content": "One, two "}
    on = {"messages": [question, begun], "continue_final_message": True}
    answer = ask(client, **on)
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOne, two "
    same = ask(client, "/v1/completions", prompt=rendered, max_tokens=4)
    assert text(answer) == text(same)
    assert answer.json()["usage"]["prompt_tokens"] == same.json()["usage"]["prompt_tokens"]
    for messages in ([question], [question, {"role": "assistant", "content": " "}]):
        refused = client.post("/v1/chat/completions", json=CHAT | on | {"messages": messages})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == f"messages[{len(messages) - 1}]"


def test_reasoning_of_an_earlier_answer(client):
    said = {"role": "assistant", "content": "Two."}
    bodies = [{**said, name: "One and one."} for name in ("reasoning", "reasoning_content")]
    texts = [text(ask(client, messages=[one, CHAT["messages"][0]])) for one in bodies]
    assert texts[0] == texts[1]
    assert read(ChatBody, {"messages": [bodies[0]]}).messages == read(
        ChatBody, {"messages": [bodies[1]]}
    ).messages  # fmt: skip


def test_efforts_that_a_template_knows():
    def named(effort, source):
        with toy_loaded() as loaded:
            template = ChatTemplate(source, loaded.tokenizer)
            names = effort_names(read(ChatBody, CHAT | {"reasoning_effort": effort}), template)
            template.close()
            return names

    both = "{{ reasoning_effort }}{% if enable_thinking %}{% endif %}"
    assert named("high", "{{ reasoning_effort }}") == {"reasoning_effort": "high"}
    assert named("none", "{{ reasoning_effort }}") == {"reasoning_effort": "none"}
    assert named("high", both) == {"reasoning_effort": "high", "enable_thinking": True}
    assert named("none", both) == {"enable_thinking": False}
    # DeepSeek V3.1, Kimi K2.5, Granite 3.3; a field of messages and prose are none.
    assert named("high", "{% if not thinking is defined %}{% endif %}") == {"thinking": True}
    assert named("none", "{%- if thinking is defined and thinking is false -%}{%- endif -%}") == {
        "thinking": False
    }
    assert named("none", "{% if thinking %}{% endif %}") == {"thinking": False}
    assert named("high", "Begin by thinking. {% if m.thinking %}{% endif %}") == {}
    assert named("none", "{% set enable_thinking = enable_thinking | default(true) %}") == {
        "enable_thinking": False
    }
    # Nemotron: only a word in the system message switches it.
    own = "{% set enable_thinking = true %}{% if not enable_thinking %}<think></think>{% endif %}"
    assert named("none", own) == {}
    ours = "{% set ns = namespace(enable_thinking=true) %}{% if ns.enable_thinking %}{% endif %}"
    assert named("none", ours) == {}
    assert named("none", "{% if enable_thinking %}{% endif %}") == {"enable_thinking": False}
    assert named("low", "{% if enable_thinking %}{% endif %}") == {"enable_thinking": True}
    assert named("low", "plain") == {}


def test_tokenizer_info(client):
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and info["bos_token"] is None
    assert info["model_max_length"] == 1024 and "im_start" in info["chat_template"]
    # As lm-evaluation-harness uses them.
    ids = client.post("/tokenize", json={"prompt": "Hé", "add_special_tokens": False}).json()
    back = client.post("/detokenize", json={"tokens": ids["tokens"]}).json()
    assert back["prompt"] == "Hé"


OFF = {  # As llama.cpp's, vLLM's, SGLang's and LM Studio's clients send them.
    "cache_prompt": True, "id_slot": -1, "samplers": ["top_k"], "mirostat": 0, "mirostat_tau": 5.0,
    "mirostat_eta": 0.1, "typical_p": 1.0, "tfs_z": 1, "top_n_sigma": -1, "xtc_probability": 0,
    "xtc_threshold": 0.1, "dynatemp_range": 0, "dynatemp_exponent": 1.0, "dry_multiplier": 0,
    "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n"], "repeat_last_n": 64, "min_keep": 0, "n_keep": 0,
    "t_max_predict_ms": 0, "return_progress": False, "detokenize": True, "best_of": 1,
    "spaces_between_special_tokens": True, "ttl": 300, "keep_alive": "5m", "provider": {},
    "include_reasoning": True, "stream_reasoning": True, "guided_decoding_backend": "outlines",
    "prompt_cache_retention": "24h",
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_settings_of_other_servers_that_are_off(client, path):
    answer = ask(client, path, **OFF)
    named = set(answer.headers[HEADER].split(", "))
    # CompletionBody takes `best_of` itself.
    assert named | {"best_of"} == OFF.keys()
    assert text(answer) == text(ask(client, path))
    assert HEADER not in ask(client, path, **dict.fromkeys(OFF)).headers


@pytest.mark.parametrize("apart", [True, False])
def test_a_continued_text_has_no_reasoning_to_part(client, apart):
    answer = ask(client, "/v1/completions", separate_reasoning=apart)
    assert answer.status_code == 200 and answer.headers[HEADER] == "separate_reasoning"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mirostat", 2), ("typical_p", 0.9), ("tfs_z", 0.5), ("top_n_sigma", 1),
        ("t_max_predict_ms", 9), ("xtc_probability", 0.5), ("dynatemp_range", 0.5),
        ("dry_multiplier", 0.8), ("detokenize", False),
        ("repeat_last_n", 32), ("best_of", 2), ("kv_transfer_params", {"do_remote_decode": True}),
        ("return_token_ids", "yes"), ("timings_per_token", 1), ("request_id", ""),
        ("verbosity", "loud"), ("reasoning_effort", "much"), ("priority", "high"),
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("max_tokens", -2),
        ("logits_processors", ["x"]),
    ],
)  # fmt: skip
def test_what_would_change_the_text_or_is_wrong_is_refused(client, field, value):
    answer = client.post("/v1/chat/completions", json=CHAT | {field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_names_of_other_servers(client):
    ours = {"max_tokens": 7, "repetition_penalty": 1.3, "ignore_eos": True}
    theirs = {"n_predict": 7, "repeat_penalty": 1.3, "ignore_eos": True}
    path = "/v1/completions"
    assert text(ask(client, path, **theirs)) == text(ask(client, path, **ours))
    probabilities = ask(client, path, n_probs=2).json()["choices"][0]["logprobs"]
    assert len(probabilities["top_logprobs"][0]) == 2
    answer = client.post(path, json={"prompt": "Hi", "max_tokens": 3, "n_predict": 4})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n_predict"
    assert "disagree" in answer.json()["error"]["message"]
    assert ask(client, path, max_tokens=3, n_predict=3).json()["usage"]["completion_tokens"] <= 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_token_ids_and_timings(client, path):
    body = {
        "return_token_ids": True,
        "timings_per_token": True,
        "ignore_eos": True,
        "max_tokens": 9,
    }
    whole = ask(client, path, **body).json()
    count = whole["usage"]
    assert len(whole["choices"][0]["token_ids"]) == count["completion_tokens"] == 9
    assert len(whole["prompt_token_ids"]) == count["prompt_tokens"]
    timings = whole["timings"]
    assert timings["predicted_n"] == 9
    assert timings["prompt_n"] + timings["cache_n"] == count["prompt_tokens"]
    assert timings["predicted_per_second"] > 0 and timings["prompt_ms"] > 0
    lines = ask(client, path, stream=True, **body).text.split("\n\n")
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    ids = [id for chunk in chunks for c in chunk["choices"] for id in c.get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    assert chunks[-1]["timings"]["predicted_n"] == 9
    plain = ask(client, path).json()
    assert "timings" not in plain and "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


def test_an_id_of_the_clients_own(client):
    for name in ("request_id", "rid"):
        assert ask(client, **{name: "mine-1"}).json()["id"] == "chatcmpl-mine-1"
        assert ask(client, "/v1/completions", **{name: "a"}).json()["id"] == "cmpl-a"


def test_an_answer_begins_or_goes_on_but_not_both(client):
    begun = [CHAT["messages"][0], {"role": "assistant", "content": "One"}]
    both = {"messages": begun, "continue_final_message": True, "add_generation_prompt": True}
    answer = client.post("/v1/chat/completions", json=CHAT | both)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "continue_final_message"
    ask(client, **both | {"add_generation_prompt": False})


def test_without_a_chat_template_both_ways_on_are_named():
    with pytest.raises(ApiError, match=r"^base has no .*; use /v1/completions, .*--chat-template"):
        template_of(SimpleNamespace(chat=None, name="base"))


@pytest.mark.parametrize(
    ("switch", "effort"),
    [
        ({"enable_thinking": False}, "none"),
        ({"enable_thinking": True}, "medium"),
        ({"think": False}, "none"),
        ({"think": "low"}, "low"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9, "keep": "all"}}, "medium"),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, "medium"),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "high"}, "high"),
        ({"thinking": False, "reasoning_effort": "high"}, "none"),
        ({"enable_thinking": False, "thinking": {"type": "disabled"}}, "none"),
        ({"reasoning": {"enabled": True}}, "medium"),
        ({"reasoning": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "auto"}}, None),
    ],
)
def test_switches_of_other_services(switch, effort):
    with toy_loaded() as loaded:
        template = ChatTemplate("{{ reasoning_effort }}", loaded.tokenizer)
        names = effort_names(read(ChatBody, CHAT | switch), template)
        template.close()
    assert names == ({} if effort is None else {"reasoning_effort": effort})
    budget = 9 if "budget_tokens" in str(switch) else None
    assert read(ChatBody, CHAT | switch).requested_budget[1] == budget


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": 1}, "thinking"),
        ({"think": "much"}, "think"),
        ({"enable_thinking": "false"}, "enable_thinking"),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking"),
    ],
)
def test_switches_that_say_nothing(body, place):
    with pytest.raises(RequestError) as error:
        read(ChatBody, CHAT | body)
    assert error.value.field == place
