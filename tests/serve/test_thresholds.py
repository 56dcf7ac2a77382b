"""Accept thresholds below 1: honoured, and shown in header, body, /server_info and at the start."""

from dataclasses import replace

import numpy as np
import pytest
from starlette.testclient import TestClient

from forerun.cli.console import load_shown
from forerun.cli.main import main
from forerun.client.completion import acceptance_length, complete, make_request
from forerun.errors import ConfigError, RequestError
from forerun.options.config import EngineConfig, ServeSettings, exact
from forerun.serve.app import create_app
from forerun.speculative.noise import coin
from forerun.speculative.sampling import Sampling
from tests.cli.toys import CONFIG, toy_loaded
from tests.engine.toys import best, foresee, logits, make

HEADER = "x-forerun-lossy"
LOSSY = {"accept_threshold_single": 0.3, "accept_threshold_acc": 1.0}
SHOWN = "accept_threshold_single=0.3, accept_threshold_acc=1"


def answers(single=None, acc=None, temperature=1.0, count=12):
    """Completions of `count` seeds on the toy, and their prompt."""
    engine = make("likeliest")
    prompt = np.array([72, 105], np.int32)
    thresholds = {"accept_threshold_single": single, "accept_threshold_acc": acc}
    requests = [
        make_request(prompt, max_tokens=40, temperature=temperature, seed=seed, **thresholds)
        for seed in range(count)
    ]
    engine.start()
    try:
        return [one for (one,) in complete(engine, requests, at_once=4)], prompt.tolist()
    finally:
        engine.shutdown()


def length(answers):
    return acceptance_length([one.stats for one in answers])


def test_thresholds_of_one_change_nothing():
    plain, prompt = answers()
    ones, _ = answers(1.0, 1.0)
    assert [one.tokens for one in plain] == [one.tokens for one in ones]
    for seed, one in enumerate(plain):
        sampling = Sampling(temperature=1.0, seed=seed)
        opening = type("Opening", (), {"sampling": sampling, "prompt_len": 2})
        assert one.tokens == foresee(opening, prompt, len(one.tokens))


def told_apart(answers, prompt):
    """Of every token of answers by their seeds: its text so far, its place, the token, the one that
    is chosen there, and the token's probability.
    """
    for seed, one in enumerate(answers):
        text = list(prompt)
        opening = type("Opening", (), {"sampling": Sampling(seed=seed), "prompt_len": 2})
        for place, token in enumerate(one.tokens):
            weights = np.exp(logits(text).astype(np.float64))
            share = weights[token] / weights.sum()
            yield seed, text, place, token, foresee(opening, text, 1)[0], share
            text.append(token)


def test_more_is_accepted_and_every_token_is_likely_or_chosen():
    plain, _ = answers()
    written, prompt = answers(single=0.3)
    assert length(written) > 1.5 * length(plain)
    exact_ones = 0
    for _, _, _, token, chosen, share in told_apart(written, prompt):
        assert token == chosen or share >= 0.3
        exact_ones += token == chosen
    assert 0 < exact_ones < sum(len(one.tokens) for one in written)


def test_the_coin_is_divided():
    plain, _ = answers()
    written, prompt = answers(acc=0.5)
    assert length(written) > 1.2 * length(plain)
    for seed, text, place, token, chosen, share in told_apart(written, prompt):
        thrown = share + coin(seed, place) * (1 - share)
        assert token == chosen or (token == best(text) and thrown < share / 0.5)


def test_greedy_answers_stay_exact():
    plain, _ = answers(temperature=0.0, count=2)
    written, _ = answers(0.0, 0.0, temperature=0.0, count=2)
    assert [one.tokens for one in plain] == [one.tokens for one in written]


def test_what_is_no_threshold_is_refused():
    with pytest.raises(RequestError, match=r"accept_threshold_single is 1\.5, but must be 0 to 1"):
        answers(single=1.5, count=1)
    with pytest.raises(ConfigError, match="accept-threshold-acc is -1"):
        EngineConfig(speculative_accept_threshold_acc=-1.0)


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 1.0}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 8, "temperature": 1.0},
    "/v1/messages": CHAT | {"model": "toy"},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16, "temperature": 1.0},
    "/generate": {"text": "Hi", "sampling_params": {"temperature": 1.0, "max_new_tokens": 8}},
}


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_says_it(client, path):
    body = ROUTES[path] | {"speculative": LOSSY}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == SHOWN
    if path.endswith("completions"):
        assert answer.json()["metadata"] == {"lossy": LOSSY}
    if path == "/generate":
        assert answer.json()["meta_info"]["lossy"] == LOSSY
    streamed = client.post(path, json=body | {"stream": True})
    assert streamed.headers[HEADER] == SHOWN
    quiet = client.post(path, json=ROUTES[path])
    assert HEADER not in quiet.headers and "lossy" not in quiet.text


def test_what_changes_nothing_is_named(client):
    greedy = CHAT | {"temperature": 0, "speculative": LOSSY}
    off = CHAT | {"speculative": LOSSY | {"enabled": False}}
    for body in (greedy, off):
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.headers["x-forerun-ignored"] == "speculative.accept_threshold_single"
        assert HEADER not in answer.headers and "metadata" not in answer.json()


def test_the_flat_name_says_where_it_is(client):
    body = CHAT | {"speculative_accept_threshold_single": 0.3}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "use speculative.accept_threshold_single" in answer.text


def test_a_lossy_server_says_so(capsys):
    config = replace(CONFIG, speculative_accept_threshold_single=0.3)
    loaded = load_shown(config)
    assert "lossy: speculative-accept-threshold-single is 0.3" in capsys.readouterr().err
    with TestClient(create_app(loaded, ServeSettings())) as client:
        info = client.get("/server_info").json()
        assert info["lossy"].startswith("lossy: ")
        assert info["config"]["speculative_accept_threshold_single"] == 0.3
        assert client.post("/v1/chat/completions", json=CHAT).headers[HEADER] == SHOWN
        exactly = {"speculative": {"accept_threshold_single": 1.0}}
        assert HEADER not in client.post("/v1/chat/completions", json=CHAT | exactly).headers
    with toy_loaded() as plain:
        assert plain.info["lossy"] is None


def test_what_compares_texts_refuses_them(capsys):
    flags = ["--speculative-accept-threshold-acc", "0.5", "--quick"]
    assert main(["prove", "--model", "toy", *flags]) == 2
    assert "accept thresholds below 1" in capsys.readouterr().err
    off = EngineConfig(speculative_algorithm="OFF", speculative_accept_threshold_acc=0.5)
    assert exact(off) is off
