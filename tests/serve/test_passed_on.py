"""Deltas that are written as they come, or by a stream's task that they wake: the same bytes."""

import asyncio
import json
from dataclasses import replace

import pytest

from forerun.engine.request import Delta
from forerun.options.config import ServeSettings
from forerun.serve.answers.session import EventQueue, Tally, merged
from forerun.serve.app import create_app
from forerun.serve.dialects.openai import completions
from forerun.serve.dialects.openai.completions import ChatDialect, CompletionDialect
from forerun.serve.http.connection import CHUNKS
from forerun.types import RequestId
from tests.cli.toys import CONFIG, toy_loaded
from tests.dialects.requests import MESSAGES
from tests.e2e.test_two_processes import REQUESTS, constant
from tests.worlds.servers import wait_for

TURNS = 30
"""Of a loop: what a delta makes tasks do is done."""

PLAIN = {"prompt": "Hi", "temperature": 0, "max_tokens": 12}
STREAMS = {
    **{name: call for name, call in REQUESTS.items() if not name.startswith("no")},
    "usage": (
        "/v1/completions",
        {**PLAIN, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "ids": ("/v1/completions", {**PLAIN, "return_token_ids": True}),
    "choices": ("/v1/chat/completions", {**REQUESTS["chat"][1], "n": 3}),
    "generate": ("/api/generate", {"prompt": "Hi", "options": {"num_predict": 12}}),
    "llama.cpp": ("/completion", {"prompt": "Hi", "n_predict": 12, "seed": 1}),
    "lines": ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 12, "seed": 1}),
}


class ReplayingEngine:
    """An EngineClient whose deltas are those of the engine, one at a time: each comes when what the
    one before it set off is done.
    """

    def __init__(self, engine, local):
        self._engine, self._local = engine, local

    def __getattr__(self, name):
        return getattr(self._local, name)

    def submit(self, request, sink):
        news = []
        self._engine.forget_prefixes()
        self._engine.submit(request, news.append)
        assert wait_for(lambda: sum(one.finish is not None for one in news) == request.n)
        self._feeding = asyncio.create_task(self._feed(news, sink))

    async def _feed(self, news, sink):
        for delta in news:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            sink.put([delta])


class Written:
    """The Chunks of a connection whose client reads, or not; appends to `parts`."""

    def __init__(self, parts, writable=True):
        self.parts, self.writable, self.count = parts, writable, 0

    def write(self, chunk):
        if chunk:
            self.parts.append(chunk)
            self.count += 1


async def streamed(app, route, body, chunks):
    """The parts of a streamed answer."""
    content = json.dumps({**body, "stream": True}).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        if message.get("body"):
            chunks.parts.append(message["body"])

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": route}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    about = {"headers": headers, "query_string": b"", "client": ("127.0.0.1", 1), "scheme": "http"}
    state = {"state": {CHUNKS: chunks}}
    await app({**scope, **about, **state}, receive, send)
    return chunks.parts


def events(parts):
    """The lines of a stream, without what is another thing each time."""
    lines = [line.removeprefix("data: ") for line in b"".join(parts).decode().split("\n")]
    read = [constant(json.loads(line)) if line[:1] == "{" else line for line in lines]
    return [{**line, "timings": None} if isinstance(line, dict) else line for line in read]


@pytest.fixture(scope="module")
def loaded():
    """Without drafts: where a step begins does not depend on what was answered before."""
    with toy_loaded(replace(CONFIG, speculative_algorithm="OFF")) as loaded:
        yield loaded


def on_app(loaded, scenario, **settings):
    """Run `scenario(app)` with an application whose engine replays."""

    async def run():
        app = create_app(loaded, ServeSettings(**settings))
        async with app.router.lifespan_context(app):
            service = app.state.service
            served = service.served()
            service._served = replace(served, engine=ReplayingEngine(loaded.engine, served.engine))
            return await scenario(app)

    # The application closes the model, which other tests use as well.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loaded), "close", lambda _: None)
        return asyncio.run(run())


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("settings", [{}, {"reasoning_end": "i"}], ids=["plain", "thinking"])
def test_streams_are_the_same_whether_a_task_runs_for_a_delta_or_none(loaded, name, settings):
    async def scenario(app):
        held = Written([], writable=False)
        slow = await streamed(app, *STREAMS[name], held)
        at_once = Written([])
        fast = await streamed(app, *STREAMS[name], at_once)
        return slow, fast, held.count, at_once.count

    slow, fast, never, often = on_app(loaded, scenario, **settings)
    assert events(slow) == events(fast)
    assert never == 0 and (often > 2 or len(slow) < 5)


