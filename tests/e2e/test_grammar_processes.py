"""Grammars that are followed in processes of their own, over HTTP."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.constrain.test_remote_matcher import AMBIGUOUS
from tests.e2e.test_structured import CHAT, DENSE, MESSAGES
from tests.worlds.real_server import MANY, strict
from tests.worlds.servers import serving, wait_for

COMPLETIONS = "/v1/completions"


def children(server):
    """Ids of its matching processes."""
    return server.children("matcher_worker")


def stats(server):
    """What its engine counts."""
    return server.http.get("/server_info").json()["stats"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_matching_process_is_a_500_of_that_request_alone(tmp_path, stream):
    """It is the server's fault and may be sent again; a limit of the grammar's is a 400."""
    endless = DENSE | {str(ord("}")): -100}
    body = {"messages": MESSAGES, **strict(MANY), "max_tokens": 1000, "logit_bias": endless}
    body |= {"temperature": 0, "stream": stream}
    with serving(tmp_path, delay=0.05) as server, ThreadPoolExecutor(2) as pool:
        future = pool.submit(server.post, CHAT, body)
        # Before it has given a mask nothing is lost with it.
        assert wait_for(lambda: stats(server)["output_tokens"])
        beside = pool.submit(server.complete, max_tokens=30)
        assert wait_for(lambda: server.load()["running"] == 2)
        for child in children(server):
            os.kill(child, signal.SIGSTOP)
            os.kill(child, signal.SIGKILL)
        answer = future.result()
        if stream:
            assert "its grammar cannot be followed" in answer.text
            assert "Ask again" in answer.text and "grammar_limit" not in answer.text
        else:
            assert answer.status_code == 500, answer.text
            error = answer.json()["error"]
            assert "Ask again" in error["message"] and error["code"] != "grammar_limit"
        again = server.complete(max_tokens=30)
        assert beside.result().json()["choices"] == again.json()["choices"]
        assert server.idle() and server.healthy()


@pytest.mark.slow
@pytest.mark.model
def test_the_grammar_of_185_bytes_by_its_own_words(tmp_path):
    """The default model, the bias and all: it ends alone, and no other text changes."""
    free = {"prompt": "The sea is", "temperature": 0, "max_tokens": 24}
    hostile = {"prompt": "x", "grammar": AMBIGUOUS.source, "logit_bias": {"31069": 100}}
    with (
        serving(tmp_path, model="smollm2-135m", config={"kv_tokens": 2048}) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        alone = server.post(COMPLETIONS, free).json()["choices"]
        future = pool.submit(server.post, COMPLETIONS, {**hostile, "max_tokens": 300})
        assert wait_for(lambda: children(server))
        for _ in range(3):
            assert server.post(COMPLETIONS, free).json()["choices"] == alone
        answer = future.result()
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "grammar_limit"
        assert server.idle() and server.healthy()
