"""Whatever is sent, the answer is an error that names the culprit, and the next request works."""

import json
import socket
from contextlib import suppress

import httpx
import pytest

from tests.worlds.servers import PATIENCE, read_until, request_bytes, serving, sound, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
LIMIT = 65536


TWO = pytest.param(["toy", "other"], marks=pytest.mark.slow)
"""What one of two says of a bad body is in tests/dialects always."""


@pytest.fixture(scope="module", params=[None, TWO], ids=["one", "two"])
def server(request, tmp_path_factory):
    """A server of one model, or of two with one loaded."""
    given = {"settings": {"max_body_bytes": LIMIT}, "models": request.param}
    with sound(tmp_path_factory.mktemp("bad"), **given) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """One whose clients have a second for a body, which on a loaded machine others need, too."""
    with sound(tmp_path_factory.mktemp("hasty"), settings={"send_seconds": 1.0}) as server:
        yield server


@pytest.fixture(autouse=True)
def next_request_answers(server):
    yield
    answer = server.complete(max_tokens=5)
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "djell")
    load = server.load()
    assert (load["running"], load["waiting"], load["pages_held"]) == (0, 0, 0)


def error_of(answer, status):
    """The error body, its shape checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert "Traceback" not in answer.text
    return body["error"]


def raw(server, data, path=COMPLETIONS, **headers):
    """Post bytes as they are."""
    headers = {"content-type": "application/json", **headers}
    return server.http.post(path, content=data, headers=headers)


BODIES = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"nonsense", "invalid_json"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
    (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json"),
    (b'{"prompt": "\xff\xfe"}', "invalid_json"),
    (b"[" * 30_000 + b"]" * 30_000, "invalid_json"),
    (b'{"prompt": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}", "invalid_json"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
    (b'{"prompt": "a", "temperature": 1e999}', "invalid_json"),
    (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', "invalid_json"),
    (b'{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "invalid_json"),
    (b"[]", "invalid_value"),
    (b'"text"', "invalid_value"),
    (b"null", "invalid_value"),
]


@pytest.mark.parametrize(("data", "code"), BODIES, ids=range(len(BODIES)))
def test_bodies_that_are_no_request(server, data, code):
    assert error_of(raw(server, data), 400)["code"] == code


FIELDS = [
    ("tempratur", 1, "tempratur"),
    ("temperature", "hot", "temperature"),
    ("temperature", 2.5, "temperature"),
    ("temperature", -1, "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", 1.5, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("min_p", -0.1, "min_p"),
    ("n", 0, "n"),
    ("n", 1_000_000_000, "n"),
    ("n", 17, "n"),
    ("n", 10**30, "n"),
    ("max_tokens", -2, "max_tokens"),
    ("min_tokens", 100, "min_tokens"),
    ("seed", 2**63, "seed"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("frequency_penalty", 3, "frequency_penalty"),
    ("logit_bias", {"a": 1}, "logit_bias"),
    ("logit_bias", {"5": 101}, "logit_bias.5"),
    ("logit_bias", {"259": 1}, "logit_bias"),
    ("logit_bias", {str(i): 1 for i in range(2000)}, "logit_bias"),
    ("stop", [""], "stop[0]"),
    ("stop", ["x"] * 17, "stop"),
    ("stop", ["x", 5], "stop[1]"),
    ("stop", "x" * 1025, "stop"),
    ("stop_token_ids", [259], "stop_token_ids"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", True, "logprobs"),
    ("best_of", 2, "best_of"),
    ("suffix", "end", "suffix"),
    ("use_beam_search", True, "use_beam_search"),
    ("guided_json", 5, "guided_json"),
    ("guided_json", "{", "guided_json"),
    ("regex", "(Paris|Amsterdam}", "regex"),
    ("regex", "(?=a)", "regex"),
    ("ebnf", "root ::= (", "ebnf"),
    ("grammar", 'start: "a" | b', "grammar"),
    (
        "response_format",
        {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "strict": True,
                "schema": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            },
        },
        "response_format.json_schema.schema",
    ),
    ("json_schema", {"type": "object", "const": 1}, "json_schema"),
    ("response_format", "json", "response_format"),
    ("response_format", {"type": "yaml"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {}},
        "response_format.json_schema.schema",
    ),
    ("structured_outputs", {}, "structured_outputs"),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}, "structured_outputs.choice"),
    ("structured_outputs", {"choice": ["a", ""]}, "structured_outputs.choice"),
    ("structured_outputs", {"choices": ["a"]}, "structured_outputs.choices"),
    ("structured_outputs", {"whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
    (
        "structured_outputs",
        {"structural_tag": "{}"},
        "structured_outputs.structural_tag.structures",
    ),
    ("speculative", {"max_node": 3}, "speculative.max_node"),
    ("speculative", {"enabled": "no"}, "speculative.enabled"),
    ("speculative", {"max_nodes": -1}, "speculative.max_nodes"),
    ("speculative", 3, "speculative"),
    ("prompt", [], "prompt"),
    ("prompt", "", "prompt"),
    ("prompt", 5, "prompt"),
    ("prompt", [[]], "prompt[0]"),
    ("prompt", ["a", 5], "prompt[1]"),
    ("prompt", [1, "a"], "prompt[1]"),
    ("prompt", [259], "prompt[0]"),
    ("prompt", [[1], [2, 259]], "prompt[1][1]"),
    ("prompt", ["a", "b" * 5000], "prompt[1]"),
    ("prompt", [-1], "prompt[0]"),
    ("prompt", [10**20], "prompt[0]"),
    ("prompt", [True], "prompt[0]"),
    ("prompt", ["a"] * 257, "prompt"),
]


@pytest.mark.parametrize(("name", "value", "param"), FIELDS, ids=range(len(FIELDS)))
def test_fields_of_completions(server, name, value, param):
    error = error_of(server.complete(**{name: value}), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.split(".")[0].split("[")[0] in error["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "http://example/a.png"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def with_parameters(schema):
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}


CHAT_FIELDS = [
    ("messages", [], "messages"),
    ("messages", "Hi", "messages"),
    ("messages", None, "messages"),
    ("messages", ["Hi"], "messages[0]"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"content": "a"}], "messages[0].role"),
    ("messages", [{"role": "wizard", "content": "a"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [IMAGE]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": "a", "mood": 1}], "messages[0].mood"),
    ("messages", [{}] * 4097, "messages"),
    ("tools", [{"type": "function"}], "tools[0].function"),
    ("tools", [{"type": "retrieval"}], "tools[0].type"),
    ("tools", [TOOL, TOOL], "tools[1].function.name"),
    ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
    ("tools", [with_parameters({"type": "what"})], "tools[0].function.parameters"),
    ("tools", [with_parameters([])], "tools[0].function.parameters"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", "perhaps", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
    ("functions", [{}], "functions"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        "messages[0].tool_calls[0].function",
    ),
    ("store", "yes", "store"),
    ("metadata", "a", "metadata"),
    ("modalities", ["text", "audio"], "modalities"),
    ("top_logprobs", 3, "top_logprobs"),
    ("max_tokens", 0, "max_tokens"),
    ("max_completion_tokens", 5, "max_tokens"),
    ("echo", True, "echo"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs"),
    ("chat_template_kwargs", {str(i): 1 for i in range(65)}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("name", "value", "param"), CHAT_FIELDS, ids=range(len(CHAT_FIELDS)))
def test_fields_of_chat(server, name, value, param):
    error = error_of(server.post(CHAT, {**HELLO, name: value}), 400)
    assert error["param"] == param


HARMLESS = [
    {"user": "u1", "safety_identifier": "u1", "prompt_cache_key": "k"},
    {"store": False},
    {"tools": [], "tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"modalities": ["text"]},
    {"temperature": None, "stop": None, "audio": None, "logit_bias": None},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    {"messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]},
    {"messages": [{"role": "assistant", "content": "a", "tool_calls": None, "refusal": None}]},
    {"top_p": 0, "top_k": -1, "temperature": 1e-30},
]


@pytest.mark.parametrize("extra", HARMLESS, ids=range(len(HARMLESS)))
def test_what_changes_nothing_is_accepted(server, extra):
    assert server.post(CHAT, {**HELLO, **extra}).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        rb'{"prompt": "a\ud800"}',
        rb'{"prompt": ["a", "\udfff"]}',
        rb'{"prompt": "a", "stop": "\ud800"}',
        rb'{"prompt": "a", "user": "\ud800"}',
        rb'{"prompt": "a", "\ud800": 1}',
        rb'{"prompt": "a", "model": "\ud800"}',
    ],
)
def test_lone_surrogates(server, data):
    error = error_of(raw(server, data), 400)
    assert error["param"]


def test_lone_surrogates_in_chat(server):
    data = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
    assert error_of(raw(server, data, CHAT), 400)["param"] == "messages[0].content"
    data = rb'{"messages": [{"role":"user","content":""}], "chat_template_kwargs":{"a": "\udead"}}'
    assert error_of(raw(server, data, CHAT), 400)["param"].startswith("chat_template_kwargs")


def test_longer_than_the_context(server):
    for body in ({"prompt": "a" * 4097}, {"prompt": [97] * 4097}, {"prompt": "a" * 4096}):
        error = error_of(server.complete(**body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    error = error_of(server.complete(max_tokens=4095), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert server.complete(max_tokens=10**9).status_code == 400
    long = {"messages": [{"role": "user", "content": "a" * 5000}]}
    assert error_of(server.post(CHAT, long), 400)["code"] == "context_length_exceeded"


def test_too_many_log_probabilities(server):
    error = error_of(server.complete(logprobs=20, n=16, max_tokens=4000), 400)
    assert error["param"] == "logprobs"


def test_unknown_model_path_and_method(server):
    assert error_of(server.http.get("/v2/nothing%0Ahere"), 404)["code"] == "unknown_url"
    assert error_of(server.http.get("/v1/models/a/b"), 404)["code"] == "model_not_found"
    answer = server.http.get(CHAT)
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"


def test_only_json_is_read(server):
    """A web page may post text/plain to this machine without asking; it must not get through."""
    data = json.dumps({"prompt": "a"})
    for headers in ({"content-type": "text/plain"}, {}):
        answer = server.http.post(COMPLETIONS, content=data, headers=headers)
        error_of(answer, 415)
    for coding in ("gzip", "zstd", "identity, br"):
        answer = raw(server, data.encode(), **{"content-encoding": coding})
        assert f"'{coding}' is not supported; send plain JSON" in error_of(answer, 415)["message"]
    assert raw(server, data.encode(), **{"content-encoding": "identity"}).status_code == 200
    typed = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.http.post(COMPLETIONS, content=data, headers=typed).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_refused_while_they_come(server, chunked):
    piece = b" " * 16384
    count = LIMIT * 8 // len(piece)
    content = (piece for _ in range(count)) if chunked else piece * count
    answer = raw(server, content)
    assert error_of(answer, 413)["code"] == "body_too_large"
    assert "connection" not in answer.headers  # All of it was read: the next request may follow.
    fits = b" " * (LIMIT - 20) + b'{"prompt": "a"}'
    assert raw(server, fits).status_code == 200


def test_a_body_of_64_megabytes_is_cut_off(server):
    """More than can sensibly be discarded: the connection ends, in whichever way."""
    with suppress(httpx.TransportError):
        error_of(raw(server, b" " * (64 << 20)), 413)
    assert server.http.get("/health").status_code == 200


def test_a_body_that_stops_arriving(hasty):
    with hasty.connect() as sock:
        sock.sendall(request_bytes(COMPLETIONS, b'{"prompt"', content_length=100))
        assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 408")


def test_a_body_that_drips(hasty):
    """It is not silent, but it will not end."""
    with hasty.connect() as sock:
        sock.sendall(request_bytes(COMPLETIONS, b'{"prompt": "', content_length=1000))
        sock.settimeout(0.05)
        answer = b""
        while not answer:
            sock.sendall(b"a")
            with suppress(TimeoutError):
                answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408")
        sock.settimeout(PATIENCE)
        for _ in range(3):  # What still comes must not cost the answer.
            sock.sendall(b"a" * 100)
        if b"timeout" not in answer:
            answer += read_until(sock, b"timeout")
        assert b"did not arrive within 1 s" in answer


def test_many_large_bodies_at_once(tmp_path):
    """One client's may hold half of the room; others are heard beside it."""
    with serving(tmp_path, settings={"max_body_bytes": LIMIT}) as server:
        _many_large_bodies(server)
        assert wait_for(lambda: raw(server, b" " * LIMIT).status_code == 400)


