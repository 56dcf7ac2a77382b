"""Embeddings of all dialects: the toy's last hidden state, computed by hand."""

import base64

import numpy as np
import pytest

from tests.dialects.requests import with_two
from tests.lazy import LazyModule

openai, ollama = LazyModule("openai"), LazyModule("ollama")
TEXTS = ["Hi", "A longer text, read in one step.", "Hi"]


def expected(text, length=True, dimensions=4):
    """The toy's last hidden state of a text, as its docstring has it."""
    last, before = (list(text.encode()) * 2)[-1], (0, *text.encode())[-2]
    vector = np.array([256, last, before, sum(text.encode()) % 256])[:dimensions] / 256
    return vector / np.linalg.norm(vector) if length else vector


@with_two()
def test_openai(server):
    client = openai.OpenAI(base_url=f"{server.root}/v1", api_key="x", max_retries=0)
    answer = client.embeddings.create(model="toy", input=TEXTS)
    for text, one in zip(TEXTS, answer.data, strict=True):
        np.testing.assert_allclose(one.embedding, expected(text), rtol=1e-6)
    assert [one.index for one in answer.data] == [0, 1, 2]
    total = sum(map(len, TEXTS))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (total, total)
    ids = [list(text.encode()) for text in TEXTS]
    as_floats = client.embeddings.create(model="toy", input=ids, encoding_format="float")
    assert [o.embedding for o in as_floats.data] == [o.embedding for o in answer.data]
    single = client.embeddings.create(model="toy", input=ids[1], dimensions=2)
    np.testing.assert_allclose(single.data[0].embedding, expected(TEXTS[1], dimensions=2), 1e-6)
    bare = openai.OpenAI(base_url=server.root, api_key="x", max_retries=0)
    one = bare.embeddings.create(model="toy", input="Hi").data[0]
    assert one.embedding == answer.data[0].embedding


def test_openai_as_it_is_sent(server):
    body = {"input": "Hi", "model": "toy", "encoding_format": "base64", "user": "me"}
    one = server.post("/v1/embeddings", body).json()
    assert (one["object"], one["model"], one["data"][0]["object"]) == ("list", "toy", "embedding")
    packed = np.frombuffer(base64.b64decode(one["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(packed, expected("Hi"), rtol=1e-6)
    raw = server.post("/v1/embeddings", {"input": "Hi", "normalize": False}).json()
    np.testing.assert_allclose(raw["data"][0]["embedding"], expected("Hi", length=False))


def test_more_inputs_than_are_in_flight(server):
    texts = [f"{n}" for n in range(300)]
    data = server.post("/v1/embeddings", {"input": texts}).json()["data"]
    actual = np.array([one["embedding"] for one in data])
    np.testing.assert_allclose(actual, [expected(text) for text in texts], rtol=1e-6)


@with_two()
def test_ollama(server):
    client = ollama.Client(server.root, trust_env=False)
    answer = client.embed("toy:latest", TEXTS)
    np.testing.assert_allclose(answer.embeddings, [expected(text) for text in TEXTS], rtol=1e-6)
    assert answer.prompt_eval_count == sum(map(len, TEXTS)) and answer.total_duration > 0
    cut = client.embed("toy", "Hi", dimensions=2, options={"num_ctx": 9}, keep_alive="5m")
    np.testing.assert_allclose(cut.embeddings, [expected("Hi", dimensions=2)], rtol=1e-6)
    old = client.embeddings("toy", "Hi")
    np.testing.assert_allclose(old.embedding, expected("Hi", length=False))
    assert client.embed("toy", "").embeddings == client.embeddings("toy", "").embedding == []


def test_ollama_cuts_to_the_context_and_others_refuse(server):
    long = "x" * 4095 + "yz" * 9
    reply = server.post("/api/embed", {"input": long}).json()
    np.testing.assert_allclose(reply["embeddings"][0], expected(long[:4096]), rtol=1e-6)
    for path, body in (
        ("/api/embed", {"input": ["a", long], "truncate": False}),
        ("/v1/embeddings", {"input": ["a", long]}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400 and "input[1] has" in answer.text, path
    fields = {"input": long, "truncate_prompt_tokens": 7}
    reply = server.post("/v1/embeddings", fields).json()["data"][0]["embedding"]
    np.testing.assert_allclose(reply, expected(long[-7:]), rtol=1e-6)


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_llama_cpp(server, path):
    reply = server.post(path, {"content": TEXTS}).json()
    assert [one["index"] for one in reply] == [0, 1, 2]
    for text, one in zip(TEXTS, reply, strict=True):
        np.testing.assert_allclose(one["embedding"], [expected(text)], rtol=1e-6)
    raw = server.post(path, {"content": "Hi", "embd_normalize": -1}).json()
    np.testing.assert_allclose(raw[0]["embedding"][0], expected("Hi", length=False))


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/v1/embeddings", {}, "input is missing"),
        ("/v1/embeddings", {"input": ""}, "input is empty"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1] is empty"),
        ("/v1/embeddings", {"input": []}, "input must be a text"),
        ("/v1/embeddings", {"input": [[300]]}, "input[0] is the token id 300"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "2049 entries"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions is 5, but toy has 4"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"messages": []}, "input is missing"),
        ("/v1/embeddings", {"input": "a", "messages": [1]}, "put the text into input"),
        ("/embeddings", {"input": "a", "content": "a"}, "either input"),
        ("/embedding", {"content": "a", "embd_normalize": 1}, "embd_normalize"),
        ("/api/embed", {"input": 3}, "input must be"),
    ],
)
def test_what_cannot_be_honoured_is_named(server, path, body, word):
    answer = server.post(path, body)
    error = answer.json()["error"]
    text = error if isinstance(error, str) else error["message"]
    assert answer.status_code == 400 and word in text, answer.text


def test_scores_and_other_poolings_are_not_made(server):
    for path in ("/encode", "/pooling", "/rerank", "/v1/score", "/classify"):
        answer = server.post(path, {"input": "Hi"})
        assert answer.status_code == 501 and "makes embeddings" in answer.text
