"""What each process opens when the engine is another one: the order, by events."""

import asyncio
import threading

import pytest

from forerun.client.engine_process import EngineCommand, EngineProcess
from forerun.client.engine_start import EngineProgram
from forerun.client.messages import Loading
from forerun.errors import ModelError
from forerun.hub.catalog import is_here
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.answers import service
from forerun.serve.answers.service import Service
from forerun.serve.http.errors import ApiError

PATIENCE = 60.0


class Chat:
    def __init__(self):
        self.closed = asyncio.Event()

    def close(self):
        self.closed.set()


def launched(monkeypatch, model, load, text):
    """Why a Service failed whose engine awaits `load`; `text` opens the tokenizer."""

    async def run():
        async def opened(command, loading):
            await load()
            raise ModelError("the engine's own words")

        monkeypatch.setattr(EngineProcess, "open", opened)
        monkeypatch.setattr(service, "open_text", text)
        started = Service(
            EngineCommand(EngineProgram((), {}), EngineConfig(model=model)), ServeSettings()
        )
        started.start()
        await asyncio.wait_for(started.failed.wait(), PATIENCE)
        return started.failure

    return asyncio.run(run())


def test_the_tokenizer_is_opened_while_the_engine_loads(monkeypatch):
    begun = threading.Event()

    async def load():
        assert await asyncio.to_thread(begun.wait, PATIENCE), "the tokenizer was not opened"

    def text(config):
        begun.set()
        return None, None

    assert str(launched(monkeypatch, "toy", load, text)) == "the engine's own words"


def test_what_has_to_be_fetched_is_left_to_the_engine(monkeypatch):
    opened = []

    async def load():
        await asyncio.sleep(0)

    assert launched(monkeypatch, "organisation/name", load, opened.append) is not None
    assert not opened


@pytest.mark.parametrize("fails", [False, True])
def test_an_unused_tokenizer_is_closed(monkeypatch, fails):
    async def run():
        chat, may = Chat(), threading.Event()
        loop = asyncio.get_running_loop()

        def text(config):
            assert may.wait(PATIENCE)
            if fails:
                raise ModelError("the same file")
            return None, chat

        async def opened(command, loading):
            raise ModelError("the engine's own words")

        errors = []
        loop.set_exception_handler(lambda _, context: errors.append(context))
        monkeypatch.setattr(EngineProcess, "open", opened)
        monkeypatch.setattr(service, "open_text", text)
        started = Service(
            EngineCommand(EngineProgram((), {}), EngineConfig(model="toy")), ServeSettings()
        )
        started.start()
        await asyncio.wait_for(started.failed.wait(), PATIENCE)
        may.set()
        if not fails:
            await asyncio.wait_for(chat.closed.wait(), PATIENCE)
        await started.close()
        return errors

    assert asyncio.run(run()) == []


def test_what_is_here(tmp_path, monkeypatch):
    assert is_here("toy") and is_here(str(tmp_path))
    assert not is_here(str(tmp_path / "none")) and not is_here("organisation/name")
    monkeypatch.setattr("forerun.hub.catalog.default_cache_dir", lambda: tmp_path)
    assert not is_here("smollm2-135m")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert is_here("smollm2-135m")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("reading weights", 450, 1000), "The model is still loading (reading weights, 45 %)."),
        (("waiting for another process", 0, 0), "loading (waiting for another process)."),
    ],
)
def test_requests_while_a_model_loads_get_its_progress(monkeypatch, words, message):
    async def run():
        event = asyncio.Event()

        async def opened(command, loading):
            loading(Loading(*words).sentence())
            event.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(EngineProcess, "open", opened)
        service = Service(
            EngineCommand(EngineProgram((), {}), EngineConfig(model="org/name")), ServeSettings()
        )
        with pytest.raises(ApiError, match=r"still loading\.$"):
            service.served()
        service.start()
        await asyncio.wait_for(event.wait(), PATIENCE)
        with pytest.raises(ApiError) as raised:
            service.enter()
        await service.close()
        return raised.value

    error = asyncio.run(run())
    assert error.status == 503 and message in str(error)
