"""Requests to an engine whose executor has window pages, against one that keeps everything."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.cache.folder import StoreFolder
from forerun.cache.store import PageStore
from forerun.control.policy import FixedPolicy
from forerun.drafters.none import NoDrafter
from forerun.engine.disk_states import DiskWindows
from forerun.engine.request import Finish
from forerun.engine.thread import Engine, EngineOptions
from forerun.errors import EngineError
from forerun.interface.executor import window_pages_of
from forerun.interface.grammars import NoGrammars
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.sampling import Sampling
from tests.engine.toys import TOKENIZER, VOCAB, RecordingSink, ask, make
from tests.parity.driver import Driver, Row, limits

WINDOW = 25
"""What is kept of a sequence: the models' windows are of 24 tokens."""
BASE = np.random.default_rng(5).integers(97, 113, 400).astype(np.int32)


def shaped(page=16, slots=3, nodes=32, tokens=704, windows=2):
    """Limits with window pages for so many whole windows and a step; without any for none."""
    count = windows * window_pages_of(512, WINDOW, page) + -(-nodes // page)
    made = limits(VOCAB, page_size=page, pages=tokens // page, slots=slots, max_nodes=nodes)
    return replace(made, window=WINDOW, window_pages=count) if windows else made


class Known:
    """Texts of an engine that keeps everything, each run alone and once."""

    LIMITS = limits(VOCAB, slots=4, pages=128)

    def __init__(self, executor):
        self.executor, self._texts = executor, {}

    def texts(self, request):
        key = request.prompt.tobytes(), request.sampling.seed, request.sampling.temperature
        if (*key, request.n) not in self._texts:
            sink, engine = RecordingSink(), make(executor=self.executor)
            longest = replace(request.stopping, max_tokens=60)
            engine.submit(replace(request, stopping=longest, id="known"), sink)
            while engine.step_once():
                pass
            texts = [sink.tokens("known", index) for index in range(request.n)]
            self._texts[(*key, request.n)] = texts
        most = request.stopping.max_tokens
        return [tokens[:most] for tokens in self._texts[(*key, request.n)]]

    def following(self, slot_init, text, count):
        """What comes after `text` in some answer that is known: a drafter's future."""
        for (prompt, *_), answers in self._texts.items():
            start = np.frombuffer(prompt, np.int32).tolist()
            for answer in answers:
                if (start + answer)[: len(text)] == text:
                    return (start + answer)[len(text) : len(text) + count]
        return []


def engine_on(executor, drafter=None, overlap=False):
    """An engine that drafts trees of up to six tokens where there is a drafter."""
    policy = FixedPolicy(6, 4) if drafter else FixedPolicy(0, 0)
    options = EngineOptions(overlap=overlap)
    return Engine(executor, drafter or NoDrafter(), policy, TOKENIZER, NoGrammars(), options)


def attach_store(engine, executor, folder, least=40):
    """Keep pages and windows in a folder."""
    page, contents = executor.limits.page_size, executor.pages
    kept = StoreFolder(folder, 1 << 24), f"x{page}", 4 * page
    windows = PageStore(*kept, contents.window_page_bytes, "windows")
    pages = PageStore(*kept, contents.page_bytes)
    engine.attach_store(pages, least, DiskWindows(windows, contents, page))


def stored(engine):
    """(pages, windows) on disk, once all are written."""
    disk = engine._core.scheduler.disk
    while not disk.idle:
        engine.step_once()
        engine.check()
    return len(disk.store), len(disk._beside.store)


def finished(engine, executor):
    """Run all steps; after each of them nothing is lost."""
    while engine.step_once():
        engine.check()
        executor.windows.check()


class Schedule:
    """Requests that begin alike, come at any time, and are sometimes cancelled."""

    def __init__(self, engine, executor, known, seed):
        self.engine, self.executor, self.known = engine, executor, known
        self.random, self.sink, self.requests = np.random.default_rng(seed), RecordingSink(), {}

    def submit(self):
        pick = self.random.integers
        prompt = BASE[: pick(1, 180 if pick(2) else 6)]
        if pick(4) == 0:
            prompt = np.append(prompt, pick(97, 113, pick(1, 60)).astype(np.int32))
        how = {"n": int(pick(1, 3)), "seed": int(pick(2)), "temperature": float(pick(2))}
        request = ask(str(len(self.requests)), prompt, int(pick(1, 60)), **how)
        self.known.texts(request)
        self.requests[request.id] = request
        self.engine.submit(request, self.sink)

    def run(self, requests):
        while len(self.requests) < requests:
            if self.random.random() < 0.2:
                self.submit()
            if self.requests and self.random.random() < 0.02:
                self.engine.abort(str(self.random.integers(len(self.requests))))
            self.engine.step_once()
            self.engine.check()
            self.executor.windows.check()
        finished(self.engine, self.executor)
        for request in self.requests.values():
            for index, expected in enumerate(self.known.texts(request)):
                actual = self.sink.tokens(request.id, index)
                aborted = self.sink.last(request.id, index).finish == Finish.ABORT
                assert actual == expected[: len(actual) if aborted else None]


def answered(engine, executor, known, *requests):
    """Run requests to their ends; returns how many tokens of each were in the prefix cache."""
    sink = RecordingSink()
    for request in requests:
        engine.submit(request, sink)
    finished(engine, executor)
    for request in requests:
        assert [sink.tokens(request.id)] == known.texts(request)
    return [sink.of(request.id)[0].cached_tokens for request in requests]


def reads_what_was_given_back(executor):
    """What lies behind a window is found no more, and neither read nor written."""
    with Driver(executor) as driver:
        driver.open(0, BASE[:390])
        while driver.sequences[0].kv_len < 390:
            driver.step([Row(0, known=20)])
        sequence = driver.sequences[0]
        early = np.array(sequence.pages[:19], np.int32)
        assert executor.reusable_prefix_len(BASE[:304], pages=early) < 300
        text = TokenText(BASE[:310])
        with pytest.raises(EngineError, match="of a window was given back"):
            executor.open(SlotInit(1, text, 310, Sampling(), cached=304, pages=early))
        executor.windows.begin = lambda plan, trees: None  # As if nothing had been looked after.
        sequence.kv_len = 304
        with pytest.raises(EngineError, match="a page of a window that was given back"):
            driver.step([Row(0, known=4)])
