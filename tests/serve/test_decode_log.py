from dataclasses import replace

import pytest

from forerun.engine.metrics import EngineMetrics
from forerun.engine.stats import Load, snapshot
from forerun.errors import ConfigError
from forerun.options.config import ServeSettings
from forerun.serve.app import create_app
from forerun.serve.decode_log import DecodeLog
from forerun.serve.server import uvicorn_config
from tests.cli.toys import toy_loaded

LOAD = Load(waiting=2, running=3, pages=100, pages_held=25, pages_kept=0)


def test_a_line_every_so_many_steps():
    counts, seconds = EngineMetrics(), iter(range(0, 100, 2))
    state = [snapshot(counts, LOAD)]
    decode_log = DecodeLog(4, state[0], clock=lambda: float(next(seconds)))
    state[0] = replace(state[0], steps=3)
    assert decode_log.look(state[0]) is None
    state[0] = replace(
        state[0], steps=4, output_tokens=10, draft_tokens=8, accepted=6, acceptance_length=2.5
    )
    assert decode_log.look(state[0]) == (
        "decode: running 3, queue 2, tokens 10 in 4 steps, 5.0 tokens/s, cache 25%, "
        "acceptance length 2.50, rate 0.75"
    )
    assert decode_log.look(state[0]) is None
    state[0] = replace(state[0], steps=9, output_tokens=15)
    assert "tokens 5 in 5 steps" in (line := decode_log.look(state[0])) and "none drafted" in line


def test_a_certificate_that_cannot_be_used(tmp_path):
    settings = ServeSettings(ssl_keyfile=str(tmp_path / "k"), ssl_certfile=str(tmp_path / "c"))
    with toy_loaded() as loaded, pytest.raises(ConfigError, match=r"ssl-certfile .* No such file"):
        uvicorn_config(create_app(loaded, settings), settings)
