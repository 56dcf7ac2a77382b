"""Two real replicas by Ray Serve: `make test-ray`. What one's death costs, and where turns go."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.worlds.servers import wait_for

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE = 300.0
QUESTION = "Write a long story about a lighthouse keeper. " * 20


@pytest.fixture(scope="module")
def served():
    """(client, process) of two replicas."""
    port = free_port()
    line = ["serve", "smollm2-135m", "--replicas", "2", "--port", str(port), "--threads", "1"]
    line += ["--max-sequences", "8", "--context", "2048", "--kv-tokens", "16384", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "forerun.cli", *line], stdout=subprocess.PIPE, text=True
    )
    assert address(process).endswith(f":{port}/v1")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
        yield client, process
    if process.poll() is None:  # A test failed; what it started has to go all the same.
        process.terminate()
        process.wait(PATIENCE)


def address(process):
    """What it says with --json when it answers."""
    said = ""
    while not said.endswith("}\n"):
        line = process.stdout.readline()
        assert line, "it has ended"
        said += line
    return json.loads(said)["url"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def chat_body(text, **more):
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 24, **more}


def replica_processes():
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if line.startswith(b"ray::ServeReplica") and b"Replica" in line.split(b":default:")[-1]:
                pids.append((int(entry.name), line))
    return pids


def both(client):
    """Names of the replicas that answer many conversations."""
    names = set()

    def seen():
        for index in range(16):
            body = chat_body("Hi", max_tokens=1, prompt_cache_key=str(index))
            answer = client.post("/v1/chat/completions", json=body)
            if answer.status_code == 200:
                names.add(answer.headers["x-forerun-replica"])
        return len(names) >= 2

    assert wait_for(seen, PATIENCE)
    return names


def test_replicas_say_the_same_and_turns_find_their_prefix(served):
    client, _ = served
    assert len(both(client)) == 2
    answers, places = set(), set()
    for index in range(8):
        request = chat_body(QUESTION, prompt_cache_key=str(index))
        answer = client.post("/v1/chat/completions", json=request)
        answers.add(answer.json()["choices"][0]["message"]["content"])
        places.add(answer.headers["x-forerun-replica"])
    assert len(answers) == 1 and places
    first = client.post("/v1/chat/completions", json=chat_body(QUESTION + "And a dog."))
    message = first.json()["choices"][0]["message"]
    turns = [{"role": "user", "content": QUESTION + "And a dog."}, message]
    turns += [{"role": "user", "content": "Go on."}]
    second = client.post("/v1/chat/completions", json=chat_body(turns))
    assert second.headers["x-forerun-replica"] == first.headers["x-forerun-replica"]
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first.json()["usage"]["prompt_tokens"] - 32


@pytest.fixture
def second(served):
    """A client of another front, in a process of its own, before the same replicas."""
    port = free_port()
    line = [sys.executable, "-m", "tests.ray.second_front", str(port)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().endswith(f":{port}/v1\n")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE)
        process.stdout.close()


def test_two_fronts_agree(served, second):
    """Neither knows what the other sends: a conversation's turns find their prefix at either."""
    client, _ = served
    both(client)
    places = {}
    for index in range(12):
        text = f"Conversation {index}. " + QUESTION
        turns, fronts = [], [client, second] if index % 2 else [second, client]
        for number, front in enumerate([*fronts, *fronts]):
            turns.append({"role": "user", "content": f"{text} {number}"})
            answer = front.post("/v1/chat/completions", json=chat_body(turns, max_tokens=4))
            turns.append(answer.json()["choices"][0]["message"])
            places.setdefault(index, []).append(answer.headers["x-forerun-replica"])
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 100) == (number > 0), (index, number, cached)
    assert all(len(set(one)) == 1 for one in places.values()), places
    assert len({one[0] for one in places.values()}) == 2, places


def test_a_stored_answer_is_found_where_it_was_given(served):
    client, _ = served
    for index in range(6):
        first = client.post("/v1/responses", json={"input": f"Say {index}", "max_output_tokens": 4})
        id = first.json()["id"]
        later = {"input": "Again", "previous_response_id": id, "max_output_tokens": 4}
        assert client.post("/v1/responses", json=later).status_code == 200
        assert client.get(f"/v1/responses/{id}").json()["id"] == id


def test_errors_are_the_servers_own(served):
    client, _ = served
    broken = {"content": b"{", "headers": {"content-type": "application/json"}}
    assert client.post("/v1/chat/completions", **broken).status_code == 400
    assert client.get("/v1/nowhere").json()["error"]["code"] == "unknown_url"
    large = client.post("/v1/completions", content=b" " * (1 << 26))
    assert large.status_code == 413


