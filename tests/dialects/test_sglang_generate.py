"""SGLang's /generate, and the routes beside it, against a real server process."""

import json
from itertools import pairwise

import pytest

from tests.dialects.requests import GREEDY, PLACE, SAMPLED, is_place, with_two
from tests.dialects.thoughts import TOKENIZER
from tests.e2e.test_structured import DENSE

GENERATE = "/generate"


def params(sampling=GREEDY, **more):
    sampled = {"temperature": sampling["temperature"], "sampling_seed": sampling["seed"]}
    return {"max_new_tokens": 40, **sampled, **more}


def ask(server, sampling=GREEDY, text="Hi", **more):
    options = more.pop("options", {})
    body = {"text": text, "sampling_params": params(sampling, **options), **more}
    answer = server.post(GENERATE, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def pieces(server, body):
    answer = server.post(GENERATE, {**body, "stream": True})
    *events, end = [line[6:] for line in answer.text.splitlines() if line]
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


@with_two()
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_tokens_are_those_of_the_other_route(server, sampling):
    theirs = server.complete(**sampling, max_tokens=40).json()
    answer = ask(server, sampling)
    meta = answer["meta_info"]
    assert answer["text"] == theirs["choices"][0]["text"]
    assert TOKENIZER.decode(answer["output_ids"]) == answer["text"]
    assert meta["finish_reason"] == {"type": "length", "length": 40}
    assert meta["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
    assert meta["completion_tokens"] == 40
    off = ask(server, sampling, speculative={"enabled": False, "stats": True})
    assert off["output_ids"] == answer["output_ids"]
    assert off["meta_info"]["spec_accept_length"] == 1
    on = ask(server, sampling, speculative={"stats": True})["meta_info"]
    assert on["spec_accept_length"] > 1 or sampling is SAMPLED
    body = {"input_ids": [72, 105], "sampling_params": params(sampling)}
    assert server.post(GENERATE, body).json()["text"] == answer["text"]


@with_two()
def test_events_say_the_text_so_far(server):
    whole = ask(server, SAMPLED)
    events = pieces(server, {"text": "Hi", "sampling_params": params(SAMPLED)})
    assert all(b["text"].startswith(a["text"]) for a, b in pairwise(events))
    assert events[-1]["text"] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    reasons = [one["meta_info"]["finish_reason"] for one in events]
    assert reasons[:-1] == [None] * (len(events) - 1)
    assert reasons[-1] == {"type": "length", "length": 40}


def test_several_texts_and_several_answers(server):
    alone = [ask(server, SAMPLED, text)["text"] for text in ("Hi", "Ho")]
    assert [one["text"] for one in ask(server, SAMPLED, ["Hi", "Ho"])] == alone
    assert [one["text"] for one in ask(server, SAMPLED, ["Hi"])] == alone[:1]
    two = ask(server, SAMPLED, options={"n": 2})
    assert two[0]["text"] == alone[0] != two[1]["text"]
    body = {"text": ["Hi", "Ho"], "sampling_params": params(SAMPLED)}
    last = {one["index"]: one["text"] for one in pieces(server, body)}
    assert [last[0], last[1]] == alone


def test_why_it_ended(server):
    text = ask(server)["text"]
    stop = text[10:13]
    cut = ask(server, options={"stop": stop})
    assert cut["text"] == text[: text.index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = ask(server, options={"stop": [stop], "no_stop_trim": True})
    assert kept["text"] == text[: text.index(stop)] + stop
    # The toy ends its turn where the sum of all tokens is divisible by 256: here at once.
    body = {"input_ids": [100, 156], "sampling_params": params()}
    ended = server.post(GENERATE, body).json()["meta_info"]["finish_reason"]
    assert ended == {"type": "stop", "matched": 257}


@with_two()
@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        (
            {"json_schema": json.dumps(PLACE), "logit_bias": DENSE},
            lambda text: is_place(json.loads(text)),
        ),
        ({"regex": "(Paris|Rome)"}, ("Paris", "Rome").__contains__),
        ({"ebnf": 'root ::= "Paris" | "Rome"'}, ("Paris", "Rome").__contains__),
    ],
    ids=["json_schema", "regex", "ebnf"],
)
def test_structured_output(server, kind, fits):
    assert fits(ask(server, SAMPLED, options={**kind, "max_new_tokens": 300})["text"])


def test_logprobs_are_those_of_the_other_route(server):
    theirs = server.complete(max_tokens=3, logprobs=2, echo=True).json()["choices"][0]["logprobs"]
    more = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = ask(server, options={"max_new_tokens": 3}, logprob_start_len=0, **more)["meta_info"]
    logprobs = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert [logprob for logprob, _, _ in logprobs] == theirs["token_logprobs"]
    assert [text for _, _, text in logprobs] == theirs["tokens"]
    tops = meta["input_top_logprobs"] + meta["output_top_logprobs"]
    assert tops[0] is None and [len(top) for top in tops[1:]] == [2] * 4
    assert [top[0][0] for top in tops[1:]] == [max(t.values()) for t in theirs["top_logprobs"][1:]]
    later = ask(server, options={"max_new_tokens": 3}, logprob_start_len=1, **more)["meta_info"]
    assert later["input_token_logprobs"] == meta["input_token_logprobs"][1:]
    only = ask(server, options={"max_new_tokens": 3}, return_logprob=True)["meta_info"]
    assert only["input_token_logprobs"] == [] and "output_top_logprobs" not in only
    assert [entry[:2] for entry in only["output_token_logprobs"]] == [
        entry[:2] for entry in meta["output_token_logprobs"]
    ]


@with_two()
def test_what_is_beside_it(server):
    info = server.http.get("/get_model_info").json()
    assert (info["model_path"], info["is_generation"]) == ("toy", True)
    assert server.http.get("/health_generate").json() == {"status": "ok"}
    assert server.http.get("/model_info").json() == info


def test_each_text_has_its_own_parameters(server):
    texts, lengths = ["Hi", "Ho", "Ha"], (3, 9, 5)
    alone = [
        ask(server, SAMPLED, text, options={"max_new_tokens": length})["output_ids"]
        for text, length in zip(texts, lengths, strict=True)
    ]
    each = [params(SAMPLED, max_new_tokens=length) for length in lengths]
    body = {"text": texts, "sampling_params": each, "return_logprob": [True, False, True],
            "top_logprobs_num": [2, 0, 0], "logprob_start_len": [-1, -1, 0],
            "rid": ["a", "b", "c"]}  # fmt: skip
    answer = server.post(GENERATE, body)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    assert [one["output_ids"] for one in reply] == alone
    metas = [one["meta_info"] for one in reply]
    assert [meta["id"] for meta in metas] == ["a", "b", "c"]
    assert [len(top) for top in metas[0]["output_top_logprobs"]] == [2] * 3
    assert "output_token_logprobs" not in metas[1] and len(metas[2]["input_token_logprobs"]) == 2
    streamed = {one["meta_info"]["id"]: one["output_ids"] for one in pieces(server, body)}
    assert streamed == dict(zip("abc", alone, strict=True))


def test_log_probabilities_of_chosen_tokens(server):
    ids = [70, 71, 257]
    fields = {"return_logprob": True, "token_ids_logprob": ids, "logprob_start_len": 0}
    meta = ask(server, options={"max_new_tokens": 2}, **fields)["meta_info"]
    assert [[id for _, id, _ in place] for place in meta["output_token_ids_logprobs"]] == [ids] * 2
    assert meta["input_token_ids_logprobs"][0] is None
    tops = ask(server, options={"max_new_tokens": 2}, return_logprob=True, top_logprobs_num=20)
    known = {id: value for value, id, _ in tops["meta_info"]["output_top_logprobs"][0]}
    for value, id, _ in meta["output_token_ids_logprobs"][0]:
        assert known.get(id, value) == value
    body = {"text": "Hi", "top_logprobs_num": 2, "sampling_params": params()}
    alone = server.post(GENERATE, body)
    assert "output_top_logprobs" not in alone.json()["meta_info"]
    assert alone.headers["x-forerun-ignored"] == "top_logprobs_num"


BAD = [
    ({}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"text": []}, "text"),
    ({"text": "a", "sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens"),
    ({"text": "a", "sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
    ({"text": "a", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}},
     "sampling_params.ebnf"),
    ({"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ({"text": "a", "sampling_params": {"n": 100}}, "n"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "sampling_params[1]"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"regex": "a"}]}, "sampling_params[1]"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [300]}, "token_ids_logprob"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [3],
      "sampling_params": {"max_new_tokens": 4000}}, "token_ids_logprob"),
    ({"text": "a", "lora_path": "b"}, "lora_path"),
    ({"text": "a", "image_data": "b"}, "image_data"),
    ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
    ({"text": "a" * 5000}, "prompt"),
    ({"input_ids": [259]}, "prompt[0]"),
    ({"text": "a", "what": 1}, "what"),
]  # fmt: skip


@with_two()
@pytest.mark.parametrize(("wrong", "named"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_said(server, wrong, named):
    answer = server.post(GENERATE, wrong)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == named
