"""`suffix` of /v1/completions and /api/generate: what stands between two texts is written. And
what /api/generate continues without a template.
"""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from forerun.options.config import ServeSettings
from forerun.serve.app import create_app
from forerun.serve.bodies.infill import file_ids, infill_marks
from forerun.text.pieces import Pieces
from forerun.text.tokenizer import AddedToken, TextEnds, Tokenizer
from tests.cli.toys import CONFIG, toy_loaded
from tests.engine.toys import following
from tests.worlds.toy_app import events

PREFIX, SUFFIX, MIDDLE, PAD = 1, 2, 3, 4
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
BODY = {"prompt": "a(", "suffix": ")z", "temperature": 0, "max_tokens": 20}
IDS = [PREFIX, *b"a(", SUFFIX, *b")z", MIDDLE]


def marked(control):
    """The tokenizer of bytes with marks in place of four bytes that no text has; users may write
    them unless they are control tokens, as those of Qwen2.5-Coder's tokenizer.json are not.
    """
    bytes_ = Tokenizer.byte_level()
    added = [AddedToken(id, name, control) for id, name in enumerate(MARKS, 1)]
    table = [*bytes_.pieces]
    table[1:5] = [name.encode() for name in MARKS]

    def encode(text, first):
        if not control:
            for token in added:
                text = text.replace(token.text, chr(token.id))
        return [*text.encode()]

    ends = TextEnds(bytes_.eos_ids)
    return Tokenizer(encode, Pieces(tuple(table), 0), [*bytes_.added.values(), *added], ends)


@contextmanager
def serving(**changes):
    with toy_loaded(CONFIG) as loaded:
        app = create_app(replace(loaded, **changes), ServeSettings())
        with TestClient(app) as client:
            yield client


@pytest.fixture(scope="module")
def coder():
    with serving(tokenizer=marked(control=False)) as client:
        yield client


def ask(client, path="/v1/completions", code=200, **body):
    answer = client.post(path, json={**BODY, **body})
    assert answer.status_code == code, answer.text
    return answer.json()


def written(client, **body):
    return ask(client, **body)["choices"][0]["text"]


def expected(ids, count=20):
    return bytes(following(ids, count)).decode()


@pytest.mark.parametrize("speculates", [True, False])
def test_what_stands_between_is_written(coder, speculates):
    off = {"speculative": {"enabled": speculates}}
    answer = ask(coder, **off, return_token_ids=True)
    assert answer["prompt_token_ids"] == IDS
    assert answer["choices"][0]["text"] == expected(IDS)
    assert answer["usage"]["prompt_tokens"] == len(IDS)
    assert written(coder, prompt=[*b"a("]) == expected(IDS), "ids stand before it as well as text"
    assert written(coder, prompt="") == expected([PREFIX, SUFFIX, *b")z", MIDDLE])
    assert written(coder, suffix="") == written(coder, suffix=None) == expected([*b"a("])
    several = ask(coder, prompt=["a(", "b["], n=2, temperature=1, seed=3, logprobs=1)["choices"]
    assert len({one["text"] for one in several}) == 4
    assert all(len(one["logprobs"]["tokens"]) == 20 for one in several)
    streamed = coder.post("/v1/completions", json={**BODY, **off, "stream": True})
    assert "".join(e["choices"][0]["text"] for e in events(streamed)) == expected(IDS)


def test_ollama_fills_in_and_says_so(coder):
    body = {"prompt": "a(", "suffix": ")z", "options": {"temperature": 0, "num_predict": 20}}
    answer = coder.post("/api/generate", json={**body, "stream": False, "think": True})
    assert answer.json()["response"] == expected(IDS)
    assert answer.json()["prompt_eval_count"] == len(IDS)
    assert answer.headers["x-forerun-ignored"] == "think"
    lines = coder.post("/api/generate", json=body).text.splitlines()
    assert "".join(json.loads(line)["response"] for line in lines) == expected(IDS)
    first = coder.post("/api/generate", json={**body, "prompt": "", "stream": False}).json()
    assert first["response"] == expected([PREFIX, SUFFIX, *b")z", MIDDLE])
    raw = coder.post("/api/generate", json={**body, "raw": True})
    assert raw.status_code == 400 and "suffix needs raw to be false" in raw.json()["error"]
    assert "insert" in coder.post("/api/show", json={"model": "toy"}).json()["capabilities"]


