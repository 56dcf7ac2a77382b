"""An engine that does not come out of a step is said to be stuck, and its clients are answered."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from forerun.options.config import ServeSettings
from forerun.serve.app import create_app
from tests.cli.toys import toy_loaded
from tests.worlds.servers import wait_for

PATIENCE = 300.0
SETTINGS = ServeSettings(watchdog_seconds=0.1, keep_alive_seconds=0.1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stuck_engine(stream, monkeypatch):
    with toy_loaded() as loaded:
        step, may = loaded.engine._core.step, threading.Event()

        def stuck():
            assert may.wait(PATIENCE)
            return step()

        body = {"prompt": "Hi", "max_tokens": 4, "stream": stream}
        app = create_app(loaded, SETTINGS)
        with TestClient(app) as client, ThreadPoolExecutor() as pool:
            assert client.post("/v1/completions", json=body).status_code == 200
            monkeypatch.setattr(loaded.engine._core, "step", stuck)
            future = pool.submit(client.post, "/v1/completions", json=body)
            assert wait_for(lambda: client.get("/health").status_code == 503)
            assert client.get("/health").json()["error"]["code"] == "engine_stuck"
            answer = future.result(PATIENCE)
            assert "engine_stuck" in answer.text
            assert answer.status_code in ((200, 503) if stream else (503,))
            assert client.post("/v1/completions", json=body).status_code == 503
            monkeypatch.setattr(loaded.engine._core, "step", step)
            may.set()
            assert wait_for(lambda: client.get("/health").status_code == 200)
            assert client.post("/v1/completions", json=body).status_code == 200