def _many_large_bodies(server):
    part = b" " * (LIMIT - 1)
    head = request_bytes(COMPLETIONS, part, content_length=LIMIT)
    socks = [server.connect() for _ in range(16)]
    try:
        for sock in socks:
            sock.sendall(head)
        refusal = []

        def refused():
            refusal[:] = [raw(server, b" " * 32 + part[32:])]
            return refusal[0].status_code == 429

        assert wait_for(refused)
        assert error_of(refusal[0], 429)["code"] == "too_many_bodies"
        with socket.socket() as other:
            other.settimeout(PATIENCE)
            other.bind(("127.0.0.2", 0))
            other.connect(server.address)
            other.sendall(head + b" ")
            assert read_until(other, b"\r\n").startswith(b"HTTP/1.1 400")
    finally:
        for sock in socks:
            sock.close()


def test_a_client_that_leaves_amid_its_body(server):
    with server.connect() as sock:
        sock.sendall(request_bytes(COMPLETIONS, b'{"prompt"', content_length=100))
    assert wait_for(lambda: "the client is gone" in server.logged())


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("key"), settings={"api_keys": ["sesame"]}) as server:
        yield server


@pytest.mark.parametrize("length", [{"transfer_encoding": "chunked"}, {"content_length": 1 << 20}])
def test_the_key_is_looked_at_before_the_body(guarded, length):
    """And the connection ends, rather than that all of it is read."""
    with guarded.connect() as sock:
        sock.sendall(request_bytes(COMPLETIONS, b"", **{"content_length": None, **length}))
        head = read_until(sock, b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401") and b"connection: close" in head
        with suppress(OSError):
            while True:  # Until it ends.
                sock.sendall(b"1\r\nx\r\n" * 1000)


def test_a_small_body_that_is_not_wanted_ends_no_connection(guarded):
    with guarded.connect() as sock:
        for _ in range(3):
            sock.sendall(request_bytes(COMPLETIONS, {"prompt": "a"}))
            answer = read_until(sock, b"}}")
            assert answer.startswith(b"HTTP/1.1 401") and b"connection: close" not in answer


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /version HTTP/2.0\r\nHost: x\r\n\r\n", b"505"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 300 + b"\r\n", b"431"),
        (b"GET /version HTTP/1.0\r\n\r\n", b"200"),
        (b"\x16\x03\x01\x02\x00 nonsense\r\n\r\n", b"400"),
        (
            request_bytes(COMPLETIONS, b"", content_length=LIMIT + 1, expect="100-continue"),
            b"413",
        ),
    ],
    ids=["version", "many headers", "old", "no HTTP", "expect"],
)
def test_heads_that_are_answered_at_once(server, head, status):
    with server.connect() as sock:
        sock.sendall(head)
        assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 " + status)


