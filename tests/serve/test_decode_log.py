from dataclasses import replace

import pytest

from forerun.engine.metrics import EngineMetrics
from forerun.engine.stats import Load, snapshot
from forerun.errors import ConfigError
from forerun.options.config import ServeSettings
from forerun.serve.app import create_app
from forerun.serve.observe.decode_log import DecodeLog
from forerun.serve.server import uvicorn_config
from tests.cli.toys import toy_loaded

LOAD = Load(waiting=2, running=3, pages=100, pages_held=25, pages_evictable=0)


def test_a_line_every_so_many_steps():
    counts, seconds = EngineMetrics(), iter(range(0, 100, 2))
    state = [snapshot(counts, LOAD)]
    decode_log = DecodeLog(4, state[0], clock=lambda: float(next(seconds)))
    state[0] = replace(state[0], steps=3)
    assert decode_log.look(state[0]) == []
    state[0] = replace(
        state[0],
        steps=4,
        output_tokens=10,
        draft_tokens=8,
        accepted=6,
        acceptance_length=2.5,
        prompt_tokens=30,
        cached_tokens=16,
    )
    assert decode_log.look(state[0]) == [
        "Prefill batch. #new-token: 14, #cached-token: 16, token usage: 0.25, "
        "#running-req: 3, #queue-req: 2",
        "Decode batch. #token: 10, #step: 4, token usage: 0.25, accept len: 2.50, "
        "accept rate: 0.75, gen throughput (token/s): 5.00, #running-req: 3, #queue-req: 2",
    ]
    assert decode_log.look(state[0]) == []
    state[0] = replace(state[0], steps=9, output_tokens=15)
    (line,) = decode_log.look(state[0])
    assert "#token: 5, #step: 5" in line and "none drafted" in line


def test_a_certificate_that_cannot_be_used(tmp_path):
    settings = ServeSettings(ssl_keyfile=str(tmp_path / "k"), ssl_certfile=str(tmp_path / "c"))
    with toy_loaded() as loaded, pytest.raises(ConfigError, match=r"ssl-certfile .* No such file"):
        uvicorn_config(create_app(loaded, settings), settings)
