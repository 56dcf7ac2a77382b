"""The news of one HTTP request: order, merging, bounds."""

import asyncio

import pytest

from forerun.engine.request import Delta, Finish
from forerun.errors import EngineError
from forerun.interface.plan import TokenLogprobs
from forerun.serve.answers.session import MERGE_AT, EventQueue, merged
from forerun.serve.http.errors import ClientGoneError
from forerun.types import RequestId
from tests.counted import lines

ONE = RequestId("one")


def delta(text, index=0, finish=None, **more):
    tokens = tuple(text.encode())
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in tokens)
    return Delta(ONE, index, text, tokens, logprobs, finish=finish, **more)


def on_loop(scenario):
    """Run `scenario(queue)` on an event loop; it has a queue and fills `gaps` of it."""

    async def run():
        gaps = []
        queue = EventQueue(gaps.append)
        return await scenario(queue, gaps)

    return asyncio.run(run())


def test_merged_says_what_all_say():
    prompt = (TokenLogprobs(1, -2.0),)
    news = [
        delta("a", 0, prompt_logprobs=prompt, cached_tokens=16),
        delta("x", 1),
        delta("b", 0),
        delta("c", 0, Finish.STOP, stop_reason="d"),
    ]
    first, second = merged(news)
    assert (first.index, first.text, first.tokens) == (0, "abc", (97, 98, 99))
    assert [entry.token for entry in first.logprobs] == [97, 98, 99]
    assert (first.prompt_logprobs, first.cached_tokens) == (prompt, 16)
    assert (first.finish, first.stop_reason) == (Finish.STOP, "d")
    assert second == news[1]


def test_news_wakes_the_reader():
    async def scenario(box, gaps):
        reading = asyncio.create_task(box.take(60.0))
        await asyncio.sleep(0.01)
        box.put([delta("a")])
        assert [news.text for news in await reading] == ["a"]
        assert await box.take(0.01) == []

    on_loop(scenario)


def test_stale_wake_ups_are_no_silence():
    """News taken without waiting leaves a wake-up behind; the next `take` must ignore it."""

    async def scenario(box, gaps):
        box.put([delta("a")])
        assert [news.text for news in await box.take(60.0)] == ["a"]
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, box.put, [delta("b")])
        assert [news.text for news in await box.take(60.0)] == ["b"]

    on_loop(scenario)


def test_an_error_comes_after_the_news_before_it():
    async def scenario(box, gaps):
        box.put([delta("a")])
        box.fail(EngineError("it is gone"))
        assert [news.text for news in await box.take(60.0)] == ["a"]
        with pytest.raises(EngineError, match="it is gone"):
            await box.take(60.0)

    on_loop(scenario)


@pytest.mark.parametrize("choices", [1, 100])
def test_an_unread_mailbox_does_not_grow(choices):
    async def scenario(box, gaps):
        for turn in range(50):
            for index in range(choices):
                box.put([delta(chr(97 + turn % 26), index)])
            assert len(box._news) <= MERGE_AT + 3 * choices
        news = await box.take(1.0)
        assert [piece.index for piece in news] == list(range(choices))
        assert {piece.text for piece in news} == {("abcdefghijklmnopqrstuvwxyz" * 2)[:50]}

    on_loop(scenario)


def test_merging_costs_little():
    """20,000 deltas into a mailbox that is not read: the last ones cost no more than the first."""

    async def scenario(box, gaps):
        costs = [lines(lambda: [box.put([delta("a")]) for _ in range(5000)]) for _ in range(4)]
        assert max(costs) < 1.1 * costs[0] < 5000 * 150
        assert len((await box.take(1.0))[0].text) == 20_000

    on_loop(scenario)


def test_the_first_error_ends_the_wait():
    async def scenario(box, gaps):
        reading = asyncio.create_task(box.take(60.0))
        await asyncio.sleep(0.01)
        box.fail(ClientGoneError())
        box.fail(EngineError("it is gone"))
        with pytest.raises(ClientGoneError):
            await asyncio.wait_for(reading, 60.0)

    on_loop(scenario)


def test_gaps_are_those_of_one_choice():
    async def scenario(box, gaps):
        box.put([delta("a", 0)])
        box.put([delta("a", 1)])
        assert gaps == []
        await asyncio.sleep(0.05)
        box.put([delta("b", 0)])
        assert len(gaps) == 1
        assert gaps[0] > 0.04  # It slept so long at least.

    on_loop(scenario)
