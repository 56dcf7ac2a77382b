"""Fields of vLLM's and llama.cpp's that tell more of tokens, or forbid some; and what is sent to
say nothing.
"""

import json
from itertools import product

import pytest

from forerun.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.byte_level()
PATHS = ("/v1/chat/completions", "/v1/completions")
MESSAGES = [{"role": "user", "content": "Hi"}]


def ask(client, path, code=200, **body):
    base = {"messages": MESSAGES} if "chat" in path else {"prompt": "Hi"}
    answer = client.post(path, json={**base, "max_tokens": 24, "temperature": 0, **body})
    assert answer.status_code == code, answer.text
    return answer.json()


def text(answer):
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


NOTHING = {
    **dict.fromkeys(("anything", "suffix", "functions", "prediction", "allowed_token_ids")),
    **{"use_beam_search": False, "early_stopping": False, "length_penalty": 1.0, "vllm_xargs": {}},
    **{"logits_processors": [], "custom_params": {}, "bad_words": [], "lora": [], "n_discard": 0},
    **{"top_n_sigma": -1, "response_fields": []},
}


@pytest.mark.parametrize("path", PATHS)
def test_fields_that_request_nothing_are_never_refused(client, path):
    assert text(ask(client, path, **NOTHING)) == text(ask(client, path))


