"""The official ollama client against a real server process."""

import json
from types import SimpleNamespace

import pytest

from forerun import __version__
from forerun.serve.dialects.ollama.models import _details
from tests.dialects.requests import (
    GREEDY,
    MESSAGES,
    PLACE,
    SAMPLED,
    chat,
    is_place,
    text_of,
    with_two,
)
from tests.dialects.thoughts import thoughtful
from tests.lazy import LazyModule
from tests.shape.tree import ROOT

ollama = LazyModule("ollama")


TOOL = {"type": "function", "function": {"name": "travel", "description": "Plan a journey.",
                                         "parameters": PLACE}}  # fmt: skip


@pytest.fixture(scope="module")
def client(server):
    return ollama.Client(server.root, trust_env=False)


def ask(client, sampling=GREEDY, **more):
    options = {**sampling, "num_predict": 40, **more.pop("options", {})}
    return client.chat(**{"model": "toy", "messages": MESSAGES, "options": options, **more})


@with_two()
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_that_of_the_other_route(server, client, sampling):
    choice, usage = chat(server, **sampling)
    answer = ask(client, sampling)
    assert answer.message.content == choice["message"]["content"]
    assert (answer.message.role, answer.model, answer.done) == ("assistant", "toy", True)
    assert (answer.done_reason, answer.eval_count) == ("length", usage["completion_tokens"])
    assert answer.prompt_eval_count == usage["prompt_tokens"]
    assert answer.total_duration >= answer.prompt_eval_duration > 0
    assert answer.total_duration >= answer.eval_duration
    off = {"speculative": {"enabled": False, "stats": True}, "stream": False}
    body = {"messages": MESSAGES, "options": {**sampling, "num_predict": 40}, **off}
    plain = server.post("/api/chat", body).json()
    assert plain["message"]["content"] == answer.message.content
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    once = client.generate("toy:latest", MESSAGES[0]["content"], options=body["options"])
    assert (once.response, once.model) == (answer.message.content, "toy:latest")