def test_request_ids_are_harmless(server):
    echoed = server.http.get("/version", headers={"x-request-id": "a.b-c_1"})
    assert echoed.headers["x-request-id"] == "a.b-c_1"
    for bad in ("x" * 129, "a b", "<script>"):
        other = server.http.get("/version", headers={"x-request-id": bad})
        assert other.headers["x-request-id"] != bad


def test_nothing_said_reaches_the_log(server):
    server.complete(prompt="a secret word", max_tokens=3)
    body = {**HELLO, "messages": [{"role": "user", "content": "secret"}], "secret": 1}
    assert server.post(CHAT, body).status_code == 400
    assert "secret" not in server.logged()


OFF = "off: the request disables speculation"
BOUND = "limited by the request"
ENDS = "limited: the answer ends there, or the step or the page pool is full"


def test_server_info(server):
    server.complete(max_tokens=60)
    info = server.http.get("/server_info").json()
    assert info["config"]["speculative_algorithm"] == "NGRAM"
    assert info["executor"]["executor"] == "toy"
    assert info["drafter"]["drafter"] == "ngram"
    assert info["settings"]["max_body_bytes"] == LIMIT
    # Why the last rows got the draft tokens they got.
    (granted,) = info["stats"]["load"]["granted"]
    assert granted["reason"] in ("fixed by the configuration", ENDS)
    unbound = {"min_prob": 0.0, "model_depth": 0, "pass_prob": 0.0}
    for draft_request, allowed in (
        ({"enabled": False}, {"nodes": 0, "depth": 0, "reason": OFF}),
        ({"max_nodes": 0}, {"nodes": 0, "depth": 0, "reason": BOUND}),
        ({"max_depth": 1}, {"nodes": 8, "depth": 1, "model_depth": 1, "reason": BOUND}),
    ):
        server.complete(max_tokens=9, speculative=draft_request, stop="e")
        assert server.load()["granted"] == [unbound | allowed]