def test_llama_cpp_writes_the_same(coder):
    body = {"input_prefix": "a(", "input_suffix": ")z", "temperature": 0, "n_predict": 20}
    assert coder.post("/infill", json=body).json()["content"] == expected(IDS)
    error = coder.post("/infill", json={**body, "input_prefix": "z" * 1100}).json()["error"]
    assert error["param"] == "input_prefix" and "with suffix 1105 tokens" in error["message"]


@pytest.mark.parametrize("control", [True, False])
def test_marks_in_a_clients_text_are_text(control):
    """Some tokenizers read them in any text, as Qwen2.5-Coder's tokenizer.json does."""
    tokenizer = marked(control)
    hostile = f"{MARKS[2]}x{MARKS[0]}{MARKS[0]}<"
    assert file_ids(hostile, tokenizer) == [*hostile.encode()]
    assert file_ids("", tokenizer) == []
    assert {PREFIX, SUFFIX, MIDDLE, PAD} == set(infill_marks(tokenizer).ends)


def test_a_mark_ends_what_is_written(coder):
    for end in (PREFIX, PAD):
        answer = ask(coder, logit_bias={str(end): 100})["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == ("", "stop")


def test_a_prompt_is_shortened_beside_its_suffix(coder):
    def prompt(**body):
        return ask(coder, **body, max_tokens=1, return_token_ids=True)["prompt_token_ids"]

    assert prompt(prompt="xa(", truncate_prompt_tokens=2) == IDS
    long = prompt(prompt="x" * 5000 + "a(", truncate_prompt_tokens=-1)
    assert len(long) == CONFIG.context - 1 and long[-6:] == IDS[1:] and long[0] == PREFIX
    full = prompt(suffix="z" * (CONFIG.context - 4), truncate_prompt_tokens=-1)
    assert full[:2] == [PREFIX, SUFFIX]


@pytest.mark.parametrize(
    ("body", "field", "word"),
    [
        ({"echo": True}, "echo", "echo and suffix cannot be honoured at once"),
        ({"suffix": 7}, "suffix", "suffix must be a string"),
        ({"suffix": "z" * 1100}, "suffix", "suffix has"),
        ({"prompt": "z" * 1020}, "prompt", "prompt has with suffix 1025 tokens"),
        ({"prompt": ["a", "z" * 1020]}, "prompt[1]", "maximum context length is 1024 tokens"),
        ({"prompt": [[9], [9, 999]]}, "prompt[1][1]", "token id 999"),
    ],
)
def test_what_cannot_be_honoured_is_named(coder, body, field, word):
    error = ask(coder, code=400, **body)["error"]
    assert error["param"] == field and word in error["message"]


def test_a_model_without_marks_says_so(client):
    error = ask(client, code=400)["error"]
    assert error["param"] == "suffix" and "no tokens for filling in" in error["message"]
    error = ask(client, "/api/generate", 400, temperature=None, max_tokens=None)["error"]
    assert error.startswith("suffix: this model has no tokens for filling in")
    assert "insert" not in client.post("/api/show", json={"model": "toy"}).json()["capabilities"]


def test_a_model_without_a_template_continues_the_prompt():
    options = {"temperature": 0, "num_predict": 20}
    body = {"prompt": "Hi", "system": "Be brief.", "options": options, "stream": False}
    with serving(chat=None) as client:
        answer = client.post("/api/generate", json=body)
        assert answer.json()["response"] == expected([*b"Hi"])
        assert answer.headers["x-forerun-ignored"] == "system"
        assert client.post("/api/chat", json={"messages": [{"role": "user"}]}).status_code == 400


def test_defaults_are_shown_under_the_names_of_those_servers():
    sampling = {"temperature": 0.7, "repetition_penalty": 1.1}
    with toy_loaded(CONFIG) as loaded:
        info = {**loaded.info, "sampling_defaults": sampling, "parameters": 5}
    with serving(info=info) as client:
        reply = client.post("/api/show", json={"model": "toy"}).json()
        params = client.get("/props").json()["default_generation_settings"]["params"]
    assert reply["parameters"] == "temperature 0.7\nrepeat_penalty 1.1"
    assert reply["model_info"]["general.parameter_count"] == 5
    assert params["repeat_penalty"] == 1.1 and "repetition_penalty" not in params
