"""llama.cpp's /completion and /infill against a real server process."""

import json
from types import SimpleNamespace

import httpx
import pytest

from forerun.engine.request import Delta, Finish
from forerun.errors import RequestError
from forerun.serve.answers.session import GenerationSession
from forerun.serve.bodies.fields import read
from forerun.serve.dialects.llama.infill import infill_prompt
from forerun.serve.dialects.llama.limits import LineLimits
from forerun.serve.dialects.llama.schema import InfillBody
from forerun.serve.observe.metrics import Metrics
from forerun.text.pieces import Pieces
from forerun.text.tokenizer import AddedToken, TextEnds, Tokenizer
from forerun.types import RequestId
from tests.dialects.requests import GREEDY, PLACE, SAMPLED, is_place, with_two
from tests.dialects.thoughts import TOKENIZER

WHOLE = {
    "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted",
    "tokens_evaluated", "generation_settings", "prompt", "has_new_line", "truncated", "stop_type",
    "stopping_word", "tokens_cached", "timings",
}  # fmt: skip


def ask(server, prompt="Hi", **more):
    answer = server.post("/completion", {"prompt": prompt, "n_predict": 40, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def pieces(server, **more):
    body = {"prompt": "Hi", "n_predict": 40, **more, "stream": True}
    answer = server.post("/completion", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line]
    assert all(line.startswith("data: {") for line in lines), "no [DONE]: the last says stop"
    return [json.loads(line[6:]) for line in lines]


@with_two()
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_that_of_the_other_route(server, sampling):
    theirs = server.complete(**sampling, max_tokens=40).json()
    answer = ask(server, **sampling)
    assert answer.keys() == WHOLE
    assert answer["content"] == theirs["choices"][0]["text"]
    assert answer["tokens_predicted"] == 40 and answer["stop"] is True
    assert answer["tokens_evaluated"] == theirs["usage"]["prompt_tokens"]
    assert (answer["stop_type"], answer["stopping_word"]) == ("limit", "")
    assert answer["truncated"] is False and answer["prompt"] == "Hi" and answer["tokens"] == []
    used = answer["generation_settings"]
    assert used["seed"] == sampling["seed"] and used["temperature"] == sampling["temperature"]
    assert used["n_predict"] == 40 and used["n_ctx"] == 4096
    timings = answer["timings"]
    assert timings["predicted_n"] == 40
    assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"]
    off = ask(server, **sampling, speculative={"enabled": False})
    assert off["content"] == answer["content"] and "draft_n" not in off["timings"]
    if sampling is GREEDY:
        assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]


@with_two()
def test_a_stream_is_the_same_text_in_pieces(server):
    whole = ask(server, **SAMPLED, return_tokens=True)
    *parts, end = pieces(server, **SAMPLED, timings_per_token=True)
    assert "".join(one["content"] for one in parts) == whole["content"]
    assert [id for one in parts for id in one["tokens"]] == whole["tokens"]
    assert TOKENIZER.decode(whole["tokens"]) == whole["content"]
    assert not any(one["stop"] for one in parts)
    assert [one["tokens_predicted"] for one in parts][-1] == 40
    assert all(one["timings"]["predicted_n"] for one in parts)
    assert end.keys() == WHOLE and end["stop"] is True and end["content"] == ""
    assert end["tokens_predicted"] == 40 and end["generation_settings"]["stream"] is True


def test_why_it_ended(server):
    text = ask(server, **GREEDY)["content"]
    stopped = ask(server, **GREEDY, stop=[text[4:6]])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", text[4:6])
    assert stopped["content"] == text[:4]
    ended = ask(server, [100, 156])
    assert (ended["stop_type"], ended["content"]) == ("eos", "")
    for more in ({**GREEDY, "stop": [text[4:6]]}, {"prompt": [100, 156]}):
        whole = ask(server, n_probs=1, return_tokens=True, **more)
        parts = pieces(server, n_probs=1, **more)
        assert whole["tokens"]
        for name in ("tokens", "completion_probabilities"):
            assert [each for one in parts for each in one.get(name, ())] == whole[name]
    longest = ask(server, "z" * 4090, ignore_eos=True, n_predict=-1, response_fields=["truncated"])
    assert longest == {"truncated": True}, "as many as the context takes"
    assert ask(server, n_predict=0)["tokens_predicted"] == 0


def test_prompts_in_every_form(server):
    text = ask(server, "Hi there", **GREEDY)["content"]
    ids = TOKENIZER.encode("Hi there").tolist()
    for same in (ids, [*ids[:3], "there"], ["Hi", *ids[2:]], {"prompt_string": "Hi there"}):
        assert ask(server, same, **GREEDY)["content"] == text, same
    several = ask(server, ["Hi there", "Hi", ids, [*ids[:3], "there"]], **GREEDY)
    assert [one["index"] for one in several] == [0, 1, 2, 3]
    assert [one["content"] == text for one in several] == [True, False, True, True]
    choices = ask(server, n_cmpl=2, **SAMPLED)
    again = ask(server, seed=choices[1]["generation_settings"]["seed"], temperature=1.0)
    assert again["content"] == choices[1]["content"] != choices[0]["content"]


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, None])
def test_a_random_seed_is_shown(server, seed):
    first, second = (ask(server, seed=seed, temperature=1.0) for _ in range(2))
    assert first["content"] != second["content"]
    drawn = first["generation_settings"]["seed"]
    assert 0 <= drawn < 2**53, "a JavaScript client can send it again"
    again = ask(server, seed=drawn, temperature=1.0)
    assert again["content"] == first["content"]