@with_two()
def test_stream_is_the_answer_in_lines(server, client):
    whole = ask(client, SAMPLED)
    *pieces, last = ask(client, SAMPLED, stream=True)
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert not any(piece.done for piece in pieces)
    assert (last.done, last.message.content, last.done_reason) == (True, "", "length")
    assert (last.eval_count, last.prompt_eval_count) == (40, whole.prompt_eval_count)
    # Left out, stream is true.
    answer = server.post("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 3}})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["done"] for line in answer.text.splitlines()][-1] is True
    options = {**SAMPLED, "num_predict": 40}
    *pieces, last = client.generate("toy", MESSAGES[0]["content"], options=options, stream=True)
    assert "".join(piece.response for piece in pieces) == whole.message.content


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_no_number_of_tokens_is_no_limit(server, path):
    """Ollama's runner counts against a limit above 0 alone."""
    body = {"messages": MESSAGES} if path == "/api/chat" else {"prompt": "a", "raw": True}
    answers = [
        server.post(path, {**body, "stream": False, "options": {**GREEDY, **options}}).json()
        for options in ({"num_predict": 0}, {"num_predict": -1}, {})
    ]
    counts = [(one["done_reason"], one["eval_count"]) for one in answers]
    assert len(set(counts)) == 1 and counts[0][1] > 1


def test_options_reach_the_sampler(server, client):
    text = text_of(server, **GREEDY)
    cut = ask(client, options={"stop": [text[10:13]]})
    assert cut.message.content == text[: text.index(text[10:13])]
    assert cut.done_reason == "stop"
    penal = {"frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.5}
    theirs = text_of(server, **GREEDY, **penal)
    ollamas = {**penal, "repeat_penalty": penal["repetition_penalty"], "num_ctx": 2048}
    del ollamas["repetition_penalty"]
    assert ask(client, options=ollamas).message.content == theirs != text
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    once = client.generate("toy", MESSAGES[0]["content"], system="Be brief.",
                           options={**GREEDY, "num_predict": 40})  # fmt: skip
    assert once.response == text_of(server, system, **GREEDY)


@with_two()
def test_a_raw_prompt_is_only_continued(server, client):
    options = {**GREEDY, "num_predict": 40}
    answer = client.generate("toy", "Hi", raw=True, options=options)
    theirs = server.complete(max_tokens=40).json()
    assert answer.response == theirs["choices"][0]["text"]
    assert answer.prompt_eval_count == theirs["usage"]["prompt_tokens"]


def test_what_concerns_the_machine_is_named_as_ignored(server):
    options = {"num_predict": 3, "num_ctx": 100, "num_gpu": 1, "use_mmap": True}
    answer = server.post("/api/chat", {"messages": MESSAGES, "options": options, "keep_alive": "5m",
                                       "think": True, "stream": False})  # fmt: skip
    named = answer.headers["x-forerun-ignored"].split(", ")
    assert named == [
        "keep_alive",
        "options.num_ctx",
        "options.num_gpu",
        "options.use_mmap",
        "think",
    ]


DOCUMENTED = {  # The example of Ollama's API page, and what its older versions had.
    "num_keep": 5, "seed": 42, "num_predict": 12, "top_k": 20, "top_p": 0.9, "min_p": 0.0,
    "typical_p": 0.7, "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2,
    "presence_penalty": 1.5, "frequency_penalty": 1.0, "penalize_newline": True, "stop": ["~"],
    "numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1, "main_gpu": 0, "use_mmap": True,
    "num_thread": 8, "mirostat": 1, "mirostat_tau": 0.8, "mirostat_eta": 0.6, "tfs_z": 0.5,
    "num_gqa": 1, "low_vram": False, "f16_kv": True, "logits_all": False, "vocab_only": False,
    "use_mlock": False, "embedding_only": False, "rope_frequency_base": 1e4,
    "rope_frequency_scale": 1.0,
}  # fmt: skip
HONOURED = ("seed", "num_predict", "top_k", "top_p", "min_p", "temperature", "repeat_penalty",
            "presence_penalty", "frequency_penalty", "stop")  # fmt: skip


def test_every_documented_option_is_taken_and_unknown_ones_are_skipped(server):
    def answered(options):
        body = {"messages": MESSAGES, "stream": False, "options": options}
        answer = server.post("/api/chat", body)
        assert answer.status_code == 200, answer.text
        named = answer.headers.get("x-forerun-ignored", "").split(", ")
        return answer.json()["message"]["content"], {
            name.removeprefix("options.") for name in named
        }

    given = {name: DOCUMENTED[name] for name in HONOURED}
    text, _ = answered(given)
    assert answered(DOCUMENTED | {"numctx": 1, "a b\n": 2}) == (
        text, DOCUMENTED.keys() - {*HONOURED} | {"numctx", "a%20b%0A"}
    )  # fmt: skip
    page = (ROOT / "docs" / "use" / "dialects.md").read_text()
    assert all(f"`{name}`" in page for name in DOCUMENTED.keys() - {*HONOURED})
    none = {"repeat_penalty": 1.0, "frequency_penalty": 0, "presence_penalty": 0}
    assert answered(given | {"repeat_last_n": 0}) == answered(given | none) != answered(given)


def test_an_unknown_option_may_be_no_text(server):
    """Half of a surrogate pair has no bytes in a header."""
    body = json.dumps({"messages": MESSAGES, "stream": False, "options": {"\ud800": 1}})
    answer = server.http.post("/api/chat", content=body.encode())
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-forerun-ignored"] == "options.%3F"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(calling, stream):
    body = {"messages": MESSAGES, "tools": [TOOL], "options": {"num_predict": 300}}
    lines = calling.post("/api/chat", {**body, "stream": stream}).text.splitlines()
    answers = [json.loads(line) for line in lines]
    calls = [call for one in answers for call in one["message"].get("tool_calls", ())]
    assert len(calls) == 1 and answers[-1]["done_reason"] == "stop"
    assert is_place(calls[0]["function"]["arguments"])
    theirs, _ = chat(calling, tools=[TOOL], max_tokens=300)
    (call,) = theirs["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == calls[0]["function"]["arguments"]
    # The client's own types take it.
    ollama.ChatResponse(**answers[0])


def test_what_tools_brought_is_heard(server):
    arguments = {"city": "Rome", "days": 1}
    body = {"tools": [TOOL], "stream": False, "options": {**SAMPLED, "num_predict": 40}}
    called = {"function": {"name": "travel", "arguments": arguments}}
    ours = [*MESSAGES, {"role": "assistant", "tool_calls": [called]},
            {"role": "tool", "tool_name": "travel", "content": "Sunny."}]  # fmt: skip
    call = {"type": "function", "function": {"name": "travel", "arguments": json.dumps(arguments)}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "name": "travel", "content": "Sunny."}]  # fmt: skip
    answer = server.post("/api/chat", {"messages": ours, **body}).json()
    assert answer["message"]["content"] == text_of(server, messages, tools=[TOOL], **SAMPLED)


@with_two()
@pytest.mark.parametrize("stream", [False, True])
def test_structured_output(client, stream):
    answer = ask(client, SAMPLED, format=PLACE, options={"num_predict": 400}, stream=stream)
    text = "".join(one.message.content for one in answer) if stream else answer.message.content
    assert is_place(json.loads(text))
    options = {**SAMPLED, "num_predict": 400}
    made = client.generate("toy", "Which?", format="json", options=options)
    assert made.done_reason == "length" or isinstance(json.loads(made.response), dict)


def test_thinking_is_separated(thinking):
    client = ollama.Client(thinking.root, trust_env=False)
    question = [{"role": "user", "content": thoughtful()}]
    message = chat(thinking, question, **GREEDY)[0]["message"]
    answer = ask(client, messages=question, think=True)
    assert answer.message.thinking == message["reasoning_content"]
    assert answer.message.content == message["content"]
    pieces = [*ask(client, messages=question, stream=True)]
    assert "".join(piece.message.thinking or "" for piece in pieces) == answer.message.thinking
    again = [*question, answer.message, *MESSAGES]
    assert ask(client, messages=again).done


def test_logprobs_are_those_of_the_other_route(server, client):
    choice, _ = chat(server, **SAMPLED, logprobs=True, top_logprobs=2)
    answer = ask(client, SAMPLED, logprobs=True, top_logprobs=2)
    logprobs = [(entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
    assert [(entry.token, entry.logprob) for entry in answer.logprobs] == logprobs


def test_models(server, client):
    (model,) = client.list().models
    assert model.model == "toy:latest" and len(model.digest) == 64
    (loaded,) = client.ps().models
    assert loaded.model == "toy:latest"
    shown = client.show("toy")
    assert "<|im_start|>" in shown.template and shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["toy.context_length"] == 4096
    assert server.http.get("/api/version").json() == {"version": __version__}
    empty = client.generate("toy", "")
    assert (empty.done, empty.done_reason, empty.response) == (True, "load", "")
    gone = server.post("/api/chat", {"model": "toy", "messages": [], "keep_alive": 0})
    assert gone.json()["done_reason"] == "unload"


def test_templates_see_tools_in_one_form(server):
    """Whether arguments are held to the schema is no matter of the model's."""
    body = {"messages": MESSAGES, "stream": False, "max_tokens": 1}
    theirs = {"function": {**TOOL["function"], "strict": True}, "type": "function"}
    bare = {"type": "function", "function": {"name": "now"}}
    answer = server.post("/v1/chat/completions", {**body, "tools": [theirs, bare]}).json()
    ours = {"messages": MESSAGES, "stream": False, "tools": [TOOL, bare]}
    reply = server.post("/api/chat", {**ours, "options": {"num_predict": 1}}).json()
    assert answer["usage"]["prompt_tokens"] == reply["prompt_eval_count"]


BAD = [
    ("/api/chat", {"messages": [5]}, "messages[0]"),
    ("/api/chat", {"messages": [{"role": "wizard"}]}, "messages[0].role"),
    ("/api/chat", {"messages": [{"role": "user", "images": ["a"]}]}, "messages[0].images"),
    ("/api/chat", {"tempratur": 1}, "tempratur"),
    ("/api/chat", {"options": {"temperature": 3}}, "options.temperature"),
    ("/api/chat", {"options": {"num_ctx": "big"}}, "options.num_ctx"),
    ("/api/chat", {"options": [1]}, "options"),
    ("/api/chat", {"options": {"num_predict": -3}, "messages": MESSAGES}, "options.num_predict"),
    ("/api/chat", {"format": "yaml"}, "format"),
    ("/api/chat", {"format": {"type": "what"}, "messages": MESSAGES}, "format"),
    ("/api/chat", {"think": "much"}, "think"),
    ("/api/chat", {"keep_alive": True}, "keep_alive"),
    ("/api/chat", {"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    ("/api/chat", {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    ("/api/generate", {"prompt": "a", "template": "b"}, "template"),
    ("/api/generate", {"prompt": "a", "context": [1]}, "context"),
    ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
    ("/api/generate", {"prompt": "a", "raw": True, "top_logprobs": 1}, "top_logprobs"),
    ("/api/generate", {"prompt": "a" * 5000}, "4096"),
    ("/api/show", {}, "model"),
]


@with_two()
@pytest.mark.parametrize(("path", "wrong", "named"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_said_in_ollamas_shape(server, path, wrong, named):
    answer = server.post(path, wrong)
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
    assert named in answer.json()["error"]


def test_other_errors(server, client, guarded):
    assert client.chat("llama3", MESSAGES).message.content, "with one model any name is its name"
    with_key = ollama.Client(guarded.root, trust_env=False,
                             headers={"authorization": "Bearer sesame"})  # fmt: skip
    with pytest.raises(ollama.ResponseError) as caught:
        with_key.chat("llama3", MESSAGES)
    assert caught.value.status_code == 404 and "'llama3' does not exist" in caught.value.error
    for call, status in ((lambda: client.pull("llama3"), 404), (lambda: client.delete("toy"), 501)):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == status
    assert server.http.get("/api/nowhere").json().keys() == {"error"}
    assert guarded.http.get("/api/tags").json().keys() == {"error"}
    assert with_key.list().models


@with_two()
def test_a_body_without_its_type_is_taken_but_not_from_a_web_page(server):
    body = json.dumps({"messages": MESSAGES, "stream": False, "options": {"num_predict": 3}})
    assert server.http.post("/api/chat", content=body).status_code == 200
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert server.http.post("/api/chat", content=body, headers=form).status_code == 200
    for page in ({"origin": "http://a"}, {"sec-fetch-site": "cross-site"}):
        answer = server.http.post("/api/chat", content=body, headers=page)
        assert answer.status_code == 415 and answer.json().keys() == {"error"}
    assert server.http.post("/v1/chat/completions", content=body).status_code == 415


def test_more_tokens_than_the_context_has_are_cut(server):
    options = {"num_predict": 10**6, "temperature": 0, "seed": 0}
    body = {"model": "toy", "prompt": "x" * 4000, "raw": True, "stream": False, "options": options}
    answer = server.post("/api/generate", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["eval_count"] <= 96


@pytest.mark.parametrize("name", ["toy", "toy:latest"])
def test_the_served_model_is_pulled_at_once(server, client, name):
    assert client.pull(name).status == "success"
    assert [one.status for one in client.pull(name, stream=True)] == ["success"]
    assert server.post("/api/pull", {}).status_code == 400
    other = server.post("/api/pull", {"model": "llama3"})
    assert other.status_code == 404 and "models are not added or removed" in other.json()["error"]


@pytest.mark.parametrize(
    ("model", "number", "weights", "size"),
    [
        ("org/name:Q4_K_M", "", 134_515_008, ("gguf", "134.5M", "Q4_K_M")),
        ("/a/b.q8_0.gguf", "", 8_030_261_248, ("gguf", "8.0B", "Q8_0")),
        ("org/name", "bfloat16", 0, ("safetensors", "", "BF16")),
        ("/a/folder", "", 1500, ("safetensors", "1.5K", "")),
        *(
            ("org/name", f"weights {words}, activations 8 bits in groups of 32", 1, size)
            for words, size in [
                ("Q4_1 as in the file", ("gguf", "1", "Q4_1")),
                ("Q4_K, Q6_K as in the file, IQ2_S made q8_0", ("gguf", "1", "Q4_K")),
                ("bfloat16, float32 made q8_0", ("safetensors", "1", "Q8_0")),
                ("float16 as in the file", ("safetensors", "1", "F16")),
            ]
        ),
    ],
)
def test_details_of_a_model(model, number, weights, size):
    info = {"family": "llama", "parameters": weights, "executor": {"dtype": number}}
    loaded = SimpleNamespace(config=SimpleNamespace(model=model), info=info, name="name")
    details = _details(SimpleNamespace(loaded=loaded))
    assert (details["format"], details["parameter_size"], details["quantization_level"]) == size
    assert details["family"] == "llama"
