"""A server's application on the toy, in this process, and what it streams."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.testclient import TestClient

from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app
from tests.cli.toys import CONFIG, toy_loaded


@contextmanager
def toy_client(
    settings: ServeSettings | None = None, config: EngineConfig = CONFIG
) -> Iterator[TestClient]:
    """A client of the application, which ends with it; nothing may have leaked then."""
    settings = settings or ServeSettings()
    with toy_loaded(config) as loaded, TestClient(create_app(loaded, settings)) as client:
        yield client


def events(answer) -> list:
    """The JSON of all events of a streamed answer."""
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
