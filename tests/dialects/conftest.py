"""One toy server for all dialects, and what it says to whom it always said it."""

import pytest

from tests.worlds.servers import serving, sound

GUARDED = {"api_keys": ["sesame"], "strict_model_names": True}


@pytest.fixture(scope="session")
def server(request, tmp_path_factory):
    """A server of one model, or of two (see requests.with_two)."""
    models = getattr(request, "param", None)
    with sound(tmp_path_factory.mktemp("dialects"), delay=0.001, models=models) as server:
        yield server


@pytest.fixture(scope="session")
def thinking(tmp_path_factory):
    """Thinks from a first i to the next one."""
    with sound(tmp_path_factory.mktemp("thinking"), settings={"reasoning_end": "i"}) as server:
        yield server


@pytest.fixture(scope="session")
def guarded(tmp_path_factory):
    """Wants a key, and the name of its model."""
    with serving(tmp_path_factory.mktemp("guarded"), settings=GUARDED) as server:
        yield server


@pytest.fixture(scope="session")
def calling(tmp_path_factory):
    """Calls a tool: Ollama has no way to demand a call."""
    script = ['{"name": "travel", "parameters": {"city": "Rome", "days": 1}}']
    settings = {"tool_parser": "llama3"}
    with sound(tmp_path_factory.mktemp("calling"), settings=settings, script=script) as server:
        yield server
