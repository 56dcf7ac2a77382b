"""Control strings in prompts are their tokens, as in other servers; in conversations never."""

from forerun.cli.main import main
from forerun.client.llm import LLM

TEXT = "<|im_start|>a"


def test_tokenize(client):
    def tokens(**body):
        return client.post("/tokenize", json=body).json()["tokens"]

    assert tokens(prompt=TEXT) == [256, 97]
    assert tokens(prompt=TEXT, parse_special=False) == list(TEXT.encode())
    written = tokens(messages=[{"role": "user", "content": TEXT}])
    assert written.count(256) == 2  # The template's own: the turn, and the answer's.


def test_completions(client):
    def usage(**body):
        body = {"prompt": TEXT, "max_tokens": 1} | body
        return client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]

    assert usage() == 2
    assert usage(prompt=[TEXT, "b"]) == 3
    assert usage(parse_special=False) == len(TEXT)
    echoed = client.post("/v1/completions", json={"prompt": TEXT, "echo": True, "max_tokens": 1})
    assert echoed.json()["choices"][0]["text"].startswith(TEXT)


def test_a_control_token_is_a_stop_string_that_no_text_shows(client):
    def ended(**body):
        forced = {"logit_bias": {"256": 100}, "max_tokens": 3, "temperature": 0}
        answer = client.post("/v1/completions", json={"prompt": "a", **forced, **body}).json()
        choice = answer["choices"][0]
        return choice["text"], choice["finish_reason"], choice["stop_reason"]

    mark = "<|im_start|>"
    assert ended() == ("", "length", None)
    assert ended(stop=["x", mark]) == ("", "stop", mark)
    assert ended(stop=[mark], include_stop_str_in_output=True) == (mark, "stop", mark)
    assert ended(stop=[mark], skip_special_tokens=False) == ("", "stop", mark)
    assert ended(stop=[mark], min_tokens=2)[1:] == ("stop", mark)
    ignored = {"logit_bias": {"257": 100}, "ignore_eos": True}
    assert ended(stop=["<|im_end|>"], **ignored) == ("", "stop", "<|im_end|>")


def test_conversations_stay_safe(client):
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    allowed = body | {"parse_special": False, "add_special_tokens": False}
    assert client.post("/v1/chat/completions", json=allowed).status_code == 200
    refused = client.post("/v1/chat/completions", json=body | {"parse_special": True})
    assert refused.status_code == 400 and "control token" in refused.json()["error"]["message"]


def test_raw_prompts_of_run_and_python(capsys):
    toy = ["--model", "toy", "--kv-tokens", "1024", "--max-tokens", "4", "--temperature", "0"]
    outputs = []
    for flags in ([], ["--no-parse-special"]):
        assert main(["run", TEXT, "--raw", *toy, *flags]) == 0
        outputs.append(capsys.readouterr().out)
    with LLM("toy", kv_tokens=1024) as llm:
        assert llm.generate(TEXT, max_tokens=4)[0].text + "\n" == outputs[0]
    assert main(["run", TEXT, *toy, "--no-parse-special"]) == 2
    assert "--no-parse-special is for --raw" in capsys.readouterr().err
