"""The first space of an answer, where vocabularies put one before every text (SentencePiece)."""

import json
from itertools import pairwise

import pytest

from forerun.options.config import EngineConfig
from tests.models import tiny
from tests.text.vocabularies import SMALL
from tests.worlds.toy_app import toy_client

NO = {"regex": "( no){2}"}
CHAT = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 9}


@pytest.fixture(scope="module", params=["prepend", "first", "byte-level"])
def client(request, tmp_path_factory):
    spec = SMALL[request.param]
    vocab = len(spec["model"]["vocab"])
    folder = tmp_path_factory.mktemp("spaced")
    tiny.save_folder(tiny.model("llama", vocab_size=vocab), folder)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    config = EngineConfig(model=str(folder), kv_tokens=1024)
    with toy_client(config=config) as client:
        yield client


def text(client, path, body, *keys):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    value = answer.json()
    for key in keys:
        value = value[key]
    return value


def test_a_continuation_keeps_it(client):
    body = {"prompt": "a b", "max_tokens": 9} | NO
    where = ("choices", 0, "text")
    assert text(client, "/v1/completions", body, *where) == " no no"
    assert text(client, "/v1/completions", body | {"echo": True}, *where) == "a b no no"
    ids = text(client, "/tokenize", {"prompt": "a b"}, "tokens")
    assert text(client, "/v1/completions", body | {"prompt": ids}, *where) == " no no"
    stopped = text(client, "/v1/completions", body | {"stop": " no"}, "choices", 0)
    assert (stopped["text"], stopped["stop_reason"]) == ("", " no")
    sampling = {"max_new_tokens": 9, "regex": NO["regex"]}
    body = {"text": "a b", "sampling_params": sampling}
    assert text(client, "/generate", body, "text") == " no no"
    gbnf = {"prompt": "a b", "n_predict": 9, "grammar": 'root ::= " no" " no"'}
    assert text(client, "/completion", gbnf, "content") == " no no"


def test_offsets_of_an_echoed_prompt_are_places_in_the_text(client):
    body = {"prompt": "a b", "max_tokens": 9, "echo": True, "logprobs": 1} | NO
    choice = text(client, "/v1/completions", body, "choices", 0)
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    pieces = [choice["text"][a:b] for a, b in pairwise([*offsets, len(choice["text"])])]
    assert "".join(pieces) == "a b no no" and offsets[0] == 0
    first = next(index for index, piece in enumerate(pieces) if piece)
    assert tokens[first].lstrip(" ") == pieces[first]
    assert all(
        piece == token
        for piece, token in zip(pieces[first + 1 :], tokens[first + 1 :], strict=True)
        if piece
    )


def test_a_message_that_goes_on_keeps_it(client):
    begun = [*CHAT["messages"], {"role": "assistant", "content": "yes"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    body = CHAT | NO | {"messages": begun} | more
    where = ("choices", 0, "message", "content")
    assert text(client, "/v1/chat/completions", body, *where) == " no no"


def test_what_a_grammar_asks_for_is_whole(client):
    where = ("choices", 0, "message", "content")
    assert text(client, "/v1/chat/completions", CHAT | NO, *where) == " no no"


def test_an_answer_of_its_own_begins_without_one(client):
    """Mistral writes a space before the first word of every answer."""
    no = text(client, "/tokenize", {"prompt": "x no", "add_special_tokens": False}, "tokens")[-1]
    body = CHAT | {"logit_bias": {str(no): 100}, "max_tokens": 2, "temperature": 0}
    content = text(client, "/v1/chat/completions", body, "choices", 0, "message", "content")
    byte_level = client.post("/detokenize", json={"tokens": [no]}).json()["prompt"] == " no"
    assert content == (" no no" if byte_level else "no no")
