"""Clients that leave, stall or read slowly: the engine is never held up and nothing leaks."""

import asyncio
import json
import random
import re
from http.client import HTTPResponse

import httpx
import pytest

from tests.worlds.servers import read_until, request_bytes, serving, sound, wait_for

LONG = {"prompt": "Hi", "temperature": 0, "max_tokens": 4000, "ignore_eos": True}
PLAIN = {**LONG, "speculative": {"enabled": False}}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(None, id="one"),
        pytest.param(["toy", "other"], id="two", marks=pytest.mark.slow),
    ],
)
def server(request, tmp_path_factory):
    """A toy that takes 5 ms per step, so 4,000 tokens take 20 s; alone, or one of two models."""
    given = {"settings": {"keep_alive_seconds": 0.2}, "models": request.param}
    with sound(tmp_path_factory.mktemp("streams"), delay=0.005, **given) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """One that drops slow clients soon, which on a loaded machine anybody may be."""
    with sound(tmp_path_factory.mktemp("hasty"), settings={"send_seconds": 3.0}) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    server.idle()
    load = server.load()
    assert (load["running"], load["waiting"], load["pages_held"]) == (0, 0, 0)
    assert server.complete(max_tokens=5).json()["choices"][0]["text"] == "djell"


def running(server):
    return server.load()["running"]


def steps(server):
    return server.http.get("/server_info").json()["stats"]["steps"]


def aborted(server):
    return finished(server, "abort")


def finished(server, how):
    return server.http.get("/server_info").json()["stats"]["finished"][how]


def dropped(server):
    return server.logged().count("it read nothing of the answer for 3 s")


def test_a_head_that_never_ends_is_given_up(hasty):
    with hasty.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        assert hasty.healthy()
        assert sock.recv(100) == b""


def test_a_client_that_leaves_mid_prefill(server):
    """Its prompt needs 4 chunks of 512 tokens; it goes after the first."""
    letters = random.Random(1)
    prompt = [letters.randrange(97, 113) for _ in range(2000)]
    before = aborted(server)
    with server.connect() as sock:
        sock.sendall(
            request_bytes("/v1/completions", {**PLAIN, "prompt": prompt, "max_tokens": 2000})
        )
        assert wait_for(lambda: running(server) == 1)
    assert wait_for(lambda: aborted(server) == before + 1)


def test_all_choices_of_all_prompts_end_with_their_client(server):
    before = aborted(server)
    with server.connect() as sock:
        body = {**PLAIN, "prompt": ["Hi", "Ho", "He"], "n": 2, "stream": True}
        sock.sendall(request_bytes("/v1/completions", body))
        assert wait_for(lambda: running(server) == 6)
    assert wait_for(lambda: aborted(server) == before + 6)


STALLED = {**PLAIN, "n": 16, "max_tokens": 400, "logprobs": 20, "stream": True}
"""With log-probabilities its answer is some 10 MB, more than sockets buffer."""


def test_a_stalled_reader_blocks_no_other(tmp_path):
    """Others are answered though it is not dropped."""
    with serving(tmp_path, settings={"send_seconds": 1000.0}) as patient:
        with patient.connect(receive_buffer=2048) as sock:
            sock.sendall(request_bytes("/v1/completions", STALLED))
            assert wait_for(lambda: running(patient) == 16)
            assert patient.complete(max_tokens=20).status_code == 200
            assert wait_for(lambda: not running(patient))
            assert patient.complete(max_tokens=20).status_code == 200
            assert "it read nothing" not in patient.logged()
        assert patient.idle()


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_client_that_reads_nothing_is_dropped(hasty, stream):
    """Also where the answer comes as a whole."""
    before = dropped(hasty)
    with hasty.connect(receive_buffer=2048) as sock:
        sock.sendall(request_bytes("/v1/completions", {**STALLED, "stream": stream}))
        assert wait_for(lambda: dropped(hasty) == before + 1)
        assert hasty.idle()


def test_a_slow_reader_gets_everything_in_larger_pieces(server):
    whole = server.complete(**{**LONG, "max_tokens": 400}).json()["choices"][0]["text"]
    body = {**LONG, "max_tokens": 400, "logprobs": 20, "stream": True}
    before = finished(server, "length")
    with server.connect(receive_buffer=2048) as sock:
        sock.sendall(request_bytes("/v1/completions", body))
        assert wait_for(lambda: finished(server, "length") > before)
        answer = HTTPResponse(sock)  # Larger pieces may be cut within a line.
        answer.begin()
        data = answer.read()
    lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(chunk["text"] for chunk in chunks) == whole
    assert sum(len(chunk["logprobs"]["tokens"]) for chunk in chunks) == 400
    assert chunks[-1]["finish_reason"] == "length"


