"""Mailboxes: order, merging, bounds, and one wake-up however much news there is."""

import asyncio
import threading

import pytest

from forerun.engine.request import Delta, Finish
from forerun.interface.plan import TokenLogprobs
from forerun.serve.bridge import MERGE_AT, Bridge, merged
from forerun.types import RequestId
from tests.counted import lines

ONE = RequestId("one")


def delta(text, index=0, finish=None, **more):
    tokens = tuple(text.encode())
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in tokens)
    return Delta(ONE, index, text, tokens, logprobs, finish=finish, **more)


def on_loop(scenario):
    """Run `scenario(bridge, gaps)` on an event loop; gaps fills with what the bridge measures."""

    async def run():
        gaps = []
        return await scenario(Bridge(asyncio.get_running_loop(), gaps.append), gaps)

    return asyncio.run(run())


def in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


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


def test_news_from_another_thread_wakes_the_reader():
    async def scenario(bridge, gaps):
        box = bridge.events()
        reading = asyncio.create_task(box.take(60.0))
        await asyncio.sleep(0.01)
        in_thread(lambda: box.put(delta("a")))
        assert [news.text for news in await reading] == ["a"]
        assert await box.take(0.01) == []

    on_loop(scenario)


def test_stale_wake_ups_are_no_silence():
    """News taken without waiting leaves a wake-up behind; the next `take` must ignore it."""

    async def scenario(bridge, gaps):
        box = bridge.events()
        in_thread(lambda: box.put(delta("a")))
        assert [news.text for news in await box.take(60.0)] == ["a"]
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, box.put, delta("b"))
        assert [news.text for news in await box.take(60.0)] == ["b"]

    on_loop(scenario)


def test_one_wake_up_for_all_news_of_a_step():
    async def scenario(bridge, gaps):
        loop, calls = asyncio.get_running_loop(), []
        real = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: calls.append(args) or real(*args)
        boxes = [bridge.events() for _ in range(16)]
        readers = [asyncio.create_task(box.take(60.0)) for box in boxes]
        await asyncio.sleep(0)
        in_thread(lambda: [box.put(delta("a")) for _ in range(4) for box in boxes])
        assert len(calls) == 1
        assert [news[0].text for news in await asyncio.gather(*readers)] == ["aaaa"] * 16

    on_loop(scenario)


@pytest.mark.parametrize("choices", [1, 100])
def test_an_unread_mailbox_does_not_grow(choices):
    async def scenario(bridge, gaps):
        box = bridge.events()
        for turn in range(50):
            for index in range(choices):
                box.put(delta(chr(97 + turn % 26), index))
            assert len(box._news) <= MERGE_AT + 3 * choices
        news = await box.take(1.0)
        assert [piece.index for piece in news] == list(range(choices))
        assert {piece.text for piece in news} == {("abcdefghijklmnopqrstuvwxyz" * 2)[:50]}

    on_loop(scenario)


def test_merging_costs_little():
    """20,000 deltas into a mailbox nobody reads: the last ones cost no more than the first."""

    async def scenario(bridge, gaps):
        box = bridge.events()
        costs = [lines(lambda: [box.put(delta("a")) for _ in range(5000)]) for _ in range(4)]
        assert max(costs) < 1.1 * costs[0] < 5000 * 150
        assert len((await box.take(1.0))[0].text) == 20_000

    on_loop(scenario)


def test_close_ends_the_wait():
    async def scenario(bridge, gaps):
        box = bridge.events()
        reading = asyncio.create_task(box.take(60.0))
        await asyncio.sleep(0.01)
        box.close()
        assert await asyncio.wait_for(reading, 60.0) == []

    on_loop(scenario)


def test_gaps_are_those_of_one_choice():
    async def scenario(bridge, gaps):
        box = bridge.events()
        box.put(delta("a", 0))
        box.put(delta("a", 1))
        assert gaps == []
        await asyncio.sleep(0.05)
        box.put(delta("b", 0))
        assert len(gaps) == 1
        assert gaps[0] > 0.04  # It slept so long at least.
        assert box.last - box.first >= gaps[0]

    on_loop(scenario)


def test_news_after_the_loop_has_ended_does_no_harm():
    async def scenario(bridge, gaps):
        return bridge.events()

    box = on_loop(scenario)
    box.put(delta("a"))
    box.put(delta("b"))
