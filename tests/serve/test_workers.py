"""What takes time is not done on the event loop, and small bodies do not wait for large ones."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from starlette.testclient import TestClient

from forerun.errors import WorkerError
from forerun.options.config import ServeSettings
from forerun.serve.app import create_app
from forerun.serve.workers import HUGE, LARGE, LARGE_AT_ONCE, Workers
from forerun.text.rendering import is_large
from tests.cli.toys import toy_loaded

PATIENCE = 60.0
HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


class Waiting:
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
        renderer = loaded.chat._renderer = Waiting(loaded.chat._renderer)
        with (
            TestClient(create_app(loaded, ServeSettings())) as client,
            ThreadPoolExecutor() as pool,
        ):
            asked = pool.submit(client.post, "/v1/chat/completions", json=HELLO)
            assert renderer.begun.wait(PATIENCE)
            assert client.get("/health").status_code == 200
            renderer.may.set()
            assert asked.result().status_code == 200
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

        class Lost(Waiting):
            def render(self, names):
                raise WorkerError("it was ended by somebody else")

        loaded.chat._renderer = Lost(loaded.chat._renderer)
        with TestClient(create_app(loaded, ServeSettings())) as client:
            answer = client.post("/v1/chat/completions", json=HELLO)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "worker_process_lost"


def test_huge_bodies_are_worked_on_one_at_a_time_and_large_ones_beside_them(monkeypatch):
    returned = []
    monkeypatch.setattr("forerun.serve.workers.give_memory_back", lambda: returned.append(1))

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