def test_keep_alive_comments_during_silence(server):
    """Sixty others keep every slot busy, so a further one waits in silence."""
    with httpx.Client(base_url=server.root, timeout=60, trust_env=False) as other:
        crowd = [server.connect() for _ in range(4)]
        try:
            for sock in crowd:
                sock.sendall(request_bytes("/v1/completions", {**PLAIN, "n": 16, "stream": True}))
            assert wait_for(lambda: running(server) == 64)
            with other.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                assert answer.status_code == 200
                assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
                lines = answer.iter_lines()
                assert next(lines) == ": ping"
                assert next(lines) == ""
                assert next(lines) == ": ping"
            body = {"input": "Hi", "stream": True}
            with other.stream("POST", "/v1/responses", json=body) as answer:
                events = (json.loads(line[6:]) for line in answer.iter_lines() if "data: " in line)
                first = [next(events) for _ in range(4)]  # Codex waits for events, not for bytes.
                kinds = [one["type"].removeprefix("response.") for one in first]
                assert kinds == ["created", *["in_progress"] * 3]
                assert [one["sequence_number"] for one in first] == [0, 1, 2, 3]
        finally:
            for sock in crowd:
                sock.close()


def test_many_tokens_need_few_wake_ups(server):
    """With speculation a step brings several tokens; they come in one chunk."""
    with server.connect() as sock:
        body = {**LONG, "max_tokens": 300, "stream": True}
        sock.sendall(request_bytes("/v1/completions", body))
        data = read_until(sock, b"data: [DONE]").decode()
    assert data.count("data: {") < 200


def test_a_connection_serves_one_request_after_another(server):
    with server.connect() as sock:
        for stream in (False, True, False):
            body = {**LONG, "max_tokens": 3, "stream": stream}
            sock.sendall(request_bytes("/v1/completions", body))
            answer = read_until(sock, b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}")
            assert answer.startswith(b"HTTP/1.1 200")


def test_two_hundred_requests_with_aborts(server):
    """A fifth of the clients leave at random; the others get what they would get alone."""
    expected = server.complete(max_tokens=60, ignore_eos=True).json()["choices"][0]["text"]
    outcomes = asyncio.run(_crowd(server.root, 200, 0.2))
    assert outcomes.count("left") == 40
    assert [text for text in outcomes if text != "left"] == [expected] * 160
    assert server.idle()
    page = server.http.get("/metrics").text
    names = [
        name
        for name in re.findall(r"(?m)^# TYPE (\S+) gauge$", page)
        if re.search("running|waiting|held|queue|usage", name)
    ]
    assert len(names) >= 3
    for name in names:
        samples = re.findall(rf"(?m)^{name}(?:\{{.*\}})? (\S+)$", page)
        assert set(samples) == {"0.0"}, (name, samples)


LEFT = [{}, {"n": 3, "temperature": 1.0}, {"regex": "[a-p]*"}, {"echo": True, "logprobs": 2}]
"""Requests of clients that leave."""


async def _crowd(root, count, share):
    chance = random.Random(4)
    leavers = set(chance.sample(range(count), int(count * share)))
    limits = httpx.Limits(max_connections=count)
    body = {"prompt": "Hi", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    async with httpx.AsyncClient(
        base_url=root, timeout=200, limits=limits, trust_env=False
    ) as client:

        async def ask(number):
            await asyncio.sleep(chance.random() * 0.5)
            stream = number % 2 == 0
            more = LEFT[number // 2 % len(LEFT)] if number in leavers else {}
            send = client.post("/v1/completions", json={**body, "stream": stream, **more})
            if number in leavers:
                try:
                    await asyncio.wait_for(send, 0.02 + 0.1 * chance.random())
                except TimeoutError:
                    return "left"
                return "left"
            answer = await send
            assert answer.status_code == 200, answer.text
            if not stream:
                return answer.json()["choices"][0]["text"]
            lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        return await asyncio.gather(*map(ask, range(count)))
