import queue
import threading

import numpy as np
import pytest

from forerun.build.engine import make_engine
from forerun.client.completion import Completion, acceptance_length, complete, make_request, stream
from forerun.engine.request import Delta, Finish, Speculation, SpeculationStats
from forerun.errors import EngineError, RequestError
from tests.cli.toys import toy_loaded, toy_target

HI = np.array([72, 105], np.int32)


def test_options_become_sampling_and_stopping():
    request = make_request(
        HI, (257,), max_tokens=7, temperature=0.5, seed=3, stop="end", logit_bias=((5, 1.0),), n=2
    )
    assert request.sampling.temperature == 0.5
    assert request.sampling.stop_tokens == request.stopping.stop_tokens == (257,)
    assert request.stopping.stop == ("end",)
    assert request.stopping.max_tokens == 7
    assert make_request(HI, (257,), ignore_eos=True).stopping.stop_tokens == ()
    assert make_request(HI).sampling.temperature == 0.0


def test_unknown_options_and_empty_prompts_are_refused_by_name():
    with pytest.raises(RequestError, match="temprature") as caught:
        make_request(HI, temprature=1)
    assert caught.value.field == "temprature"
    with pytest.raises(RequestError, match="empty"):
        make_request(HI[:0])


def test_together_alone_and_streamed_agree():
    with toy_loaded() as loaded:
        prompts = [np.frombuffer(text, np.uint8).astype(np.int32) for text in (b"Hi", b"abc", b"z")]

        def requests():
            return [
                make_request(p, max_tokens=30, temperature=0.7, seed=i, n=2)
                for i, p in enumerate(prompts)
            ]

        together = complete(loaded.engine, requests())
        alone = complete(loaded.engine, requests(), at_once=1)
        for one, two, request in zip(together, alone, requests(), strict=True):
            streamed = [Completion(0), Completion(1)]
            for delta in stream(loaded.engine, request):
                streamed[delta.index].add(delta)
            for a, b, c in zip(one, two, streamed, strict=True):
                assert a.tokens == b.tokens == c.tokens
                assert a.text == b.text == c.text
                assert a.finish == Finish.LENGTH and len(a.tokens) == 30
        assert together[0][0].tokens != together[0][1].tokens


class Recorder:
    """Counts requests in flight; answers when the test lets it."""

    def __init__(self):
        self.alive, self.flying, self.most, self.aborted = True, [], 0, []
        self.sent = queue.SimpleQueue()

    def submit(self, request, sink):
        self.flying.append(request.id)
        self.most = max(self.most, len(self.flying))
        self.sent.put((request.id, sink))

    def abort(self, name):
        self.aborted.append(name)

    def answer(self, count, **news):
        for _ in range(count):
            name, sink = self.sent.get(timeout=60)
            self.flying.remove(name)
            sink(Delta(name, 0, **news))


def test_no_more_than_at_once_are_in_flight_and_progress_is_reported():
    engine, progress = Recorder(), []
    helper = threading.Thread(target=engine.answer, args=(7,), kwargs={"finish": Finish.STOP})
    helper.start()
    complete(engine, [make_request(HI) for _ in range(7)], at_once=3, finished=progress.append)
    helper.join()
    assert engine.most == 3
    assert progress == [1, 2, 3, 4, 5, 6, 7]
    assert engine.aborted == []


def test_a_failed_request_raises_and_the_others_are_aborted():
    engine = Recorder()
    requests = [make_request(HI) for _ in range(3)]
    helper = threading.Thread(
        target=engine.answer, args=(1,), kwargs={"finish": Finish.ERROR, "error": "not finite"}
    )
    helper.start()
    with pytest.raises(EngineError, match="not finite"):
        complete(engine, requests)
    helper.join()
    assert set(engine.aborted) >= {requests[1].id, requests[2].id}


def test_a_dead_engine_is_noticed():
    engine = Recorder()
    engine.alive = False
    with pytest.raises(EngineError, match="died"):
        complete(engine, [make_request(HI)])


def test_leaving_a_stream_aborts_its_request():
    with toy_target(delay=0.005) as target:
        engine = make_engine(target, target.config)
        engine.start()
        try:
            deltas = stream(engine, make_request(HI, max_tokens=900, ignore_eos=True))
            next(deltas)
            deltas.close()
            assert engine.drain(10.0)
            assert engine.stats().finished[Finish.ABORT] == 1
            engine.check()
        finally:
            engine.shutdown()


def test_acceptance_length_counts_tokens_per_step():
    off = Speculation(enabled=False)
    with toy_loaded() as loaded:
        plain = complete(loaded.engine, [make_request(HI, max_tokens=50, speculation=off)])[0][0]
        fast = complete(loaded.engine, [make_request(HI, max_tokens=50)])[0][0]
    assert plain.tokens == fast.tokens
    assert acceptance_length([plain.stats]) == 1.0
    assert fast.stats.steps + fast.stats.accepted == pytest.approx(50, abs=8)
    assert acceptance_length([fast.stats]) > 1.5
    assert acceptance_length([None, SpeculationStats(4, 8, 4, (0, 4))]) == 2.0
    assert acceptance_length([]) == 1.0
