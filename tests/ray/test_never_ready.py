"""Replicas that never become ready, on real Ray: those that are there serve, and each of the others
is said by its name, with what is wrong.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from queue import SimpleQueue

import httpx
import pytest

from tests.ray.test_replicas import PATIENCE, address, replica_processes
from tests.worlds.servers import wait_for

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Served:
    """A process of tests.ray.faulty, its address and the lines of its log."""

    def __init__(self, folder, seconds, *hows):
        environment = os.environ | {"FAULTS": " ".join([str(folder), *hows])}
        script = f"from tests.ray import faulty; faulty.main({seconds})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.put(line)

        self.lines.put(None)

    def says(self, pattern):
        """Wait for a line of its log."""
        seen = []
        while (line := self.lines.get(timeout=PATIENCE)) is not None:
            seen.append(line)
            if re.search(pattern, line):
                return
        pytest.fail(f"no line has {pattern}: {''.join(seen)}")

    def url(self):
        return address(self.process)

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE) is not None
        self.process.stdout.close()


@pytest.fixture
def begun(tmp_path):
    made = []

    def begin(seconds, *hows):
        made.append(Served(tmp_path, seconds, *hows))
        return made[0]

    yield begin
    made[0].end()
    assert wait_for(lambda: not replica_processes(), PATIENCE)


NAME = r"replica \w+ \(process \d+\)"


def test_ready_replicas_serve_and_the_others_are_named(begun, tmp_path):
    served = begun(10, "well", "fails", "hangs", "dies", "well")
    with httpx.Client(base_url=served.url(), timeout=PATIENCE) as client:

        def answers():
            body = {"model": "toy", "prompt": "a", "max_tokens": 4}
            return client.post("/completions", json=body)

        some = r"replicas ready: 1 of 2\. "
        served.says(some + NAME + r": model\.safetensors ends within a tensor\.")
        assert answers().status_code == 200
        served.says(some + NAME + r" did not load its model within 10 seconds\.")
        assert answers().status_code == 200
        served.says(some + r"A replica's process died while it loaded its model")
        served.says("all 2 replicas are ready")
        # Later all are lost, and what takes their place is at fault: no request waits for ever.
        (tmp_path / "broken").touch()
        for pid, _ in replica_processes():
            os.kill(pid, signal.SIGKILL)
        served.says(r"replicas ready: 0 of 2\. " + NAME + r": model\.safetensors ends")
        answer = answers()
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "no_replica"
        health = client.get(served_root(client) + "/health")
        assert health.status_code == 503
        (tmp_path / "broken").unlink()
        assert wait_for(lambda: answers().status_code == 200, PATIENCE)


def served_root(client):
    return str(client.base_url).rstrip("/").removesuffix("/v1")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("hangs", r"no replica could begin: " + NAME + r" did not load its model within 5 seconds"),
        ("dies", r"no replica could begin: A replica's process died"),
    ],
)
def test_without_a_ready_replica_the_command_ends(begun, how, says):
    served = begun(5, how)
    served.says(says)
    assert served.process.wait(PATIENCE) == 5
