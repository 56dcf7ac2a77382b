"""Servers that keep pages in one folder and are killed while they write: every answer is that of a
server without a folder, and the folder never exceeds its size.
"""

import random
import subprocess
import sys
import time
from contextlib import closing, suppress

import numpy as np
import pytest

from forerun.build.engine import load
from forerun.client.completion import complete, make_request
from forerun.options.config import EngineConfig

pytestmark = pytest.mark.chaos
LIMIT = 400_000
TEXTS = 8

SERVER = """
import sys
from contextlib import suppress
from tests.chaos.test_pages_on_disk import LIMIT, config, generate
from forerun.build.engine import load

loaded = load(config(sys.argv[1]))
for order in sys.stdin:
    text, cached = generate(loaded, int(order))
    print(text, cached, flush=True)
loaded.close()
print(loaded.engine.stats().store, file=sys.stderr)
"""


def config(folder):
    kept = {"kv_store": folder, "kv_store_size": LIMIT} if folder else {}
    return EngineConfig(model="toy", context=4096, kv_tokens=16384, **kept)


def prompt(number):
    """Texts that share long beginnings."""
    own = np.random.default_rng(number).integers(97, 123, 1200)
    shared = np.random.default_rng(number % 3).integers(97, 123, 900)
    return np.concatenate([shared, own]).astype(np.int32)


def generate(loaded, number):
    """The tokens of an answer in one word, and how many of its prompt's were found."""
    request = make_request(prompt(number), max_tokens=12, temperature=0.7, seed=number)
    ((done,),) = complete(loaded.engine, [request])
    return ",".join(map(str, done.tokens)), done.cached_tokens


class Child:
    def __init__(self, folder):
        line = [sys.executable, "-c", SERVER, str(folder)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True)

    def send(self, number):
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()

    def receive(self):
        text, cached = self.process.stdout.readline().split()
        return text, int(cached)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(60) == 0


@pytest.fixture(scope="module")
def right():
    with closing(load(config(None))) as loaded:
        return [generate(loaded, number)[0] for number in range(TEXTS)]


def size(folder):
    total = 0
    for path in folder.glob("*/*.*"):
        with suppress(FileNotFoundError):  # Another server has just made room.
            total += path.stat().st_size
    return total


@pytest.mark.parametrize("servers", [1, 2])
def test_killed_while_writing(tmp_path, right, servers):
    chance, folder, reused = random.Random(servers), tmp_path / "kv", 0
    for _ in range(6):
        children = [Child(folder) for _ in range(servers)]
        for _ in range(4):
            numbers = [chance.randrange(TEXTS) for _ in children]
            for child, number in zip(children, numbers, strict=True):
                child.send(number)
            for child, number in zip(children, numbers, strict=True):
                text, cached = child.receive()
                assert text == right[number]
                reused += cached
            assert size(folder) <= LIMIT
        for child, number in zip(children, numbers, strict=True):
            child.send((number + 1) % TEXTS)
        time.sleep(chance.random() * 0.05)  # Reading, writing or done.
        for child in children:
            child.kill()
        assert size(folder) <= LIMIT
    last = Child(folder)
    last.send(number)
    text, cached = last.receive()
    assert text == right[number] and reused
    last.close()
    assert size(folder) <= LIMIT
    again = Child(folder)
    again.send(number)
    assert again.receive() == (right[number], 2096)
    again.close()


def test_bytes_changed_at_random(tmp_path, right):
    """Whatever bytes are changed, also under a running server, no text changes."""
    chance, folder = random.Random(7), tmp_path / "kv"
    child = Child(folder)
    for turn in range(40):
        number = chance.randrange(TEXTS)
        child.send(number)
        assert child.receive()[0] == right[number]
        for path in folder.glob("*/*.*"):
            with path.open("r+b") as file:
                for _ in range(chance.randrange(4)):
                    file.seek(chance.randrange(max(path.stat().st_size, 1)))
                    file.write(chance.randbytes(chance.choice([1, 1, 8, 200])))
                if not chance.randrange(6):
                    file.truncate(chance.randrange(path.stat().st_size + 1))
        if not turn % 5:
            child.close()
            child = Child(folder)
    child.close()