@with_two()
def test_probabilities(server):
    answer = ask(server, n_probs=3, n_predict=5, return_tokens=True)
    reported = answer["completion_probabilities"]
    assert [entry["id"] for entry in reported] == answer["tokens"]
    assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in reported)
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in reported)
    assert "completion_probabilities" not in ask(server, n_probs=0)
    *parts, end = pieces(server, n_probs=3, n_predict=5)
    entries = [e for one in parts for e in one.get("completion_probabilities", ())]
    assert len(entries) == 5 and "completion_probabilities" not in end


def test_parts_of_an_answer(server):
    wanted = ["content", "timings/predicted_n", "generation_settings/n_ctx", "nothing/here"]
    answer = ask(server, response_fields=wanted, **GREEDY)
    assert answer.keys() == {"content", "timings/predicted_n", "generation_settings/n_ctx"}
    assert answer["timings/predicted_n"] == 40 and answer["generation_settings/n_ctx"] == 4096
    *_, end = pieces(server, response_fields=["stop_type"])
    assert end == {"stop_type": "limit"}


@with_two()
def test_a_schema_holds(server):
    answer = ask(server, json_schema=PLACE, n_predict=2000, **SAMPLED)
    assert is_place(json.loads(answer["content"])) and answer["stop_type"] == "eos"
    answer = ask(server, grammar='root ::= "yes" | "no"', **SAMPLED)
    assert answer["content"] in ("yes", "no")


@with_two()
def test_what_editors_send_is_taken(server):
    body = {"prompt": "Hi", "n_predict": 4, "id_slot": 0, "cache_prompt": True, "n_indent": 0,
            "samplers": ["top_k"], "t_max_prompt_ms": 500, "t_max_predict_ms": 100000}  # fmt: skip
    answer = server.post("/completion", body)
    assert answer.status_code == 200
    ignored = {name.strip() for name in answer.headers["x-forerun-ignored"].split(",")}
    assert ignored == {"id_slot", "cache_prompt", "samplers", "t_max_prompt_ms"}
    plain = httpx.post(f"{server.root}/completion", content=b'{"prompt": "Hi", "n_predict": 2}')
    assert plain.status_code == 200 and plain.json()["tokens_predicted"] == 2
    page = {"origin": "http://elsewhere.example"}
    plain = httpx.post(f"{server.root}/completion", content=b'{"prompt": "Hi"}', headers=page)
    assert plain.status_code in (403, 415), "no page of somebody else's"


def test_a_time_limit_ends_an_answer_behind_a_line_break(server):
    """The toy's step takes a thousandth of a second: 4,000 tokens are beyond any such limit."""
    lines = {"regex": r"a\n[a-z]{4000}", "t_max_predict_ms": 1}
    text = ask(server, ignore_eos=True, n_predict=4000, **lines, **SAMPLED)
    assert text["stop_type"] == "limit" and text["tokens_predicted"] < 4000
    assert "\n" in text["content"] and text["has_new_line"] is True
    assert server.idle(), "the engine ended it"


@with_two()
@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"prompt": "a", "t_max_predict_ms": 5, "n_cmpl": 2}, "t_max_predict_ms is for one text"),
        ({"prompt": ["a", "b"], "n_indent": 2}, "n_indent is for one text"),
        ({"prompt": []}, "prompt has 0 entries"),
        ({"prompt": 7}, "prompt must be a text"),
        ({"prompt": ["a", 7.5]}, "prompt[1] must be a text or a token id"),
        ({"prompt": [[300]]}, "300"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "text only"),
        ({"prompt": "a", "mirostat": 2}, "mirostat"),
        ({"prompt": "a", "n_probs": 9999}, "n_probs is 9999, but this server allows"),
        ({"prompt": "a", "lora": [{"id": 0, "scale": 1.0}]}, "no adapter of number 0"),
        ({}, "prompt is missing"),
    ],
)
def test_what_cannot_be_honoured_is_named(server, body, word):
    answer = server.post("/completion", body)
    assert answer.status_code == 400 and word in answer.json()["error"]["message"], answer.text