def test_tokenize_and_detokenize(server):
    answer = server.post("/tokenize", {"prompt": "Hé", "return_token_strs": True}).json()
    assert answer["tokens"] == [72, 0xC3, 0xA9]
    assert answer["token_strs"] == ["H", "bytes:\\xc3", "bytes:\\xa9"]
    assert (answer["count"], answer["max_model_len"]) == (3, 4096)
    back = server.post("/detokenize", {"tokens": [*answer["tokens"], 257]}).json()
    assert back["prompt"] == "Hé<|im_end|>"
    chat = server.post("/tokenize", {"messages": HELLO["messages"]}).json()["tokens"]
    assert (chat[0], chat.count(256)) == (256, 2)
    bare = {"messages": HELLO["messages"], "add_generation_prompt": False}
    assert server.post("/tokenize", bare).json()["tokens"] == chat[: chat.index(256, 1)]
    for body in ({}, {"prompt": "a", "messages": HELLO["messages"]}):
        assert error_of(server.post("/tokenize", body), 400)["param"] == "prompt"
    assert error_of(server.post("/detokenize", {"tokens": [5, 300]}), 400)["param"] == "tokens[1]"
    assert server.post("/detokenize", {"tokens": [97] * 5000}).json()["prompt"] == "a" * 5000
    assert error_of(server.post("/detokenize", {}), 400)["param"] == "tokens"