TEXTS = ["b", "a", "text_completion", ' "', "\\", ':"a",', "\u00e9\n", "", "data: ", "\ud800"]

BODIES = {
    "plain": {},
    "usage": {"stream_options": {"include_usage": True}},
    "running": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "timed": {"timings_per_token": True},
    "ids": {"return_token_ids": True},
    "lossy": {},
    "constrained": {"regex": ".*"},
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("more", [{"prompt": 'x"', "echo": True, "n": 2}, {"messages": MESSAGES}])
def test_kept_bytes_around_a_text_are_those_it_has(loaded, name, more, monkeypatch):
    monkeypatch.setattr(completions, "monotonic", lambda: 1.0)
    kind = ChatDialect if "messages" in more else CompletionDialect
    if name == "lossy":
        for made in ("chat_generation", "completion_generation"):
            own = getattr(completions, made)
            lossy = lambda *args, own=own: replace(own(*args), lossy={"single": 0.3})  # noqa: E731
            monkeypatch.setattr(completions, made, lossy)

    async def scenario(app):
        first, second = kind(), kind()
        generation = first.parse({**more, **BODIES[name], "stream": True}, app.state.service)
        second.parse({**more, **BODIES[name], "stream": True}, app.state.service)
        second._envelope = first._envelope
        tally = Tally(generation.generation)
        tally.began = tally.first = 0.0
        kept = []
        for text in (*TEXTS, *TEXTS):
            for index in (1, 0, 0):
                news = [(index, Delta(RequestId("one"), index, text, (65,)))]
                tally.add(news[0][1])
                kept.append((first.events(news, tally, False), second._chunks(news, tally, False)))
        return kept, len(first._around)

    kept, count = on_app(loaded, scenario)
    assert [one for one, _ in kept] == [other for _, other in kept]
    assert count == (2 if name in ("plain", "usage") else 0)


def test_a_client_that_reads_again_gets_everything_in_order(loaded):
    """From a delta that has to wait until the client reads, the task writes; then no task again."""

    class Stalling(Written):
        asked = 0

        @property
        def writable(self):
            self.asked += 1
            return self.asked % 3 > 0

        @writable.setter
        def writable(self, _):
            pass

    async def scenario(app):
        call = STREAMS["usage"]
        return await streamed(app, *call, Written([])), await streamed(app, *call, Stalling([]))

    steady, stalled = on_app(loaded, scenario)
    assert events(steady) == events(stalled)


def test_an_error_of_a_dialect_ends_its_own_stream_only(loaded, monkeypatch, caplog):
    written = CompletionDialect.events

    def fails(self, news, tally, last):
        if tally.output_tokens > 3 and tally.generation.requests[0].prompt[0] == ord("X"):
            raise ZeroDivisionError
        return written(self, news, tally, last)

    monkeypatch.setattr(CompletionDialect, "events", fails)

    async def scenario(app):
        bad = streamed(app, "/v1/completions", {**PLAIN, "prompt": "X"}, Written([]))
        good = streamed(app, "/v1/completions", PLAIN, Written([]))
        return await asyncio.gather(bad, good, return_exceptions=True)

    bad, good = on_app(loaded, scenario)
    assert isinstance(bad, ZeroDivisionError) and "failed" in caplog.text
    assert good[-1].endswith(b"data: [DONE]\n\n")


def test_deltas_that_are_passed_on_wake_no_reader():
    passed = []

    async def scenario():
        queue = EventQueue(lambda _: None, lambda deltas: passed.append(deltas) or len(passed) < 3)
        reading = asyncio.create_task(queue.take(60.0))
        await asyncio.sleep(0)
        news = [Delta(RequestId("one"), 0, str(number)) for number in range(4)]
        for delta in news:
            queue.put([delta])
        assert await reading == merged(news[2:]), "what is not passed on, and what comes behind it"
        assert passed == [[delta] for delta in news[:3]]

    asyncio.run(scenario())