def test_one_page_has_all_replicas_metrics(served):
    client, _ = served
    names = both(client)
    families = {family.name: family for family in text_string_to_metric_families(page(client))}
    for name in ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"):
        assert {sample.labels["replica"] for sample in families[name].samples} == names
    success = families["vllm:request_success"].samples
    assert {sample.labels["replica"] for sample in success if sample.value} == names


def page(client):
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return answer.text


def sequences(client, name="vllm:num_requests_running", **labels):
    """The sum of a family's samples, of all replicas."""
    (family,) = (f for f in text_string_to_metric_families(page(client)) if f.name == name)
    return sum(s.value for s in family.samples if labels.items() <= s.labels.items())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(served, stream):
    """At the replica too, whether something of the answer was there or not."""
    client, _ = served
    gone = {"name": "vllm:request_success", "finished_reason": "abort"}
    before = sequences(client, **gone)
    body = chat_body(QUESTION, stream=stream, max_tokens=1500, ignore_eos=True)
    if stream:
        with client.stream("POST", "/v1/chat/completions", json=body) as sent:
            next(sent.iter_lines())
    else:
        abandoned(client, body)
    assert wait_for(lambda: sequences(client, **gone) == before + 1, PATIENCE)
    assert sequences(client) == 0


def abandoned(client, body):
    """Ask, and close the connection when the request runs and nothing of its answer is there."""
    text, url = json.dumps(body).encode(), client.base_url
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.host}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(head.encode() + text)
        assert wait_for(lambda: sequences(client) == 1, PATIENCE)


class Stream(threading.Thread):
    """One streamed answer: its replica, its text, how it ended."""

    def __init__(self, client, index):
        super().__init__()
        self.client, self.index = client, index
        self.replica, self.text, self.error, self.done = None, "", None, False
        self.begun = threading.Event()
        self.start()

    def run(self):
        more = {"prompt_cache_key": str(self.index), "stream": True, "max_tokens": 300}
        body = chat_body(QUESTION, ignore_eos=True, **more)
        with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            self.replica = answer.headers.get("x-forerun-replica")
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    self.error = self.error or event.get("error")
                    for choice in event.get("choices", ()):
                        self.text += choice["delta"].get("content") or ""
                    if len(self.text) > 40:
                        self.begun.set()
        self.begun.set()


def test_a_killed_replica_loses_its_own_streams_with_an_error_event_each(served):
    client, _ = served
    both(client)
    alone = Stream(client, "alone")
    alone.join(PATIENCE)
    streams = [Stream(client, index) for index in range(8)]
    for stream in streams:
        assert stream.begun.wait(PATIENCE)
    assert len({stream.replica for stream in streams}) == 2, "all went to one"
    victim = replica_processes()[0][0]
    os.kill(victim, signal.SIGKILL)
    for stream in streams:
        stream.join(PATIENCE)
        assert not stream.is_alive()
    dead = {stream.replica for stream in streams if stream.error}
    assert len(dead) == 1
    for stream in streams:
        if stream.replica in dead:
            assert stream.error["code"] == "replica_died" or stream.done
        else:
            assert stream.done and stream.error is None and stream.text == alone.text
    # What comes next is answered at once, and a new replica takes the dead one's place.
    assert client.post("/v1/chat/completions", json=chat_body("Hello")).status_code == 200
    assert wait_for(lambda: len(both(client) - dead) == 2, PATIENCE)


def test_a_signal_ends_all_of_it(served):
    _, process = served
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert wait_for(lambda: not replica_processes(), PATIENCE)


LINE = (sys.executable, "-m", "forerun.cli", "serve", "smollm2-135m", "--replicas", "2")


def test_a_port_that_is_taken_is_said_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = str(bound.getsockname()[1])
        ended = subprocess.run([*LINE, "--port", port], check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"forerun: port {port} on 127.0.0.1 is taken by another program; choose another with "
        "--port, or let --port 0 find a free one.\n"
    )


def test_replicas_that_never_become_ready_say_why():
    line = [*LINE, "--port", "0", "--kv-tokens", "9999999999"]
    ended = subprocess.run(line, check=False, capture_output=True, text=True)
    assert ended.returncode == 5
    printed = " ".join(ended.stderr.split())
    cause = r"forerun: no replica could begin: replica \w+ \(process \d+\): "
    assert re.search(cause + "The model does not fit: weights", printed), ended.stderr
    assert "Traceback" not in ended.stderr
    assert wait_for(lambda: not replica_processes(), PATIENCE)
