"""What takes time is not done on the event loop, and small bodies do not wait for large ones."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from forerun.errors import WorkerError
from forerun.options.config import ServeSettings
from forerun.serve import tokens
from forerun.serve.answers import answering
from forerun.serve.app import create_app
from forerun.serve.bodies import wire
from forerun.serve.bodies.wire import dump_json, parse_json
from forerun.serve.http.errors import ApiError
from forerun.serve.http.workers import HUGE, LARGE, LARGE_AT_ONCE, SMALL_AT_ONCE, Workers
from forerun.text import json_text
from forerun.text.json_text import MOST_CONTAINERS
from forerun.text.rendering import is_large
from tests.cli.toys import toy_loaded

PATIENCE = 60.0
HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


class WaitingRenderer:
    """Renders when it may."""

    waits = True

    def __init__(self, renderer):
        self._renderer = renderer
        self.begun, self.may = threading.Event(), threading.Event()
        self.waited = []

    def render(self, names):
        self.begun.set()
        self.waited.append(self.may.wait(PATIENCE))
        return self._renderer.render(names)

    def close(self):
        self._renderer.close()


def test_others_are_answered_while_a_conversation_is_rendered():
    with toy_loaded() as loaded:
        renderer = loaded.chat._renderer = WaitingRenderer(loaded.chat._renderer)
        with (
            TestClient(create_app(loaded, ServeSettings())) as client,
            ThreadPoolExecutor() as pool,
        ):
            future = pool.submit(client.post, "/v1/chat/completions", json=HELLO)
            assert renderer.begun.wait(PATIENCE)
            assert client.get("/health").status_code == 200
            renderer.may.set()
            assert future.result().status_code == 200
    assert renderer.waited == [True], "the event loop waited for the renderer"


def test_small_bodies_do_not_wait_for_large_ones():
    async def both():
        workers, may = Workers(), threading.Event()
        large = [
            asyncio.ensure_future(workers.apart(LARGE + 1, may.wait, PATIENCE))
            for _ in range(LARGE_AT_ONCE + 2)
        ]
        assert await workers.apart(1, int, "7") == 7
        assert await workers.run(1, int, "8") == 8
        may.set()
        assert all(await asyncio.gather(*large))
        workers.close()

    asyncio.run(both())


def test_a_lost_process_is_a_503():
    with toy_loaded() as loaded:

        class LostRenderer(WaitingRenderer):
            def render(self, names):
                raise WorkerError("it was ended from outside")

        loaded.chat._renderer = LostRenderer(loaded.chat._renderer)
        with TestClient(create_app(loaded, ServeSettings())) as client:
            answer = client.post("/v1/chat/completions", json=HELLO)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "worker_process_lost"


def test_huge_bodies_are_worked_on_one_at_a_time_and_large_ones_beside_them(monkeypatch):
    returned = []
    monkeypatch.setattr("forerun.serve.http.workers.trim_memory", lambda: returned.append(1))

    async def run():
        workers, may, begun = Workers(), threading.Event(), []

        def work():
            begun.append(len(returned))
            assert may.wait(PATIENCE)

        huge = [asyncio.ensure_future(workers.run(HUGE + 1, work)) for _ in range(3)]
        assert await workers.run(HUGE, int, "7") == 7
        may.set()
        await asyncio.gather(*huge)
        workers.close()
        return begun

    assert asyncio.run(run()) == [0, 1, 2], "memory is returned before the next begins"


def test_a_large_conversation_is_large_for_its_renderer_too():
    """A small body, whatever is in it, never waits behind large ones."""
    content = "<|im_start|>" + "\u00e9" * (LARGE // 2 - 100)
    assert not is_large({"messages": [{"role": "user", "content": content}]})
    assert is_large({"messages": [{"role": "user", "content": "a" * (2 * LARGE + 1)}]})


def calls_during(work, *args):
    """Calls of the reader's own functions while `work` runs: after each another thread may run, in
    between none may.
    """
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename == json_text.__file__

    sys.setprofile(count)
    try:
        work(*args)
    finally:
        sys.setprofile(None)
    return calls


MANY = 3000


@pytest.mark.parametrize("one", ["1", "1.5", "{}", '{"a":null}', "-12345678901234567890"])
def test_the_event_loop_has_its_turn_between_two_numbers_of_a_large_body(one):
    assert calls_during(parse_json, f"[{','.join([one] * MANY)}]".encode()) >= MANY


def test_the_event_loop_has_its_turn_between_two_entries_of_a_large_object():
    body = "{" + ",".join(f'"{key}":1' for key in range(MANY)) + "}"
    assert calls_during(parse_json, body.encode()) >= MANY


def test_the_event_loop_has_its_turn_while_strings_are_left_out():
    body = '{"a":"b"}' * (MOST_CONTAINERS + 1)
    assert calls_during(_refused, body.encode()) >= 2 * MOST_CONTAINERS


def _refused(body):
    with pytest.raises(ApiError, match="arrays and objects"):
        parse_json(body)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32-be"])
@pytest.mark.parametrize("unit", ["[]", "{}", "[[{}]]"])
def test_more_arrays_and_objects_than_can_be_made_at_once_are_refused(unit, encoding):
    some = MOST_CONTAINERS // unit.count("]" if "]" in unit else "}") + 1
    with pytest.raises(ApiError, match="more than 131,072 arrays and objects"):
        parse_json(f"[{','.join([unit] * some)}]".encode(encoding))


def test_brackets_in_a_text_are_no_arrays():
    text = 'a[0] = {"b": "[\\"};\n' * MOST_CONTAINERS
    assert parse_json(dump_json({"prompt": text, "n": [[1], {}]})) == {
        "prompt": text,
        "n": [[1], {}],
    }


def test_large_answers_are_written_as_small_ones_are():
    value = {"tokens": [*range(9000)], "a": ["\u00e9\ud800", 1.5, None], "b": {}}

    async def on_the_loop():
        return dump_json(value)

    assert dump_json(value) == asyncio.run(on_the_loop())


def test_large_answers_are_sent_in_parts():
    answer, sent = bytes(range(256)) * 1000, []

    async def send(message):
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "headers": [], "asgi": {"spec_version": "2.4"}}
    asyncio.run(tokens._sent(answer)(scope, receive, send))
    parts = [message.get("body", b"") for message in sent]
    assert b"".join(parts) == answer and max(map(len, parts)) == tokens._PART
    assert (b"content-length", b"256000") in sent[0]["headers"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("top", "beside"), [(20, True), (None, False)])
def test_answers_with_many_log_probabilities_are_made_beside_the_event_loop(
    client, monkeypatch, stream, top, beside
):
    threads = set()

    def dumped(value):
        threads.add(threading.current_thread().name.partition("_")[0])
        return dump_json(value)

    for module in (answering, wire):
        monkeypatch.setattr(module, "dump_json", dumped)
    body = {"prompt": "a" * 500, "max_tokens": 2, "logprobs": top, "echo": True, "stream": stream}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert ("forerun-large" in threads) is beside


@pytest.mark.parametrize("size", [1, LARGE + 1, HUGE + 1])
def test_work_that_waits_when_the_server_ends_gets_an_error(size):
    """Not cancelled, which would be an answer of 500; neither is what comes afterwards."""

    async def run():
        workers, may = Workers(), threading.Event()
        waiting = [asyncio.create_task(workers.apart(size, may.wait, PATIENCE)) for _ in range(9)]
        await asyncio.sleep(0)
        workers.close()
        may.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(ApiError, match="shutting down"):
            await workers.apart(size, str)
        gone = asyncio.create_task(Workers().apart(size, may.wait, PATIENCE))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        return results

    results = asyncio.run(run())
    refused = [one.code for one in results if one is not True]
    assert results.count(True) in (SMALL_AT_ONCE, LARGE_AT_ONCE, 1)
    assert refused == ["shutting_down"] * (9 - results.count(True))
