"""Layers with a window give back what lies behind it, and no text changes: against an engine that
keeps everything.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.build import calibration
from forerun.control.policy import FixedPolicy
from forerun.drafters.none import NoDrafter
from forerun.engine.options import EngineOptions
from forerun.engine.request import Finish
from forerun.engine.thread import Engine
from forerun.errors import EngineError
from forerun.executors.cpu import CpuExecutor, WindowedCpuExecutor
from forerun.interface.executor import window_pages_of
from forerun.interface.grammars import NoGrammars
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.sampling import Sampling
from tests.engine.drafters import ErraticDrafter
from tests.engine.toys import TOKENIZER, VOCAB, Ear, ask, make
from tests.parity.driver import Driver, Row, limits

WINDOW = 25
"""What is kept of a sequence: the models' windows are of 24 tokens."""
BASE = np.random.default_rng(5).integers(97, 113, 400).astype(np.int32)


def shaped(page=16, slots=3, nodes=32, tokens=704, windows=2):
    """Limits with window pages for so many whole windows and a step."""
    count = windows * window_pages_of(512, WINDOW, page) + -(-nodes // page)
    made = limits(VOCAB, page_size=page, pages=tokens // page, slots=slots, max_nodes=nodes)
    return replace(made, window=WINDOW, window_pages=count)


CACHES = {"float32": (None, "same"), "float16": ("Q8_0", "same"), "q8_0": ("Q8_0", "q8_0")}
"""How keys and values are stored: of a file of which kind, and kv_dtype."""


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("gemma3_text", None, vocab_size=VOCAB)


@pytest.fixture
def windowed(source):
    made = []

    def build(of=None, kv_dtype="same", **shape):
        made.append(WindowedCpuExecutor(of or source, shaped(**shape), 1, kv_dtype=kv_dtype))
        return made[-1]

    yield build
    for each in made:
        each.shutdown()


class Known:
    """Texts of an engine that keeps everything, each run alone and once."""

    def __init__(self, source, kv_dtype="same"):
        kept = limits(VOCAB, slots=4, pages=128)
        self.executor = CpuExecutor(source, kept, 1, kv_dtype=kv_dtype)
        self._texts = {}

    def texts(self, request):
        key = request.prompt.tobytes(), request.sampling.seed, request.sampling.temperature
        if (*key, request.n) not in self._texts:
            ear, engine = Ear(), make(executor=self.executor)
            longest = replace(request.stopping, max_tokens=60)
            engine.submit(replace(request, stopping=longest, id="known"), ear)
            while engine.step_once():
                pass
            found = [ear.tokens("known", index) for index in range(request.n)]
            self._texts[(*key, request.n)] = found
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


def engine_on(executor, drafter=None):
    """An engine that drafts trees of up to six tokens where there is a drafter."""
    policy = FixedPolicy(6, 4) if drafter else FixedPolicy(0, 0)
    return Engine(
        executor, drafter or NoDrafter(), policy, TOKENIZER, NoGrammars(), EngineOptions()
    )


def finished(engine, executor):
    """Run all steps; after each of them nothing is lost."""
    while engine.step_once():
        engine.check()
        executor.windows.check()


class Schedule:
    """Requests that begin alike, come at any time, and are sometimes cancelled."""

    def __init__(self, engine, executor, known, seed):
        self.engine, self.executor, self.known = engine, executor, known
        self.random, self.ear, self.asked = np.random.default_rng(seed), Ear(), {}

    def submit(self):
        pick = self.random.integers
        prompt = BASE[: pick(1, 180 if pick(2) else 6)]
        if pick(4) == 0:
            prompt = np.append(prompt, pick(97, 113, pick(1, 60)).astype(np.int32))
        how = {"n": int(pick(1, 3)), "seed": int(pick(2)), "temperature": float(pick(2))}
        request = ask(str(len(self.asked)), prompt, int(pick(1, 60)), **how)
        self.known.texts(request)
        self.asked[request.id] = request
        self.engine.submit(request, self.ear)

    def run(self, requests):
        while len(self.asked) < requests:
            if self.random.random() < 0.2:
                self.submit()
            if self.asked and self.random.random() < 0.02:
                self.engine.abort(str(self.random.integers(len(self.asked))))
            self.engine.step_once()
            self.engine.check()
            self.executor.windows.check()
        finished(self.engine, self.executor)
        for request in self.asked.values():
            for index, expected in enumerate(self.known.texts(request)):
                found = self.ear.tokens(request.id, index)
                aborted = self.ear.last(request.id, index).finish == Finish.ABORT
                assert found == expected[: len(found) if aborted else None]


@pytest.mark.parametrize(
    ("cache", "page", "drafts", "seed"),
    [("float32", 16, True, 2), ("float16", 16, False, 1), ("q8_0", 1, True, 0)],
)
def test_any_schedule_meets_the_same_texts(checkpoint, windowed, cache, page, drafts, seed):
    """Of window pages there are too few for all sequences at once, and of pages too."""
    kind, kv_dtype = CACHES[cache]
    source = checkpoint("gemma3_text", kind, vocab_size=VOCAB)
    known = Known(source, kv_dtype)
    executor = windowed(source, page=page, tokens=304, kv_dtype=kv_dtype)
    assert executor.describe()["cache_dtype"] == cache
    drafter = ErraticDrafter(known.following, VOCAB, seed) if drafts else None
    engine = engine_on(executor, drafter)
    Schedule(engine, executor, known, seed).run(16)
    assert engine.stats().preemptions > 0 or page == 1
    assert (engine.stats().acceptance_length > 1.05) == drafts
    known.executor.shutdown()


def answered(engine, executor, known, *requests):
    """Run requests to their ends; returns how many tokens of each were in the prefix cache."""
    ear = Ear()
    for request in requests:
        engine.submit(request, ear)
    finished(engine, executor)
    for request in requests:
        assert [ear.tokens(request.id)] == known.texts(request)
    return [ear.of(request.id)[0].cached_tokens for request in requests]


@pytest.mark.parametrize("page", [1, 16])
def test_a_text_goes_on_where_its_window_is_still_there(windowed, source, page):
    known, executor = Known(source), windowed(page=page, tokens=1408)
    engine, whole = engine_on(executor), 389 // page * page

    def cached(prompt):
        return answered(engine, executor, known, ask("r", prompt, 4))[0]

    assert cached(BASE[:390]) == 0
    assert cached(BASE[:390]) == whole, "its window was not needed by others"
    assert cached(np.append(BASE[:48], BASE[300:320])) == 0, "far behind the window"
    # The prefix index knew these pages already; now they have window pages again.
    assert cached(np.append(BASE[:48], BASE[340:350])) == 48
    cached(BASE[:395][::-1])
    assert cached(BASE[:390]) < whole, "others needed it"
    assert cached(BASE[:390]) == whole
    known.executor.shutdown()


def test_long_texts_need_no_more_window_pages(windowed, source):
    """Many windows long, several at once, with pages for one step and two windows alone."""
    known, executor = Known(source), windowed(tokens=1408)
    engine = engine_on(executor)
    asked = [ask(str(n), BASE[n : 390 + n], 60) for n in range(3)]
    assert answered(engine, executor, known, *asked) == [0, 0, 0]
    assert executor.limits.window_pages < 3 * (450 // 16)
    known.executor.shutdown()


@pytest.mark.parametrize("family", ["gemma4_text", "gpt_oss", "exaone4", "mistral", "qwen2"])
def test_layers_of_any_family(checkpoint, windowed, family):
    """Shared keys and values, sinks, windows everywhere: the logits of a long text, bit for bit."""
    changes = {"gemma4_text": {"vocab_size_per_layer_input": VOCAB}}.get(family, {})
    if family in ("mistral", "qwen2"):
        changes = {"sliding_window": 24}
    if family == "qwen2":
        changes |= {"use_sliding_window": True, "max_window_layers": 0}
    source = checkpoint(family, None, vocab_size=VOCAB, **changes)
    kept = CpuExecutor(source, replace(shaped(), window=0, window_pages=0), 1)
    found = []
    for executor in (kept, windowed(source)):
        with Driver(executor) as driver:
            driver.open(0, BASE[:200])
            logits = []
            while driver.sequences[0].kv_len < 230:
                result = driver.step([Row(0, known=20)])
                logits.append(result.logits(0, 0).numpy().copy())
            found.append(np.stack(logits))
    kept.shutdown()
    assert found[0].tobytes() == found[1].tobytes()


def test_what_was_given_back_is_never_read(windowed):
    executor = windowed()
    with Driver(executor) as driver:
        driver.open(0, BASE[:390])
        while driver.sequences[0].kv_len < 390:
            driver.step([Row(0, known=20)])
        sequence = driver.sequences[0]
        early = np.array(sequence.pages[:4], np.int32)
        assert executor.reusable_prefix_len(BASE[:64], pages=early) == 0
        text = TokenText(BASE[:70])
        with pytest.raises(EngineError, match="of a window was given back"):
            executor.open(SlotInit(1, text, 70, Sampling(), cached=64, pages=early))
        executor.windows.begin = lambda plan, trees: None  # As if nothing had been looked after.
        sequence.kv_len = 64
        with pytest.raises(EngineError, match="a page of a window that was given back"):
            driver.step([Row(0, known=4)])


def test_steps_are_timed(windowed, monkeypatch):
    """Start-up runs steps behind texts that it computes first."""
    monkeypatch.setattr(calibration, "SECONDS", 0.02)
    executor = windowed(slots=8, windows=8)
    assert calibration.measure_costs(executor).attend_ms >= 0.0
    executor.windows.check()
    assert not executor.capabilities.unwritten and executor.pages is None
