"""Prompt tokens of steps: a stream's gap is bounded, and so is, more widely, a step of prompts."""

import numpy as np
import pytest

from forerun.control.policy import FixedPolicy
from forerun.engine.chunked_prefill import ALONE_MS, LEAST, STEP_MS, PromptPace
from forerun.executors.toy import ToyExecutor
from tests.engine.toys import RecordingSink, ask, finish, limits, make, reference, step

SHAPE = {"page_size": 16, "pages": 1024, "slots": 4, "max_nodes": 512, "context": 4096}


class Timed(ToyExecutor):
    """A toy on a clock of its own: a step takes `fixed` milliseconds and some for every node."""

    def __init__(self, monkeypatch, each, fixed=0.0):
        super().__init__(limits(**SHAPE))
        self.now, self.each, self.fixed = 0.0, each, fixed
        self.steps = []  # (decoding rows, prompt tokens, milliseconds)
        for module in ("core", "step"):
            monkeypatch.setattr(f"forerun.engine.{module}.perf_counter", lambda: self.now)

    def begin(self, plan, trees, masks=None):
        counts = plan.known_counts
        ms = self.fixed + self.each * len(trees.tokens)
        self.now += ms / 1000.0
        self.steps.append((counts.count(1), sum(c for c in counts if c > 1), ms))
        return super().begin(plan, trees, masks)


def prompt(length, first=65):
    return np.array([first + place % 23 for place in range(length)], np.int32)


@pytest.mark.parametrize("each", [0.1, 2.4, 20.0])
def test_a_prompt_leaves_a_stream_its_steps(monkeypatch, each):
    """3,000 tokens beside a stream: every step is bounded, and as full as the bound allows."""
    executor = Timed(monkeypatch, each)
    engine, sink = make(executor=executor, policy=FixedPolicy(0, 0)), RecordingSink()
    stream, long = ask("a", prompt(20), 150, stop_tokens=()), ask("b", prompt(3000, 70), 4)
    engine.submit(stream, sink)
    step(engine, 5)
    engine.submit(long, sink)
    begun = len(executor.steps)
    finish(engine, check=False)
    beside = [step for step in executor.steps[begun:] if step[0] and step[1]]
    assert sum(tokens for _, tokens, _ in beside) == 3000
    fitting = min(max(STEP_MS / each, LEAST), 512)
    assert all(tokens <= fitting for _, tokens, _ in beside)
    assert len(beside) <= 3000 / (fitting - LEAST / 2) / 0.7 + 4
    # No text depends on how its prompt was cut.
    for request in (stream, long):
        assert sink.tokens(request.id) == reference(request)[0]


def test_a_prompt_alone_takes_whole_steps(monkeypatch):
    executor = Timed(monkeypatch, 1.0)
    engine, sink = make(executor=executor, policy=FixedPolicy(0, 0)), RecordingSink()
    for number in range(2):
        engine.submit(ask(str(number), prompt(3000, 65 + number), 4), sink)
        finish(engine, check=False)
    assert [tokens for _, tokens, _ in executor.steps if tokens] == 2 * [*5 * [512], 440]


def test_a_prompt_alone_makes_no_long_steps_either(monkeypatch):
    """A prompt that arrives, and a client that leaves, wait for the step."""
    executor = Timed(monkeypatch, 10.0)
    engine, sink = make(executor=executor, policy=FixedPolicy(0, 0)), RecordingSink()
    engine.submit(ask("long", prompt(3000), 4), sink)
    step(engine, 3)
    engine.submit(ask("short", prompt(60, 70), 4), sink)
    finish(engine, check=False)
    _, *later = [ms for _, tokens, ms in executor.steps if tokens]
    assert max(later) <= ALONE_MS and sum(later) >= 25_000.0


def test_where_decoding_is_slow_a_prompt_has_as_much_time(monkeypatch):
    """A large model whose weights alone take a second: prompts would never end in 32s."""
    executor = Timed(monkeypatch, 1.0, fixed=1000.0)
    engine, sink = make(executor=executor, policy=FixedPolicy(0, 0)), RecordingSink()
    engine.submit(ask("a", prompt(20), 300, stop_tokens=()), sink)
    step(engine, 5)
    engine.submit(ask("b", prompt(3000, 70), 4), sink)
    finish(engine, check=False)
    beside = [step for step in executor.steps if step[0] and step[1]]
    assert len(beside) <= 12 and max(ms for *_, ms in beside) <= 2002.0


@pytest.mark.parametrize("slow", ["decoding", "prompt"])
def test_a_step_that_was_slow_once_is_forgotten(monkeypatch, slow):
    """What compiles takes half a minute; soon after, steps are bounded by what they take."""
    executor = Timed(monkeypatch, 2.0)
    engine, sink = make(executor=executor, policy=FixedPolicy(0, 0)), RecordingSink()
    if slow == "prompt":
        executor.fixed = 30_000.0
    engine.submit(ask("a", prompt(40), 100, stop_tokens=()), sink)
    engine.step_once()
    executor.fixed = 0.0
    for number in range(8):
        executor.fixed = 30_000.0 if (number, slow) == (2, "decoding") else 0.0
        engine.step_once()
    engine.submit(ask("b", prompt(3000, 70), 4), sink)
    begun = len(executor.steps)
    finish(engine, check=False)
    beside = [ms for rows, tokens, ms in executor.steps[begun:] if rows and tokens]
    assert sum(ms > STEP_MS for ms in beside) == 0
    assert len(beside) <= 2 * 3000 * 2.0 / STEP_MS


def test_short_prompts_say_little_of_long_ones():
    """A prompt of a few tokens takes about as long as a decoding step, whatever a token costs."""
    pace = PromptPace()
    pace.observe(512, 512.0)
    for _ in range(100):
        pace.observe(LEAST - 1, 20.0)
    assert pace.bound(512, False) == STEP_MS // LEAST * LEAST


def test_the_first_prompt_of_all_is_not_bounded():
    assert PromptPace().bound(512, True) == PromptPace().bound(512, False) == 512