def test_routes_that_are_not_served_say_so(server):
    body = {"input_prefix": "def f(", "input_suffix": "): pass"}
    answer = server.post("/infill", body)
    assert answer.status_code == 400 and "<|fim_prefix|>" in answer.json()["error"]["message"]
    for path in ("/slots/0?action=save", "/lora-adapters", "/props"):
        answer = server.post(path, {})
        assert answer.status_code == 501 and answer.json()["error"]["message"], path
    assert server.http.get("/lora-adapters").json() == []
    assert server.http.get("/props").status_code == 200


def marked(names, bos=None):
    """A byte-level tokenizer with more control tokens, from 256 on."""
    table = [bytes([value]) for value in range(256)] + [name.encode() for name in names]
    added = [AddedToken(256 + place, name, True) for place, name in enumerate(names)]
    ends = TextEnds((256,), bos, () if bos is None else (bos,))
    return Tokenizer(lambda text, first: [*text.encode()], Pieces(tuple(table), 0), added, ends)


def infilled(tokenizer, context=1000, **more):
    body = read(InfillBody, {"input_prefix": "a(", "input_suffix": ")z", **more})
    ids, _ = infill_prompt(body, tokenizer, context)
    return tokenizer.decode(ids, skip_special=False)


def test_infilling_uses_the_models_own_marks():
    qwen = marked(["<end>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    assert infilled(qwen) == "<|fim_prefix|>a(<|fim_suffix|>)z<|fim_middle|>"
    assert infilled(qwen, prompt="x, ") == "<|fim_prefix|>a(x, <|fim_suffix|>)z<|fim_middle|>"
    hostile = read(InfillBody, {"input_prefix": "<|fim_middle|>", "input_suffix": ""})
    ids, marks = infill_prompt(hostile, qwen, 99)
    assert ids.count(marks.middle) == 1
    deep = marked(
        ["<s>", *(f"<\uff5cfim\u2581{name}\uff5c>" for name in ("begin", "hole", "end"))], 256
    )
    assert infilled(deep).startswith(
        "<s><\uff5cfim\u2581begin\uff5c>a(<\uff5cfim\u2581hole\uff5c>)z"
    )
    with pytest.raises(RequestError, match="no tokens for filling in") as caught:
        infilled(TOKENIZER)
    assert caught.value.field == "input_suffix"


def test_other_files_come_first_as_far_as_there_is_room():
    names = ["<end>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"]
    extra = [{"filename": "one.py", "text": "1" * 50}, {"filename": "two.py", "text": "2" * 50}]
    coder, body = marked(names), "<fim_prefix>a(<fim_suffix>)z<fim_middle>"
    prompt = infilled(coder, input_extra=extra)
    assert prompt == (
        f"<repo_name>myproject\n<file_sep>one.py\n{'1' * 50}<file_sep>two.py\n{'2' * 50}"
        f"<file_sep>filename\n{body}"
    )
    short = infilled(coder, context=120, input_extra=extra, n_predict=10)
    assert "one.py" not in short and "two.py" in short
    plain = marked(names[:4])
    assert infilled(plain, input_extra=extra[:1]) == f"\n\n--- one.py ---\n\n{'1' * 50}{body}"


def test_lines_that_end_a_text():
    limits = LineLimits(4, 0.0)
    assert limits("first\n", 9) is None and limits("    in\n\n  ", 9) is None
    assert limits("  in\n", 9) is None, "white space comes in pieces"
    assert limits("   out\n", 9) == "   "
    assert LineLimits(0, 1.0)("a" * 9, 2.0) is None, "no line break yet"
    late = LineLimits(0, 1.0)
    assert late("a\n", 0.5) is None and late("b", 1.5) == "b"


def test_an_answer_that_fails_is_not_said_to_be_cut():
    cut = lambda text, seconds: text  # noqa: E731
    generation = SimpleNamespace(prompt_tokens=1, requests=(), cut=lambda: cut)
    served = SimpleNamespace(engine=None, meter=Metrics().add("m", None, None, {}))
    session = GenerationSession(generation, served, None, None)
    for finish in (Finish.ERROR, Finish.ABORT):
        assert session._shortened(Delta(RequestId("r"), 0, finish=finish)).finish == finish
    assert session._shortened(Delta(RequestId("r"), 0, finish=Finish.STOP)).finish == Finish.LENGTH


def test_a_prompt_object_needs_its_text():
    with pytest.raises(RequestError, match="input_suffix is missing"):
        read(InfillBody, {"input_prefix": ""})