def test_what_chats_send_to_ask_nothing(client):
    chat = PATHS[0]
    fields = {"top_logprobs": 0, "n_probs": 0, "echo": False, "documents": []}
    fields["service_tier"] = "flex"
    fields |= dict.fromkeys(("grammar", "regex", "ebnf", "guided_grammar", "guided_regex"), "")
    fields["json_schema"] = ""
    assert text(ask(client, chat, **fields)) == text(ask(client, chat))
    assert "top_logprobs" in ask(client, chat, 400, top_logprobs=1)["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_bad_words_are_in_no_answer(client, path):
    plain = text(ask(client, path))
    word = plain[5:7]
    for options in ({}, {"speculative": {"enabled": False}}):
        answer = text(ask(client, path, bad_words=[word, plain[0]], **options))
        assert word not in answer and plain[0] not in answer and len(answer) >= 20
    refused = ask(client, path, 400, bad_words=["a"], json_schema={"type": "object"})
    assert "bad_words and json_schema cannot be honoured at once" in refused["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_only_allowed_tokens(client, path):
    ids = [ord(letter) for letter in "abc"]
    answer = ask(client, path, allowed_token_ids=ids, return_token_ids=True, max_tokens=60)
    choice = answer["choices"][0]
    assert set(choice["token_ids"]) <= set(ids) and len(choice["token_ids"]) == 60
    assert choice["finish_reason"] == "length"
    ended = ask(client, path, allowed_token_ids=[*TOKENIZER.eos_ids], return_token_ids=True)
    assert ended["choices"][0]["finish_reason"] == "stop" and not text(ended)
    for wrong in ([10**6], []):
        refused = ask(client, path, 400, allowed_token_ids=wrong)
        assert refused["error"]["param"] == "allowed_token_ids"


@pytest.mark.parametrize(("path", "name"), [*product(PATHS, ("cache_salt", "extra_key"))])
def test_a_cached_prefix_is_for_requests_of_its_salt(client, path, name):
    long = f"{name} on {path}: what every tenant's system prompt says, word for word"
    chat = "chat" in path
    prompt = {"messages": [{"role": "user", "content": long}]} if chat else {"prompt": long}

    def cached(**salt):
        usage = ask(client, path, **prompt, **salt)["usage"]
        return (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)

    alike = 16 * chat  # At most: what every chat begins with.
    assert cached() <= alike < cached()
    assert cached(**{name: "a"}) <= alike < cached(**{name: "a"})
    assert cached(**{name: "b"}) <= alike
    for wrong in ("", 7, ["a"]):
        assert ask(client, path, 400, **{name: wrong})["error"]["param"] == name


BACKENDS = ["xgrammar", "outlines", "auto", "guidance:no-fallback", "xgrammar:no-fallback,"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_guided_decoding_backend_is_this_one(client, path, backend):
    fields = {"guided_regex": "[ab]{4}", "guided_decoding_backend": backend}
    base = {"messages": MESSAGES} if "chat" in path else {"prompt": "Hi"}
    answer = client.post(path, json={**base, **fields, "max_tokens": 24, "temperature": 0})
    assert answer.headers["x-forerun-ignored"] == "guided_decoding_backend"
    assert text(answer.json()) == text(ask(client, path, guided_regex="[ab]{4}"))


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("disable-any-whitespace", "use structured_outputs.disable_any_whitespace"),
        ("no-additional-properties", "use structured_outputs.disable_additional_properties"),
        ("fast", "leave it out"),
    ],
)
def test_an_option_of_a_backend_that_changes_texts_says_what_to_use(client, option, instead):
    refused = ask(client, PATHS[0], 400, guided_decoding_backend=f"xgrammar:no-fallback,{option}")
    assert refused["error"]["param"] == "guided_decoding_backend"
    assert instead in refused["error"]["message"]


def test_biases_as_llama_cpp_writes_them(client):
    plain = text(ask(client, PATHS[1]))
    biased = text(ask(client, PATHS[1], logit_bias=[[ord(plain[0]), False]]))
    assert plain[0] not in biased
    same = ask(client, PATHS[1], logit_bias={str(ord(plain[0])): -100.0})
    assert text(ask(client, PATHS[1], logit_bias=[[ord(plain[0]), -100.0]])) == text(same)
    assert "logit_bias[0]" in ask(client, PATHS[1], 400, logit_bias=[[1]])["error"]["message"]


def test_log_probabilities_of_the_prompt(client):
    chat = ask(client, PATHS[0], prompt_logprobs=1, return_token_ids=True)
    logprobs, ids = chat["prompt_logprobs"], chat["prompt_token_ids"]
    assert logprobs[0] is None and len(logprobs) == len(ids)
    assert all(str(id) in entry for id, entry in zip(ids[1:], logprobs[1:], strict=True))
    plain = ask(client, PATHS[1], prompt_logprobs=2, logprobs=1)["choices"][0]
    echoed = ask(client, PATHS[1], echo=True, logprobs=2)["choices"][0]["logprobs"]
    first = plain["prompt_logprobs"][1][str(ord("i"))]
    assert first["logprob"] == echoed["token_logprobs"][1] and first["decoded_token"] == "i"
    both = ask(client, PATHS[1], echo=True, prompt_logprobs=2)["choices"][0]
    assert both["logprobs"] is None and both["prompt_logprobs"] == plain["prompt_logprobs"]
    ranks = [entry["rank"] for entry in plain["prompt_logprobs"][1].values()]
    assert {1, 2} <= set(ranks)
    assert len(plain["logprobs"]["tokens"]) == 24
    assert all(1 <= len(top) <= 2 for top in plain["logprobs"]["top_logprobs"])
    assert "prompt_logprobs" in ask(client, PATHS[1], 400, prompt_logprobs=99)["error"]["message"]


def test_tokens_named_by_their_ids(client):
    named = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    chat = ask(client, PATHS[0], logprobs=True, top_logprobs=1, **named)["choices"][0]
    entries = chat["logprobs"]["content"]
    assert [one["token"] for one in entries] == [f"token_id:{id}" for id in chat["token_ids"]]
    assert entries[0]["top_logprobs"][0]["token"].startswith("token_id:")
    plain = ask(client, PATHS[1], logprobs=1, **named)["choices"][0]
    assert plain["logprobs"]["tokens"] == [f"token_id:{id}" for id in plain["token_ids"]]
    content = ask(client, PATHS[0], n_probs=2)["choices"][0]["logprobs"]["content"]
    assert len(content[0]["top_logprobs"]) == 2


def test_counts_in_chunks_begin_at_nothing(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "max_tokens": 5, "stream": True, "stream_options": options}
    lines = client.post(PATHS[0], json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[0]["usage"]["completion_tokens"] == 0 < chunks[0]["usage"]["prompt_tokens"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_texts_to_tokens_as_three_servers_ask(client):
    def post(path, code=200, **body):
        answer = client.post(path, json=body)
        assert answer.status_code == code, answer.text
        return answer.json()

    one = post("/tokenize", prompt="Hi", return_token_strs=True)
    assert (one["count"], one["tokens"], one["token_strs"]) == (2, [72, 105], ["H", "i"])
    two = post("/v1/tokenize", prompt=["Hi", "a"], return_token_strs=True)
    assert (two["count"], two["tokens"]) == ([2, 1], [[72, 105], [97]])
    assert two["token_strs"] == [["H", "i"], ["a"]]
    pieces = post("/tokenize", content="Hi", with_pieces=True)["tokens"]
    assert pieces == [{"id": 72, "piece": "H"}, {"id": 105, "piece": "i"}]
    assert post("/detokenize", tokens=[72, 105])["prompt"] == "Hi"
    assert post("/v1/detokenize", tokens=[[72], [105]])["text"] == ["H", "i"]
    assert post("/detokenize", tokens=[])["content"] == ""
    chat = post("/tokenize", messages=MESSAGES)["tokens"]
    assert chat == ask(client, PATHS[0], return_token_ids=True)["prompt_token_ids"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    count = post("/tokenize", messages=MESSAGES, tools=[tool])["count"]
    reply = ask(client, PATHS[0], tools=[tool], tool_choice="auto")
    assert count == reply["usage"]["prompt_tokens"]
    begun = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    going = post("/tokenize", messages=begun, continue_final_message=True)["tokens"]
    assert TOKENIZER.decode(going).endswith("Well")
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert "cannot both" in post("/tokenize", 400, messages=begun, **both)["error"]["message"]
    assert post("/tokenize", 400, prompt="a", messages=MESSAGES)["error"]["param"] == "prompt"
